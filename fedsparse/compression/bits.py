"""Small unsigned integers packed bit by bit, without Python loops."""

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]


def packed_size(count: int, width: int) -> int:
    """Return the bytes that `count` integers of `width` bits take."""
    whole, rest = divmod(width, 8)
    return count * whole + (count * rest + 7) // 8


def pack(values: NDArray[np.integer], width: int) -> bytes:
    """Pack integers in 0 .. 2^width - 1: whole low bytes plane by plane, then the high bits eight values at a time."""
    whole, rest = divmod(width, 8)
    numbers = values.astype(np.uint64)
    planes = [((numbers >> np.uint64(8 * plane)) & np.uint64(255)).astype(np.uint8) for plane in range(whole)]
    packed = b"".join(plane.tobytes() for plane in planes)
    if rest:
        high = np.zeros(-(-numbers.size // 8) * 8, dtype=np.uint64)
        high[: numbers.size] = numbers >> np.uint64(8 * whole)
        # Eight values of `rest` bits fill exactly `rest` bytes of one 64-bit word.
        words = np.bitwise_or.reduce(high.reshape(-1, 8) << (np.arange(8, dtype=np.uint64) * np.uint64(rest)), axis=1)
        rows = words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :rest]
        packed += rows.tobytes()[: packed_size(numbers.size, rest)]
    return packed


def unpack(data: bytes | memoryview, width: int, count: int) -> U64:
    """Undo `pack`; `data` must have exactly ``packed_size(count, width)`` bytes."""
    whole, rest = divmod(width, 8)
    raw = np.frombuffer(data, dtype=np.uint8)
    if raw.size != packed_size(count, width):
        raise ValueError(f"{count} integers of {width} bits take {packed_size(count, width)} bytes, got {raw.size}")
    numbers = np.zeros(count, dtype=np.uint64)
    for plane in range(whole):
        numbers |= raw[plane * count : (plane + 1) * count].astype(np.uint64) << np.uint64(8 * plane)
    if rest:
        groups = -(-count // 8)
        rows = np.zeros((groups, 8), dtype=np.uint8)
        tail = np.zeros(groups * rest, dtype=np.uint8)
        tail[: raw.size - whole * count] = raw[whole * count :]
        rows[:, :rest] = tail.reshape(groups, rest)
        words = rows.reshape(-1).view("<u8")
        shifts = np.arange(8, dtype=np.uint64) * np.uint64(rest)
        high = (words[:, None] >> shifts) & np.uint64((1 << rest) - 1)
        numbers |= high.reshape(-1)[:count] << np.uint64(8 * whole)
    return numbers
