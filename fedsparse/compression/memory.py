"""Error memory as a transaction: no mass of any update is lost or applied twice.

One file per client holds its residual e and the last update that it sent, until the server is known to have accepted
it. A round of one client is::

    transaction = store.begin(client, d, update_id, acknowledged)   # settles the previous update
    if transaction.resend: reply with it again                      # the same update was asked for twice
    ... train ...
    sent = transaction.compress(compressor, update, seed)           # C(p) of p = Delta + e
    transaction.commit(frame, attachment)                           # durable BEFORE the reply leaves
    ... reply ...

Invariant: sum of accepted C(p) + residual (+ the pending C(p) if not accepted) == sum of Delta, to float32 rounding;
with momentum correction the sum on the right is that of the velocities u which took the place of Delta.
"""

import contextlib
import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import Vector, add_in_place, as_vector
from fedsparse.compression.compressor import Bounds, Compressed, Compressor
from fedsparse.compression.frame import decode_own
from fedsparse.compression.memory_file import Pending as Pending
from fedsparse.compression.memory_file import Stored, parts_of, read_file
from fedsparse.errors import FencedError, MemoryStoreError, PayloadError

log = logging.getLogger(__name__)

_AHEAD = ".next"


@dataclass
class Transaction:
    """One client's turn with its memory; see `MemoryStore.begin`.

    `reset_reason` says why the memory restarted from zero: damage, or a file that is gone. It is said again with each
    further update until one is accepted, so that a reply that is lost does not hide it.
    """

    residual: Vector
    velocity: Vector | None
    resend: Pending | None
    restored: bool
    reset_reason: str | None
    _store: "MemoryStore" = field(repr=False)
    _client: str
    _update_id: int
    _epoch: int

    def compress(
        self,
        compressor: Compressor,
        update: NDArray[np.generic],
        seed: int,
        bounds: Bounds | None = None,
        momentum: float = 0.0,
    ) -> Compressed:
        """Return C(p) for ``p = e + Delta`` and leave ``e = p - C(p)``; `update` stays untouched.

        With a momentum m above 0 the update is corrected as in Deep Gradient Compression (Lin et al. 2018, Sections
        3.2 and 3.3)::

            u <- m u + Delta,   p = e + u,   u <- 0 where a coordinate was sent (momentum factor masking)

        so that a coordinate that waits gathers the momentum it would have had, and one that was sent does not repeat
        it. Where every coordinate is sent nothing is left of u: the correction does nothing then. u stays masked if
        the update turns out not to be accepted; its mass returns to e like all other mass. A client that sits a round
        out keeps its u.

        Parameters
        ----------
        compressor : Compressor
            What to send.
        update : array, shape (d,)
            Delta; finite real numbers.
        seed : int
            As in `Compressor.compress`.
        bounds : array of int64, optional
            Tensor boundaries, for `piecewise`.
        momentum : float
            m, in [0, 1); 0 forgets u.
        """
        if momentum == 0.0:
            self.velocity = None
            return compressor.compress_with_memory(update, self.residual, seed, bounds)
        velocity = self.velocity
        if velocity is None:
            velocity = np.array(as_vector(update))
        else:
            velocity *= np.float32(momentum)
            add_in_place(velocity, as_vector(update))
        sent = compressor.compress_with_memory(velocity, self.residual, seed, bounds)
        if sent.indices is not None:
            velocity[sent.indices] = 0.0
        self.velocity = velocity if sent.indices is not None else None
        return sent

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
    half : bool
        Keep residuals in half precision: half the disk, and up to 2^-11 of what waits is rounded away in each turn, so
        that update mass is conserved to that precision only.
    on_damage : {"raise", "reset"}
        What a damaged, foreign or outdated file means: an error, or a logged restart of this client's memory from zero
        that is reported in `Transaction.reset_reason`. Never silent; the bad file is kept beside as ``.damaged``. A
        file that is gone although there must be one always means such a restart.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        run: str,
        *,
        durable: bool = False,
        half: bool = False,
        on_damage: Literal["raise", "reset"] = "raise",
    ) -> None:
        # A folder for each run: a device takes part in one training after the other, or in two at once.
        self.directory = Path(directory) / quote(run, safe="")
        self.run, self.durable, self.half, self.on_damage = run, durable, half, on_damage
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
        try:
            if (stored := self._read(client, d)) is None:
                stored = self._restart(client, d, acknowledged)
            elif acknowledged is not None:
                _check_age(self._file(client), stored, acknowledged)
            residual, pending, velocity, reset_reason = stored.residual, stored.pending, stored.velocity, stored.restart
            resend, restored = None, False
            if pending is not None and pending.update_id == update_id:
                resend = pending
            elif pending is not None and pending.update_id == acknowledged:
                reset_reason = None  # the server knows
            elif pending is not None:
                decode_own(pending.frame, d, bounds).add_to(residual)
                restored = True
        except (MemoryStoreError, PayloadError) as error:
            self._set_aside(client, error)
            reset_reason = str(error)
            residual, velocity, resend, restored = np.zeros(d, dtype=np.float32), None, None, False
        return Transaction(residual, velocity, resend, restored, reset_reason, self, client, update_id, epoch)

    def _restart(self, client: str, d: int, acknowledged: int | None) -> Stored:
        """Begin a memory; say so where there must have been one before."""
        path, reason = self.path(client), ""
        if acknowledged is not None:
            reason = f"{path} is gone, although the server accepted update {acknowledged} of this client."
        elif path.with_suffix(".damaged").exists():
            reason = f"{path} was damaged, and its restart from zero was cut off."
        if reason:
            log.warning("client %s: error memory restarts from zero: %s", client, reason)
        return Stored(self.run, client, np.zeros(d, dtype=np.float32), restart=reason or None)

    def _set_aside(self, client: str, error: Exception) -> None:
        """Keep a file that cannot be used under another name, or raise, as `on_damage` says."""
        if (damaged := self._file(client)) == self.path(client):
            # The scraps of an older commit must not take its place once it is deleted.
            self.path(client).with_suffix(_AHEAD).unlink(missing_ok=True)
        if self.on_damage == "raise":
            raise MemoryStoreError(
                f"{error} Delete {damaged} to restart this client's memory from zero, or use a new run name."
            ) from None
        log.warning("client %s: error memory restarts from zero: %s", client, error)
        with contextlib.suppress(OSError):
            os.replace(damaged, self.path(client).with_suffix(".damaged"))

    def _file(self, client: str) -> Path:
        """Return the file that holds what was committed last, see `_write`."""
        path = self.path(client)
        ahead = path.with_suffix(_AHEAD)
        return ahead if not path.exists() and ahead.exists() else path

    def read(self, client: str, d: int) -> tuple[Vector, Pending | None]:
        """Return a client's residual and pending update as they lie on disk (for inspection and tests)."""
        stored = self._read(client, d) or Stored(self.run, client, np.zeros(d, dtype=np.float32))
        return stored.residual, stored.pending

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

    def _read(self, client: str, d: int) -> Stored | None:
        path = self._file(client)
        try:
            stored = read_file(path)
        except FileNotFoundError:
            return None
        if stored.run != self.run or stored.client != client:
            raise MemoryStoreError(
                f"{path} belongs to client {stored.client!r} of run {stored.run!r}, expected client {client!r} of run "
                f"{self.run!r}."
            )
        if stored.residual.size != d:
            raise MemoryStoreError(f"{path} is for a model of {stored.residual.size} parameters, this one has {d}.")
        return stored

    def _commit(self, transaction: Transaction, pending: Pending) -> None:
        client, path = transaction._client, self.path(transaction._client)
        restart = transaction.reset_reason
        stored = Stored(self.run, client, transaction.residual, transaction.velocity, pending, restart)
        parts = parts_of(stored, half=self.half)
        with self._locked(client) as handle:
            if _read_epoch(handle) != transaction._epoch:
                raise FencedError(f"another process took over the error memory of client {client}; this one stops.")
            try:
                self._write(path, parts)
            except OSError as error:
                raise MemoryStoreError(
                    f"cannot write the error memory of client {client} to {self.directory}: {error.strerror}. "
                    "What was stored before is intact; free some disk space."
                ) from None

    def _write(self, path: Path, parts: list[bytes | memoryview]) -> None:
        """Replace a file as a whole.

        Renaming a file over another makes ext4 write it to the disk at once, which takes longer than all the rest.
        Where nobody asked for that the old file goes first: who is killed in between leaves the new one, complete,
        under its other name.
        """
        ahead = not self.durable and path.exists()
        partial = path.with_suffix(_AHEAD if ahead else ".partial")
        try:
            with open(partial, "wb", buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), memoryview(part))
                if self.durable:
                    os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        if ahead:
            os.unlink(path)
        os.replace(partial, path)
        if self.durable:
            sync(self.directory)


def _check_age(path: Path, stored: Stored, acknowledged: int) -> None:
    """Refuse a copy from before an update that was accepted: which part of it was sent since, nobody knows."""
    if stored.pending is None or stored.pending.update_id < acknowledged:
        raise MemoryStoreError(f"{path} is an older copy: the server accepted update {acknowledged} since.")


def _read_epoch(handle: int) -> int:
    raw = os.pread(handle, 8, 0)
    return int(struct.unpack("<Q", raw)[0]) if len(raw) == 8 else 0


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
