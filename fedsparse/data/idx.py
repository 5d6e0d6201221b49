"""The IDX format of the MNIST family: strict reading, memory-mapped."""

import gzip
import hashlib
import zlib
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedsparse.data.cache import cache_folder, cached
from fedsparse.errors import DataError

Bytes = NDArray[np.uint8]


def read_idx(path: Path) -> Bytes:
    """Read one IDX file of bytes, plain or gzipped.

    The format: two zero bytes, the type (8: unsigned byte), the number of dimensions, each dimension as a big-endian
    uint32, then the numbers in C order (LeCun, http://yann.lecun.com/exdb/mnist).

    Raises
    ------
    DataError
        Where it is unreadable, no IDX file of bytes, truncated, or has bytes to spare.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            shape = _read_shape(path, file)
            # All there is, not what a damaged header may ask for.
            raw = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}.") from None
    if len(raw) != prod(shape):
        raise DataError(
            f"{path} is damaged: shape {shape} takes {prod(shape)} bytes, its header has {len(raw)} after it."
        )
    try:
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape)
    except ValueError as error:  # no bytes, in more dimensions or of larger sizes than there can be
        raise DataError(f"{path} is damaged: its header says shape {shape}: {error}.") from None


def _read_shape(path: Path, file: BinaryIO | gzip.GzipFile) -> tuple[int, ...]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is no IDX file of bytes: it starts with {magic.hex() or 'nothing'}.")
    head = file.read(4 * magic[3])
    if not magic[3] or len(head) < 4 * magic[3]:
        raise DataError(f"{path} is damaged: its header says {magic[3]} dimensions and has {len(head) // 4}.")
    return tuple(int(n) for n in np.frombuffer(head, dtype=">u4"))


def mapped(path: Path) -> Bytes:
    """Return the array of an IDX file as a memory map, so that all workers of a machine share one copy.

    A plain file is mapped where it lies. A gzipped one is decoded into the cache once; a changed source, told by its
    place, size and time, gets a new entry.

    Raises
    ------
    DataError
        As `read_idx`.
    """
    if path.suffix != ".gz":
        return _mapped_in_place(path)
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}.") from None
    # Package managers give all files one time, so the place counts too.
    identity = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    key = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    return cached(
        cache_folder() / f"{path.resolve().parent.name}-{path.name.removesuffix('.gz')}-{key}.npy", read_idx, path
    )


def _mapped_in_place(path: Path) -> Bytes:
    try:
        with path.open("rb") as file:
            shape = _read_shape(path, file)
            start, size = file.tell(), path.stat().st_size
        if size != start + prod(shape) or not prod(shape):
            return read_idx(path)  # which knows what is wrong
        return np.memmap(path, dtype=np.uint8, mode="r", offset=start, shape=shape)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}.") from None
