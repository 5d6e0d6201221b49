"""Start, join and stop a Ray instance without its noise."""

import logging
import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fedsparse.errors import ConfigError, RunError

from ._quiet import QUIET, environment
from ._ray import loopback_only, ray
from ._workspace import Workspace

MIB = 2**20


class RaySession:
    """A Ray instance to run in: the one this process already uses, the cluster at `address`, or a new local one.

    Parameters
    ----------
    address : str, optional
        ``host:port`` of a running cluster, or ``"auto"``. Without it a cluster is never joined, not even one on this
        machine.
    object_store_memory : int, optional
        Bytes of shared memory for a new instance; by default what is there, within reason.
    options : mapping, optional
        More arguments of ``ray.init`` for a new instance, e.g. ``{"num_cpus": 4, "num_gpus": 2}``.
    verbose : bool
        Let Ray and the workers log to this process.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        object_store_memory: int | None = None,
        options: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        self._workspace: Workspace | None = None
        if address is not None and not ray.is_initialized():
            _check_address(address)
        with environment(QUIET), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.owned = not ray.is_initialized()
            if not self.owned:
                return
            level = logging.INFO if verbose else logging.ERROR
            arguments: dict[str, Any] = {"log_to_driver": verbose, "logging_level": level}
            if address is not None:
                arguments |= {"address": address}
            else:
                self._workspace = Workspace()
                arguments |= {
                    "address": "local",
                    "include_dashboard": False,
                    "object_store_memory": object_store_memory or _modest_store(),
                    "_temp_dir": str(self._workspace.path),
                }
            try:
                with loopback_only() if address is None else nullcontext():
                    ray.init(**arguments | dict(options or {}))
            except BaseException as error:
                self.close()
                if isinstance(error, ConnectionError | RuntimeError | ValueError | OSError):
                    where = f"Ray at {address!r} cannot be reached" if address else "Ray does not start"
                    raise RunError(f"{where}: {error}") from error
                raise

    def close(self) -> None:
        """Stop or leave the instance, if this object started or joined it."""
        if not self.owned:
            return
        self.owned = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.shutdown()
        if self._workspace is not None:
            self._workspace.close()


def _check_address(address: str) -> None:
    """Refuse an address where nothing listens; Ray would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(f"Ray address {address!r} must be 'host:port' of a cluster's head node, or 'auto'.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r} ({error}). `ray start --head` prints the address; without one, Ray "
            "is started on this machine."
        ) from error


def _modest_store() -> int:
    """Return the size of the object store: a third of what memory and /dev/shm still offer, at most 8 GiB."""
    room = [8 * 2**30 * 3]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        room.append(int(lines.get("MemAvailable", "16777216 kB").split()[0]) * 1024)
    if os.path.isdir("/dev/shm"):
        disk = os.statvfs("/dev/shm")
        shm = disk.f_bavail * disk.f_frsize
        if shm > 512 * MIB:
            room.append(shm)
    return max(min(room) // 3, 128 * MIB)
