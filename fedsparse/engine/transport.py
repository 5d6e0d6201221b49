"""What travels between server and clients: records as plain values, big arrays as buffers that are never copied.

A packed record holds names, scalars and, for each array, its bytes as a `pickle.PickleBuffer`: pickle protocol 5
(and so Ray's object store) moves those out of band, and the receiver reads them where they lie.
"""

from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedsparse.protocol import array_view

from ._flwr import filled

OUT_OF_BAND = 4096  # bytes; smaller data is cheaper inside the pickle

PackedArrays = list[tuple[str, str, tuple[int, ...], str, Any]]
Packed = list[tuple[str, str, Any]]


class Lease:
    """A buffer that several arrays read, with the `bytes` copy that some code insists on made at most once."""

    __slots__ = ("_copy", "view")

    def __init__(self, data: Any) -> None:
        self.view = memoryview(data).toreadonly()
        whole = self.view.obj
        self._copy: bytes | None = whole if isinstance(whole, bytes) and len(whole) == self.view.nbytes else None

    def copy(self) -> bytes:
        """Return the buffer as `bytes`."""
        if self._copy is None:
            self._copy = bytes(self.view)
        return self._copy


class SharedArray(Array):
    """An `Array` that was received: its data may lie in memory that others read too.

    `buffer` is a read-only view of the serialized data, without a copy; `data` is the same as `bytes`, copied at the
    first use where it is no `bytes` already; `numpy()` returns a fresh writable array, as for every `Array`, but in a
    tenth of the time if the array is small.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], stype: str, lease: Lease) -> None:
        self.__dict__.update(dtype=dtype, shape=shape, stype=stype, _lease=lease)

    @property
    def buffer(self) -> memoryview:
        """Read-only view of the serialized data."""
        lease: Lease = self.__dict__["_lease"]
        return lease.view

    @property
    def data(self) -> bytes:
        """The serialized data as bytes."""
        lease: Lease = self.__dict__["_lease"]
        return lease.copy()

    @data.setter
    def data(self, value: bytes) -> None:
        self.__dict__["_lease"] = Lease(value)

    def numpy(self) -> NDArray[Any]:
        """Return a writable copy as a NumPy array."""
        if self.stype != "numpy.ndarray":
            raise TypeError(f"Unsupported serialization type for numpy conversion: '{self.stype}'")
        return np.array(array_view(self), order="K")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        mine, theirs = (self.dtype, self.shape, self.stype), (other.dtype, other.shape, other.stype)
        return mine == theirs and self.buffer == memoryview(buffer_of(other))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


def buffer_of(array: Array) -> Any:
    """Return an array's serialized data without a copy: `bytes`, or a view of shared memory."""
    return array.buffer if isinstance(array, SharedArray) else array.data


def pack_arrays(record: ArrayRecord) -> PackedArrays:
    """Turn an ArrayRecord into plain values and buffers."""
    packed: PackedArrays = []
    for name, array in record.items():
        data = buffer_of(array)
        if len(data) >= OUT_OF_BAND:
            data = PickleBuffer(data)
        elif not isinstance(data, bytes):
            data = bytes(data)
        packed.append((name, array.dtype, tuple(array.shape), array.stype, data))
    return packed


def lease_arrays(packed: PackedArrays) -> PackedArrays:
    """Wrap the buffers of packed arrays, so that all records unpacked from them share one `bytes` copy at most."""
    return [(name, dtype, shape, stype, Lease(data)) for name, dtype, shape, stype, data in packed]


def copy_arrays(packed: PackedArrays) -> PackedArrays:
    """Copy all buffers to memory of our own, so that the sender's memory can be freed."""
    return [(name, dtype, shape, stype, bytes(data)) for name, dtype, shape, stype, data in packed]


def unpack_arrays(packed: PackedArrays) -> ArrayRecord:
    """Build an ArrayRecord of `SharedArray`s."""
    arrays = {
        name: SharedArray(dtype, shape, stype, data if isinstance(data, Lease) else Lease(data))
        for name, dtype, shape, stype, data in packed
    }
    return filled(ArrayRecord(), arrays)


def pack(content: RecordDict, share: Callable[[ArrayRecord], Any] | None = None) -> Packed:
    """Turn a message's content into plain values.

    Parameters
    ----------
    content : RecordDict
        The content; it may change afterwards without changing the result.
    share : callable, optional
        Returns a key for an ArrayRecord that the receiver has, or gets, by another way; None where it does not.
    """
    packed: Packed = []
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            key = share(record) if share is not None else None
            packed.append((name, "array", pack_arrays(record)) if key is None else (name, "shared", key))
        else:
            packed.append((name, "config" if isinstance(record, ConfigRecord) else "metric", _values(record)))
    return packed


def unpack(packed: Packed, shared: Callable[[Any], PackedArrays] | None = None) -> RecordDict:
    """Build a message's content from `pack`'s result; nothing mutable is shared with it.

    Parameters
    ----------
    packed : list
        Result of `pack`.
    shared : callable, optional
        Returns the packed arrays for a key that `share` gave.
    """
    content: dict[str, Any] = {}
    for name, kind, value in packed:
        if kind == "array":
            content[name] = unpack_arrays(value)
        elif kind == "shared":
            assert shared is not None
            content[name] = unpack_arrays(shared(value))
        else:
            content[name] = filled(ConfigRecord() if kind == "config" else MetricRecord(), _values(value))
    return filled(RecordDict(), content)


def packed_bytes(packed: Packed) -> int:
    """Return how many bytes of array data a packed content holds itself."""
    return sum(_size(data) for _, kind, value in packed if kind == "array" for *_, data in value)


def _size(data: Any) -> int:
    return data.raw().nbytes if isinstance(data, PickleBuffer) else memoryview(data).nbytes


def _values(record: Any) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in record.items()}
