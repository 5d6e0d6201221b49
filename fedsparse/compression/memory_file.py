"""The file of one client's error memory.

Little endian::

    magic "FSMEM", version u8 = 3
    flags u8                        1: has a pending update, 2: has a velocity, 4: restarted from zero
    d, id of the pending update     u64, u64
    lengths of run and client       u16, u16
    lengths of frame and attachment u64, u64
    run, client                     UTF-8
    residual e                      a vector, see `memory_vectors`
    velocity u                      a vector, only with flag 2
    frame, attachment               bytes
    checksum                        CRC-32 of all before, with the 64-bit sums of the vectors in their place

Version 2 had plain float32 vectors; version 1 no velocity and a CRC-32 of the vectors themselves. Both can still be
read.
"""

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression import memory_vectors
from fedsparse.compression.base import Vector
from fedsparse.errors import MemoryStoreError

_MAGIC, _VERSION, _READABLE = b"FSMEM", 3, (1, 2, 3)
_HEADER = struct.Struct("<5sBBQQHHQQ")
_PENDING, _VELOCITY, _RESTART = 1, 2, 4
RESTARTED = "it restarted from zero with an earlier update, which was not accepted."


@dataclass(frozen=True)
class Pending:
    """An update that was sent and may or may not have been accepted.

    Parameters
    ----------
    update_id : int
        The id under which the server asked for it.
    frame : bytes
        C(p) as it was sent.
    attachment : bytes
        Whatever else the reply carried, so that it can be sent again unchanged.
    """

    update_id: int
    frame: bytes
    attachment: bytes = b""


@dataclass(frozen=True)
class Stored:
    """What the file holds.

    Parameters
    ----------
    run, client : str
        Whose it is.
    residual : array of float32, shape (d,)
        The error memory e.
    velocity : array of float32, shape (d,), optional
        u of momentum correction; None where it is zero.
    pending : Pending, optional
        The last update that was sent.
    restart : str, optional
        Why the memory restarted from zero, where the server may not know yet that it did; a file keeps no more of it
        than that.
    """

    run: str
    client: str
    residual: Vector
    velocity: Vector | None = None
    pending: Pending | None = None
    restart: str | None = None


def read_file(path: Path) -> Stored:
    """Read a file.

    Raises
    ------
    FileNotFoundError
        There is none.
    MemoryStoreError
        It cannot be read, is damaged, or is something else.
    """
    try:
        with open(path, "rb") as file:
            return _read(path, file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise MemoryStoreError(f"cannot read {path}: {error.strerror}.") from None


def _read(path: Path, file: BinaryIO) -> Stored:
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[:5] != _MAGIC or head[5] not in _READABLE:
        raise MemoryStoreError(f"{path} is no error memory of this version.")
    _, version, flags, d, update_id, n_run, n_client, n_frame, n_attachment = _HEADER.unpack(head)
    names = file.read(n_run + n_client)
    read = memory_vectors.unpack if version == _VERSION else _plain
    try:
        found = [read(file, d) for _ in range(2 if flags & _VELOCITY else 1)]
    except MemoryStoreError as error:
        raise MemoryStoreError(f"{path} is damaged: {error}") from None
    if (expected := file.tell() + n_frame + n_attachment + 4) != os.fstat(file.fileno()).st_size:
        raise MemoryStoreError(f"{path} is damaged: it should have {expected} bytes.")
    frame, attachment, checksum = file.read(n_frame), file.read(n_attachment), file.read(4)
    digest = _whole if version == 1 else memory_vectors.digest
    sums = [digest(part) for _, parts in found for part in parts]
    if _checksum(head, names, *sums, frame, attachment) != checksum:
        raise MemoryStoreError(f"{path} is damaged: the checksum does not match.")
    return Stored(
        run=names[:n_run].decode(),
        client=names[n_run:].decode(),
        residual=found[0][0],
        velocity=found[1][0] if flags & _VELOCITY else None,
        pending=Pending(update_id, frame, attachment) if flags & _PENDING else None,
        restart=RESTARTED if flags & _RESTART else None,
    )


def parts_of(stored: Stored, *, half: bool = False) -> list[bytes | memoryview]:
    """Return what to write, one part after the other; vectors in single or half precision."""
    run, client, pending = stored.run.encode(), stored.client.encode(), stored.pending
    frame, attachment = (pending.frame, pending.attachment) if pending else (b"", b"")
    known = {_PENDING: pending, _VELOCITY: stored.velocity, _RESTART: stored.restart}
    head = _HEADER.pack(
        _MAGIC,
        _VERSION,
        sum(flag for flag, value in known.items() if value is not None),
        stored.residual.size,
        pending.update_id if pending else 0,
        len(run),
        len(client),
        len(frame),
        len(attachment),
    )
    vectors = [vector for vector in (stored.residual, stored.velocity) if vector is not None]
    packed = [part for vector in vectors for part in memory_vectors.pack(vector, half=half)]
    names, tail = head + run + client, frame + attachment
    return [names, *map(_raw, packed), tail, _checksum(names, *map(memory_vectors.digest, packed), tail)]


def _plain(file: BinaryIO, d: int) -> tuple[Vector, list[bytes | NDArray[np.generic]]]:
    """Read a vector of versions 1 and 2."""
    if 4 * d > os.fstat(file.fileno()).st_size - file.tell():
        raise MemoryStoreError("it ends too early.")
    stored = np.fromfile(file, dtype="<f4", count=d)
    return stored.astype(np.float32, copy=False), [stored]


def _checksum(*parts: bytes | memoryview) -> bytes:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return struct.pack("<I", checksum)


def _whole(part: bytes | NDArray[np.generic]) -> bytes:
    """Return a part itself, for the checksum of version 1."""
    return bytes(part)


def _raw(part: bytes | NDArray[np.generic]) -> memoryview:
    return memoryview(part).cast("B")  # type: ignore[arg-type]
