"""One process at a time in an output folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsparse.errors import ConfigError

LOCK = ".lock"


@contextmanager
def exclusive(folder: str | os.PathLike[str], busy: str | None = None) -> Iterator[None]:
    """Hold a folder, which is made where it is missing, against other processes.

    The kernel drops the lock when a process dies, so none is ever stale.

    Parameters
    ----------
    folder : path
    busy : str, optional
        What to say where another process holds it.

    Raises
    ------
    ConfigError
        Another process holds it, or it cannot be written.
    """
    path = Path(folder).absolute() / LOCK
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _take(path)
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
