"""What clients and server say to each other, beyond Flower's own records.

Server to client, in a train message, a ConfigRecord under `KEY`: the `Directive`. Client to server, in place of
the app's ArrayRecord: one ArrayRecord with the frame (and the exact arrays, where the model has some), and a
ConfigRecord under `KEY`: the `Receipt`. The rest of both messages belongs to the user's strategy and app.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import Any, TypeVar, get_type_hints

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedsparse.compression.layout import DEFAULT_EXACT
from fedsparse.errors import PayloadError

KEY = "fedsparse"
JOB_KEY = "job"
WORK_KEY, MAX_STEPS = "fedsparse.work", "max-steps"  # a record of the train message: local steps at most
FRAME_STYPE, EXACT_STYPE = "fedsparse.v1", "fedsparse.exact.v1"
FRAME_NAME, EXACT_NAME = "frame", "exact"
PROTOCOL = 3  # 2: momentum; 3: half


@dataclass(frozen=True)
class Directive:
    """How one client is to compress its next update.

    Parameters
    ----------
    run, client : str
        Names of the run and of the client; together they name the error memory.
    seed, server_round : int
        Key the compressor's random draws.
    spec : str
        The compressor of this round.
    update_id : int
        Id under which the update will be accepted, once.
    ack : int
        Id of this client's last accepted update; -1 where there is none.
    memory : bool
        Whether what is not sent is remembered.
    momentum : float
        Momentum correction of the client's updates, 0 for none (Lin et al. 2018, Section 3.2).
    half : bool
        Whether the memory is kept in half precision.
    exact, frozen : str
        Patterns and names as in `Layout.of`, one a line.
    """

    run: str
    client: str
    seed: int
    server_round: int
    spec: str
    update_id: int
    ack: int = -1
    memory: bool = True
    momentum: float = 0.0
    half: bool = False
    exact: str = "\n".join(DEFAULT_EXACT)
    frozen: str = ""
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Receipt:
    """What the client says about an update that it sends.

    Parameters
    ----------
    update_id : int
        The id it was asked for.
    residual_norm : float
        ``||e||_2`` of the error memory after this update.
    update_norm : float
        ``||Delta||_2`` before compression.
    restored, memory_reset : bool
        Whether an update that was not accepted went back into the memory; whether a memory that was damaged or gone
        restarted from zero.
    """

    update_id: int
    residual_norm: float = 0.0
    update_norm: float = 0.0
    restored: bool = False
    memory_reset: bool = False
    protocol: int = PROTOCOL


M = TypeVar("M", Directive, Receipt)
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
_HINTS: dict[type, dict[str, type]] = {kind: get_type_hints(kind) for kind in (Directive, Receipt)}


def to_record(message: Directive | Receipt) -> ConfigRecord:
    """Write a directive or a receipt as a ConfigRecord."""
    return ConfigRecord(dict(vars(message)))


def from_record(kind: type[M], record: Mapping[str, Any]) -> M:
    """Read a directive or a receipt; refuse what another version or a stranger wrote."""
    if record.get("protocol") != PROTOCOL:
        raise PayloadError(
            f"the other side speaks fedsparse protocol {record.get('protocol')!r}, this one {PROTOCOL}: "
            "update the older side."
        )
    for name, hint in _HINTS[kind].items():
        if type(record.get(name)) is not hint:
            raise PayloadError(f"{kind.__name__} field {name!r} must be {hint.__name__}, got {record.get(name)!r}.")
    return kind(**{item.name: record[item.name] for item in fields(kind)})


def unpack_arrays(record: ArrayRecord) -> tuple[bytes, bytes]:
    """Return a reply's frame and its exact arrays, as bytes."""
    frame, exact = record.get(FRAME_NAME), record.get(EXACT_NAME)
    if frame is None or frame.stype != FRAME_STYPE:
        raise PayloadError(
            "the reply is not compressed: put CompressionMod() first in the mods of the ClientApp, as in "
            "ClientApp(mods=[CompressionMod(...)])."
        )
    if len(record) > 1 + (exact is not None) or (exact is not None and exact.stype != EXACT_STYPE):
        raise PayloadError(f"the reply holds unexpected arrays: {', '.join(record)}.")
    return frame.data, exact.data if exact is not None else b""


def array_view(array: Array) -> NDArray[np.generic]:
    """Return an Array's numbers without copying them: a read-only view of its serialized data.

    Raises
    ------
    PayloadError
        Where the data is no NumPy array in C or Fortran order.
    """
    if array.stype != "numpy.ndarray":
        raise PayloadError(f"an array of type {array.stype!r} cannot be read as numbers.")
    # The Ray engine's arrays lie in shared memory; their `data` would be a copy.
    data = memoryview(getattr(array, "buffer", None) or array.data)
    try:
        # Version 1.0 of the format has the header's length in bytes 8 and 9; any other is read without the cache.
        head = bytes(data[:4096])
        length = 10 + int.from_bytes(head[8:10], "little") if head[6:8] == b"\x01\x00" else 4096
        shape, fortran, dtype, start = _npy_header(head[:length])
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        count = prod(shape)
        flat = np.frombuffer(data, dtype=dtype, count=count, offset=start) if count else np.empty(0, dtype)
    except ValueError as error:
        raise PayloadError(f"an array is damaged: {error}.") from None
    view = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    view.flags.writeable = False
    return view


@lru_cache(maxsize=1024)
def _npy_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, order, dtype and where the numbers begin; the same few headers come in every message."""
    stream = BytesIO(head)
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    return *read(stream), stream.tell()


def to_array(numbers: NDArray[np.generic]) -> Array:
    """Return what ``Array(numbers)`` does, in a quarter of the time: a model's few headers are written once."""
    if not numbers.flags.c_contiguous or numbers.dtype.hasobject:
        return Array(numbers)
    data = b"".join((_npy_head(numbers.dtype, numbers.shape), memoryview(numbers)))  # type: ignore[arg-type]
    return Array(str(numbers.dtype), numbers.shape, "numpy.ndarray", data)


@lru_cache(maxsize=1024)
def _npy_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return what a file with an array in C order begins with."""
    stream = BytesIO()
    described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(stream, described)
    return stream.getvalue()


def views(record: ArrayRecord) -> dict[str, NDArray[np.generic]]:
    """Return read-only views of all arrays of a record."""
    return {name: array_view(array) for name, array in record.items()}


def records(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return a message's records of one kind; Flower's own properties write each of them into the message again."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def only(content: RecordDict, kind: type[R]) -> R:
    """Return the single record of a kind that a message must have."""
    found = records(content, kind)
    if len(found) != 1:
        raise PayloadError(f"the message must hold exactly one {kind.__name__}, it has {len(found)}.")
    return next(iter(found.values()))


def without_key(content: RecordDict) -> RecordDict:
    """Return a shallow copy of a message's content without our own record."""
    rest = content.copy()
    rest.pop(KEY, None)
    return rest


def number_metric(metrics: MetricRecord, key: str) -> float:
    """Return a metric that must be one finite number."""
    value = metrics.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise PayloadError(f"the reply's metric {key!r} must be one finite number, got {value!r}.")
    return float(value)
