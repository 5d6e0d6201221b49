"""The IDX format of the MNIST family: strict reading, and a memory-mapped cache."""

import gzip
import logging
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsparse.errors import DataError

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return where decoded data sets are kept: $FEDSPARSE_CACHE, else below the user's cache folder."""
    if chosen := os.environ.get("FEDSPARSE_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedsparse"


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read one IDX file of bytes, plain or gzipped.

    Raises
    ------
    DataError
        Where it is unreadable, no IDX file of bytes, truncated, or has bytes to spare.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read {path}: {error}.") from None
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is no IDX file of bytes: it starts with {raw[:4].hex() or 'nothing'}.")
    rank = raw[3]
    head = 4 + 4 * rank
    shape = tuple(int(n) for n in np.frombuffer(raw[4:head], dtype=">u4")) if len(raw) >= head else ()
    expected = head + int(np.prod(shape, dtype=np.int64))
    if len(shape) != rank or len(raw) != expected:
        raise DataError(f"{path} is damaged: shape {shape} takes {expected} bytes, the file has {len(raw)}.")
    return np.frombuffer(raw, dtype=np.uint8, offset=head).reshape(shape)


def mapped(path: Path) -> NDArray[np.uint8]:
    """Return the array of an IDX file as a memory map, so that all workers of a machine share one copy.

    The decoded array is written to the cache once, by atomic rename; a changed source gets a new entry.
    """
    stat = path.stat()
    entry = cache_folder() / f"{path.resolve().parent.name}-{path.name}-{stat.st_size}-{stat.st_mtime_ns}.npy"
    return cached(entry, lambda: read_idx(path))


def cached(entry: Path, make) -> NDArray[np.uint8]:  # type: ignore[no-untyped-def]
    """Return the array kept under `entry`, made on first use; in memory only where the cache cannot be written."""
    if not entry.exists():
        array = make()
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=entry.parent, suffix=".partial")
            try:
                with os.fdopen(handle, "wb") as file:
                    np.save(file, array, allow_pickle=False)
                os.replace(partial, entry)
            except BaseException:
                os.unlink(partial)
                raise
        except OSError as error:
            log.warning("data is kept in memory, once per process: cannot write %s (%s)", entry, error.strerror)
            return array  # type: ignore[no-any-return]
    try:
        return np.load(entry, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (OSError, ValueError):
        log.warning("the cache entry %s is damaged and is made again", entry)
        entry.unlink(missing_ok=True)
        return make()  # type: ignore[no-any-return]
