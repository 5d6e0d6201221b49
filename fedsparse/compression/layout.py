"""How named arrays lie in one flat update vector."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import Vector
from fedsparse.compression.compressor import Bounds
from fedsparse.errors import PayloadError

Arrays = Mapping[str, NDArray[np.generic]]

# Running statistics of normalisation layers are measurements, not sums of steps: a partly sent variance can turn
# negative. They travel exactly, like every integer.
DEFAULT_EXACT = ("*running_mean", "*running_var")


@dataclass(frozen=True)
class Entry:
    """One named array: where it starts in its section, and what it is."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    size: int


@dataclass(frozen=True)
class Layout:
    """Which arrays of a model are compressed, which travel exactly, and in which order.

    Parameters
    ----------
    compressed : tuple of Entry
        Floating-point arrays, flattened in C order one after the other into a vector of length `d`.
    exact : tuple of Entry
        Integers, booleans and the named exceptions, sent as raw bytes.
    """

    compressed: tuple[Entry, ...]
    exact: tuple[Entry, ...]

    @classmethod
    def of(cls, arrays: Arrays, exact: Sequence[str] = DEFAULT_EXACT, frozen: Sequence[str] = ()) -> "Layout":
        """Lay out `arrays` in their own order; both sides get the same from the same model.

        Parameters
        ----------
        arrays : mapping of str to array
            The global model as the server sends it.
        exact : sequence of str
            Shell-style patterns of floating-point arrays that travel exactly.
        frozen : sequence of str
            Names of arrays that are not trained, so never sent.
        """
        skipped = set(frozen)
        compressed: list[Entry] = []
        exactly: list[Entry] = []
        for name, array in arrays.items():
            if name in skipped:
                continue
            entry = Entry(name, tuple(array.shape), array.dtype, array.size)
            as_is = array.dtype.kind != "f" or any(fnmatchcase(name, pattern) for pattern in exact)
            (exactly if as_is else compressed).append(entry)
        return cls(tuple(compressed), tuple(exactly))

    @cached_property
    def bounds(self) -> Bounds:
        """Boundaries of the tensors in the flat vector: 0 first, d last."""
        return np.array([0, *accumulate(entry.size for entry in self.compressed)], dtype=np.int64)

    @property
    def d(self) -> int:
        """Length of the flat vector."""
        return int(self.bounds[-1])

    @cached_property
    def exact_bytes(self) -> int:
        """Bytes that the exact arrays take on the wire."""
        return sum(entry.size * entry.dtype.itemsize for entry in self.exact)

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes that one client's whole update takes when nothing is compressed."""
        return self.exact_bytes + sum(entry.size * entry.dtype.itemsize for entry in self.compressed)

    def difference(self, new: Arrays, old: Arrays) -> Vector:
        """Return Delta = new - old as one float32 vector; what `new` leaves out did not change."""
        delta = np.zeros(self.d, dtype=np.float32)
        for entry, start in zip(self.compressed, self.bounds, strict=False):
            if (after := new.get(entry.name)) is None:
                continue
            self._check(entry, after)
            before = old[entry.name]
            # float64 arrays are subtracted as such: their difference may be below float32's rounding of them.
            wide = np.float64 if entry.dtype.itemsize > 4 else np.float32
            target = delta[start : start + entry.size].reshape(entry.shape)
            with np.errstate(over="ignore", invalid="ignore"):
                target[...] = np.subtract(after, before, dtype=wide)
        return delta

    def apply(self, old: Arrays, delta: Vector, exact: Arrays) -> dict[str, NDArray[np.generic]]:
        """Return the model ``old + delta`` with the exact arrays in their place, each in its own dtype."""
        result = {name: np.asarray(array) for name, array in old.items()}
        for entry, start in zip(self.compressed, self.bounds, strict=False):
            step = delta[start : start + entry.size].reshape(entry.shape)
            result[entry.name] = np.add(old[entry.name], step, dtype=np.result_type(entry.dtype, step.dtype)).astype(
                entry.dtype, copy=False
            )
        result.update({name: np.asarray(array) for name, array in exact.items()})
        return result

    def pack_exact(self, arrays: Arrays, fallback: Arrays) -> bytes:
        """Return the exact arrays as raw little-endian bytes in layout order."""
        parts = []
        for entry in self.exact:
            array = arrays.get(entry.name, fallback[entry.name])
            self._check(entry, array)
            parts.append(np.ascontiguousarray(array, dtype=entry.dtype.newbyteorder("<")).tobytes())
        return b"".join(parts)

    def unpack_exact(self, data: bytes | memoryview) -> dict[str, NDArray[np.generic]]:
        """Undo `pack_exact`; refuse a wrong length and values that are not finite."""
        if len(data) != self.exact_bytes:
            raise PayloadError(f"the exact arrays of this model take {self.exact_bytes} bytes, got {len(data)}.")
        arrays, at = {}, 0
        for entry in self.exact:
            flat = np.frombuffer(data, dtype=entry.dtype.newbyteorder("<"), count=entry.size, offset=at)
            if entry.dtype.kind == "f" and not np.isfinite(flat).all():
                raise PayloadError(f"array {entry.name!r} holds values that are not finite.")
            arrays[entry.name] = flat.astype(entry.dtype, copy=False).reshape(entry.shape)
            at += entry.size * entry.dtype.itemsize
        return arrays

    @staticmethod
    def _check(entry: Entry, array: NDArray[np.generic]) -> None:
        if tuple(array.shape) != entry.shape:
            raise PayloadError(f"array {entry.name!r} has shape {tuple(array.shape)}, the model has {entry.shape}.")
