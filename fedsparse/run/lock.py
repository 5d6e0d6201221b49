"""One process at a time in an output folder."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from fedsparse.errors import ConfigError

LOCK = ".lock"
SERVERAPP_LOCK = ".serverapp.lock"  # of the process that conducts a run for the one that holds LOCK
LOOK_S = 0.2


@contextmanager
def exclusive(
    folder: str | os.PathLike[str], busy: str | None = None, *, name: str = LOCK, patience: float = 0.0
) -> Iterator[None]:
    """Hold a folder, which is made where it is missing, against other processes.

    The kernel drops the lock when a process dies, so none is ever stale.

    Parameters
    ----------
    folder : path
    busy : str, optional
        What to say where another process holds it.
    name : str
        Of the lock's file.
    patience : float
        Seconds to wait for another process.

    Raises
    ------
    ConfigError
        Another process holds it, or it cannot be written.
    """
    path, deadline = Path(folder).absolute() / name, time.monotonic() + patience
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while (handle := _take(path)) is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
    except OSError as error:
        raise ConfigError(f"cannot write into the output folder {folder}: {error.strerror}.") from None
    if handle is None:
        raise ConfigError(
            busy or f"another fedsparse is writing into {folder}: wait for it, or choose another folder with --out."
        )
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
        with suppress(OSError):  # they stay where something was written
            for parent in made:
                parent.rmdir()


def unconducted(folder: str | os.PathLike[str], patience: float = 0.0) -> AbstractContextManager[None]:
    """Hold a run's folder against ServerApps, which may outlive the `fedsparse run` that started them.

    One whose run was stopped notices with its next request.
    """
    return exclusive(
        folder,
        f"the ServerApp of an earlier run still writes into {folder}: wait for it, stop it with `fedsparse deploy stop "
        "DIR`, or choose another folder with --out.",
        name=SERVERAPP_LOCK,
        patience=patience,
    )


def _take(path: Path) -> int | None:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        # Whoever held it before may have removed the file that was opened here.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)
