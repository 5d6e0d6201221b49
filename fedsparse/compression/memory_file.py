"""The file of one client's error memory.

Little endian::

    magic "FSMEM", version u8 = 2
    flags u8                        1: has a pending update, 2: has a velocity
    d, id of the pending update     u64, u64
    lengths of run and client       u16, u16
    lengths of frame and attachment u64, u64
    run, client                     UTF-8
    residual e                      float32 x d
    velocity u                      float32 x d, only with flag 2
    frame, attachment               bytes
    checksum                        CRC-32 of all before, with the 64-bit sums of the vectors in their place

Version 1 had no velocity and a CRC-32 of the vectors themselves; it can still be read.
"""

import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedsparse.compression.base import Vector
from fedsparse.errors import MemoryStoreError

_MAGIC, _VERSION, _READABLE = b"FSMEM", 2, (1, 2)
_HEADER = struct.Struct("<5sBBQQHHQQ")
_PENDING, _VELOCITY = 1, 2


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
    """

    run: str
    client: str
    residual: Vector
    velocity: Vector | None = None
    pending: Pending | None = None


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
    _, _, flags, d, update_id, n_run, n_client, n_frame, n_attachment = _HEADER.unpack(head)
    num_vectors = 2 if flags & _VELOCITY else 1
    expected = _HEADER.size + n_run + n_client + num_vectors * 4 * d + n_frame + n_attachment + 4
    if os.fstat(file.fileno()).st_size != expected:
        raise MemoryStoreError(f"{path} is damaged: it should have {expected} bytes.")
    names = file.read(n_run + n_client)
    vectors = [np.fromfile(file, dtype="<f4", count=d).astype(np.float32, copy=False) for _ in range(num_vectors)]
    frame, attachment, checksum = file.read(n_frame), file.read(n_attachment), file.read(4)
    digest: Callable[[Vector], bytes | memoryview] = _raw if head[5] == 1 else _sums
    if _checksum(head, names, *map(digest, vectors), frame, attachment) != checksum:
        raise MemoryStoreError(f"{path} is damaged: the checksum does not match.")
    return Stored(
        run=names[:n_run].decode(),
        client=names[n_run:].decode(),
        residual=vectors[0],
        velocity=vectors[1] if flags & _VELOCITY else None,
        pending=Pending(update_id, frame, attachment) if flags & _PENDING else None,
    )


def parts_of(stored: Stored) -> list[bytes | memoryview]:
    """Return what to write, one part after the other; the vectors are not copied."""
    run, client, pending = stored.run.encode(), stored.client.encode(), stored.pending
    frame, attachment = (pending.frame, pending.attachment) if pending else (b"", b"")
    head = _HEADER.pack(
        _MAGIC,
        _VERSION,
        (_PENDING if pending else 0) | (_VELOCITY if stored.velocity is not None else 0),
        stored.residual.size,
        pending.update_id if pending else 0,
        len(run),
        len(client),
        len(frame),
        len(attachment),
    )
    vectors = [vector for vector in (stored.residual, stored.velocity) if vector is not None]
    names, tail = head + run + client, frame + attachment
    return [names, *map(_raw, vectors), tail, _checksum(names, *map(_sums, vectors), tail)]


def _checksum(*parts: bytes | memoryview) -> bytes:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return struct.pack("<I", checksum)


def _sums(vector: Vector) -> bytes:
    """Return the sum of each 64 KiB, as 64-bit words, and what is left over.

    A word that is wrong, a block that is missing or in another's place shows, at twenty times the speed of CRC-32.
    """
    words, rest = np.split(vector.astype("<f4", copy=False), [vector.size // 2 * 2])
    starts = np.arange(0, words.size // 2, 8192)
    sums = np.add.reduceat(words.view("<u8"), starts) if words.size else words
    return sums.tobytes() + rest.tobytes()


def _raw(vector: Vector) -> memoryview:
    return memoryview(vector.astype("<f4", copy=False)).cast("B")  # type: ignore[arg-type]
