"""Error memory as a transaction: no mass of any update is lost or applied twice.

One file per client holds its residual e and the last update that it sent, until the server is known to have accepted
it. A round of one client is::

    transaction = store.begin(client, d, update_id, acknowledged)   # settles the previous update
    if transaction.resend: reply with it again                      # the same update was asked for twice
    ... train, compress p = Delta + e with transaction.residual ...
    transaction.commit(frame, attachment)                           # durable BEFORE the reply leaves
    ... reply ...

Invariant: sum of accepted C(p) + residual (+ the pending C(p) if not accepted) == sum of Delta, to float32 rounding.
"""

import contextlib
import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

import numpy as np

from fedsparse.compression.base import Vector
from fedsparse.compression.compressor import Bounds
from fedsparse.compression.frame import decode_own
from fedsparse.errors import FencedError, MemoryStoreError, PayloadError

log = logging.getLogger(__name__)

MAGIC = b"FSMEM\x01"
_HEADER = struct.Struct("<6s?QQHHQQ")  # magic, has pending, d, pending id, and the lengths of what follows


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


@dataclass
class Transaction:
    """One client's turn with its memory; see `MemoryStore.begin`."""

    residual: Vector
    resend: Pending | None
    restored: bool
    reset_reason: str | None
    _store: "MemoryStore" = field(repr=False)
    _client: str
    _update_id: int
    _epoch: int

    def commit(self, frame: bytes, attachment: bytes = b"") -> None:
        """Store the residual and the pending update atomically; only then may the reply leave.

        Raises
        ------
        FencedError
            Another process began a turn of the same client since; nothing was written.
        MemoryStoreError
            The file could not be written (disk full, no permission); what was stored before stays valid.
        """
        self._store._commit(self, Pending(self._update_id, frame, attachment))


