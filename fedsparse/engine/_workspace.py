"""Temporary folders that do not pile up: one that a killed process left behind is removed by the next one."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

from fedsparse.processes import stop_all

PREFIX = "fedsparse-"
BASE = Path("/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir())


class Workspace:
    """A private temporary folder, locked for as long as its owner lives.

    Ray's sockets lie below it, and their paths must stay under 107 bytes, which a long TMPDIR would break: it is in
    ``/tmp`` where that can be written.
    """

    def __init__(self) -> None:
        _sweep(BASE)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=BASE))
        self._lock = _lock(self.path)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sweep(base: Path) -> None:
    """Remove folders of this user whose owner is gone, and end the processes that still use them."""
    for folder in base.glob(f"{PREFIX}*"):
        try:
            lock = _lock(folder) if folder.joinpath("lock").stat().st_uid == os.getuid() else None
        except OSError:
            continue
        if lock is not None:
            stop_all(str(folder), None)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder; None where another process has it."""
    handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
