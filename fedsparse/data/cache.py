"""Decoded arrays on disk, shared by all processes of a machine through memory maps."""

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)
P = ParamSpec("P")


def cache_folder() -> Path:
    """Return where decoded data sets are kept: $FEDSPARSE_CACHE, else below the user's cache folder."""
    if chosen := os.environ.get("FEDSPARSE_CACHE"):
        return Path(chosen)
    # Unlike Path.home, expanduser does not raise where there is no home: the folder then cannot be written, no more.
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "fedsparse"


def cached(entry: Path, make: Callable[P, NDArray[Any]], *args: P.args, **kwargs: P.kwargs) -> NDArray[Any]:
    """Return the array kept under `entry` as a memory map, made on first use by ``make(*args, **kwargs)``.

    Entries appear by atomic rename: several processes may make the same one at the same time. Where the cache cannot
    be written, the array stays in this process's memory, and the log says so.
    """
    array = _open(entry)
    if array is not None:
        return array
    made = make(*args, **kwargs)
    try:
        _store(entry, made)
    except OSError as error:
        log.warning("data is kept in memory, once per process: cannot write %s (%s)", entry, error.strerror)
        return made
    array = _open(entry)
    return made if array is None else array


def _open(entry: Path) -> NDArray[Any] | None:
    try:
        return np.load(entry, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        if not isinstance(error, NotADirectoryError):
            log.warning("the cache entry %s cannot be used and is made again (%s)", entry, error)
        return None


def _store(entry: Path, array: NDArray[Any]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=entry.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, array, allow_pickle=False)
        os.chmod(partial, 0o644)  # mkstemp keeps others out, who may share the cache
        os.replace(partial, entry)
    except BaseException:
        os.unlink(partial)
        raise