class MemoryStore:
    """A folder with one file per client of a training run.

    Parameters
    ----------
    directory : path
        Created where missing; shared by all processes of the machine.
    run : str
        Name of the training run, which has its own folder inside.
    durable : bool
        Wait for the disk at every commit (a device that may lose power) or not (a simulation).
    on_damage : {"raise", "reset"}
        What a damaged or foreign file means: an error, or a logged restart of this client's memory from zero that
        is reported in `Transaction.reset_reason`. Never silent; the bad file is kept beside as ``.damaged``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        run: str,
        *,
        durable: bool = False,
        on_damage: Literal["raise", "reset"] = "raise",
    ) -> None:
        # A folder for each run: a device takes part in one training after the other, or in two at once.
        self.directory = Path(directory) / quote(run, safe="")
        self.run, self.durable, self.on_damage = run, durable, on_damage
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MemoryStoreError(
                f"cannot create the error-memory folder {self.directory}: {error.strerror}."
            ) from None

    def path(self, client: str) -> Path:
        """Return the file of one client."""
        return self.directory / f"{quote(client, safe='')}.memory"

    def begin(
        self,
        client: str,
        d: int,
        update_id: int,
        acknowledged: int | None = None,
        bounds: Bounds | None = None,
    ) -> Transaction:
        """Start one client's turn and settle what became of its previous update.

        Parameters
        ----------
        client : str
            Stable name of the client.
        d : int
            Length of the update vector.
        update_id : int
            Id of the update that the server now asks for.
        acknowledged : int, optional
            Id of this client's last update that the server accepted.
        bounds : array of int64, optional
            Tensor boundaries, needed to read back a piecewise update.

        Returns
        -------
        Transaction
            With `resend` set where this very update was already made; otherwise with the residual to use, to
            which the mass of an update that was not accepted has been returned (`restored`).
        """
        epoch = self._take_over(client)
        reset_reason = None
        try:
            residual, pending = self._read(client, d)
            resend, restored = None, False
            if pending is not None and pending.update_id == update_id:
                resend = pending
            elif pending is not None and pending.update_id != acknowledged:
                decode_own(pending.frame, d, bounds).add_to(residual)
                restored = True
        except (MemoryStoreError, PayloadError) as error:
            if self.on_damage == "raise":
                raise MemoryStoreError(
                    f"{error} Delete {self.path(client)} to restart this client's memory from zero, "
                    "or use a new run name."
                ) from None
            reset_reason = str(error)
            log.warning("client %s: error memory restarts from zero: %s", client, reset_reason)
            with contextlib.suppress(OSError):
                os.replace(self.path(client), self.path(client).with_suffix(".damaged"))
            residual, resend, restored = np.zeros(d, dtype=np.float32), None, False
        return Transaction(residual, resend, restored, reset_reason, self, client, update_id, epoch)

    def read(self, client: str, d: int) -> tuple[Vector, Pending | None]:
        """Return a client's residual and pending update as they lie on disk (for inspection and tests)."""
        return self._read(client, d)

    def clients(self) -> list[str]:
        """Return the names of all clients that have a file here."""
        return sorted(unquote(path.stem) for path in self.directory.glob("*.memory"))

    @contextlib.contextmanager
    def _locked(self, client: str) -> Iterator[int]:
        """Hold the client's lock file; yields its descriptor. The kernel drops the lock when a process dies."""
        try:
            handle = os.open(self.path(client).with_suffix(".epoch"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise MemoryStoreError(f"cannot open the error memory of client {client}: {error.strerror}.") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)

    def _take_over(self, client: str) -> int:
        """Count the turn; whoever holds an older number can no longer commit."""
        with self._locked(client) as handle:
            epoch = _read_epoch(handle) + 1
            try:
                os.pwrite(handle, struct.pack("<Q", epoch), 0)
            except OSError as error:
                raise MemoryStoreError(f"cannot write the error memory of client {client}: {error.strerror}.") from None
            return epoch

    def _read(self, client: str, d: int) -> tuple[Vector, Pending | None]:
        path = self.path(client)
        try:
            file = open(path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return np.zeros(d, dtype=np.float32), None
        except OSError as error:
            raise MemoryStoreError(f"cannot read {path}: {error.strerror}.") from None
        with file:
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size or head[:6] != MAGIC:
                raise MemoryStoreError(f"{path} is no error memory of this version.")
            _, has_pending, stored_d, pending_id, n_run, n_client, n_frame, n_attachment = _HEADER.unpack(head)
            expected = _HEADER.size + n_run + n_client + 4 * stored_d + n_frame + n_attachment + 4
            if os.fstat(file.fileno()).st_size != expected:
                raise MemoryStoreError(f"{path} is damaged: it should have {expected} bytes.")
            names = file.read(n_run + n_client)
            residual = np.fromfile(file, dtype="<f4", count=stored_d).astype(np.float32, copy=False)
            frame, attachment = file.read(n_frame), file.read(n_attachment)
            (checksum,) = struct.unpack("<I", file.read(4))
        if _checksum(head, names, residual, frame, attachment) != checksum:
            raise MemoryStoreError(f"{path} is damaged: the checksum does not match.")
        run, owner = names[:n_run].decode(), names[n_run:].decode()
        if run != self.run or owner != client:
            raise MemoryStoreError(
                f"{path} belongs to client {owner!r} of run {run!r}, expected client {client!r} of run {self.run!r}."
            )
        if stored_d != d:
            raise MemoryStoreError(f"{path} is for a model of {stored_d} parameters, this one has {d}.")
        return residual, Pending(pending_id, frame, attachment) if has_pending else None

    def _commit(self, transaction: Transaction, pending: Pending) -> None:
        client, path = transaction._client, self.path(transaction._client)
        residual = transaction.residual
        run, owner = self.run.encode(), client.encode()
        head = _HEADER.pack(
            MAGIC,
            True,
            residual.size,
            pending.update_id,
            len(run),
            len(owner),
            len(pending.frame),
            len(pending.attachment),
        )
        checksum = _checksum(head, run + owner, residual, pending.frame, pending.attachment)
        with self._locked(client) as handle:
            if _read_epoch(handle) != transaction._epoch:
                raise FencedError(f"another process took over the error memory of client {client}; this one stops.")
            partial = path.with_suffix(".partial")
            try:
                with open(partial, "wb", buffering=0) as file:
                    tail = pending.frame + pending.attachment
                    for part in (head + run + owner, _raw(residual), tail, struct.pack("<I", checksum)):
                        _write_all(file.fileno(), memoryview(part))
                    if self.durable:
                        os.fsync(file.fileno())
                os.replace(partial, path)
                if self.durable:
                    _sync_directory(self.directory)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise MemoryStoreError(
                    f"cannot write the error memory of client {client} to {self.directory}: {error.strerror}. "
                    "What was stored before is intact; free some disk space."
                ) from None


def _read_epoch(handle: int) -> int:
    raw = os.pread(handle, 8, 0)
    return int(struct.unpack("<Q", raw)[0]) if len(raw) == 8 else 0


def _checksum(head: bytes, names: bytes, residual: Vector, frame: bytes, attachment: bytes) -> int:
    checksum = 0
    for part in (head, names, _raw(residual), frame, attachment):
        checksum = zlib.crc32(part, checksum)
    return checksum


def _raw(residual: Vector) -> memoryview:
    return memoryview(residual.astype("<f4", copy=False)).cast("B")  # type: ignore[arg-type]


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
