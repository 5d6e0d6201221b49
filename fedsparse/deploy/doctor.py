"""`fedsparse doctor`: everything that must be right on a machine, and what to do where it is not."""

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from fedsparse.deploy.checks import Finding, connection
from fedsparse.deploy.federation import FEDERATION, NODE, Federation, Node
from fedsparse.deploy.server_files import server_files
from fedsparse.deploy.versions import installed
from fedsparse.errors import ConfigError, FedsparseError, shell

DISK_LOW, DISK_FULL = 1 << 30, 100 << 20
# Model, gradient, update, residual and frame, and a second of each while they change hands.
VECTORS = 8
TORCH_BYTES = 350 << 20


def examine(path: Path | None, parameters: int | None = None) -> Iterator[Finding]:
    """Look at this machine, and at a federation's or a node's folder.

    Parameters
    ----------
    path : path, optional
        The folder; without it only the machine is looked at.
    parameters : int, optional
        The model's size, to hold the free memory against.
    """
    server = path is not None and (path / FEDERATION).is_file()
    yield from _software(server)
    folder = path or Path.cwd()
    yield from _machine(folder / "server" if server else folder, parameters)
    if path is None:
        return
    try:
        if (path / NODE).is_file():
            yield from _node(Node.open(path))
        else:
            yield from _server(Federation.open(path))
    except ConfigError as error:
        yield Finding("fix", str(error))


def _software(server: bool) -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        yield Finding("fix", f"Python {found}", "use Python 3.11 to 3.13")
    else:
        yield Finding("ok", f"Python {found}")
    for package in ("fedsparse", "flwr", "torch", "numpy", "pcodec"):
        number = installed(package)
        if number is None:
            yield Finding("fix", f"{package} is not installed", f"pip install {package}")
        else:
            yield Finding("ok", f"{package} {number}")
    programs = ["flower-superlink", "flower-superexec", "flwr"] if server else ["flower-supernode", "flower-superexec"]
    beside = str(Path(sys.executable).parent)
    for program in programs:
        if shutil.which(program, path=beside) is None and shutil.which(program) is None:
            yield Finding("fix", f"the program {program} is not found", "pip install flwr, in this environment")


def _machine(path: Path, parameters: int | None) -> Iterator[Finding]:
    from fedsparse.run.folder import existing

    folder = existing(path)
    free = shutil.disk_usage(folder).free
    text = f"disk: {free / 1e9:.1f} GB free in {folder}"
    if free < DISK_FULL:
        yield Finding("fix", text, "free some: the error memory of each training takes 4 bytes a parameter, or 8")
    elif free < DISK_LOW:
        yield Finding("warn", text, "a training's error memory takes 4 to 8 bytes a parameter, logs 5 MB")
    else:
        yield Finding("ok", text)
    if not os.access(folder, os.W_OK):
        yield Finding("fix", f"{folder} cannot be written", "run as its owner, or chown it")
    yield _memory(parameters)
    yield _threads()
    if time.time() < datetime(2025, 1, 1, tzinfo=UTC).timestamp():
        yield Finding("fix", f"clock: it says {datetime.now(UTC):%Y-%m-%d}", "timedatectl set-ntp true")


def _memory(parameters: int | None) -> Finding:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return Finding("warn", "memory: cannot be told on this system")
    need = TORCH_BYTES + VECTORS * 4 * (parameters or 0)
    text = f"memory: {free >> 20} MB free"
    if parameters:
        text += f", about {need >> 20} MB are needed for {parameters:,} parameters, data not counted"
    if free < need:
        return Finding("fix", text, "close other programs, or take a smaller model")
    if free < 2 * need:
        return Finding("warn", text, "set [limits] memory_mb in node.toml, so that training fails and not the device")
    return Finding("ok", text)


def _threads() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("fix", "torch is missing, so nothing can be trained", "pip install torch")
    import torch

    threads, cpus = torch.get_num_threads(), os.cpu_count() or 1
    gpu = f", {torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else ""
    if threads > cpus:
        return Finding("warn", f"threads: torch uses {threads} on {cpus} CPUs", f"export OMP_NUM_THREADS={cpus}")
    return Finding("ok", f"threads: torch uses up to {threads} on {cpus} CPUs{gpu}")


def _node(node: Node) -> Iterator[Finding]:
    from fedsparse.deploy.node import check_data, data_source

    yield Finding("ok", f"node {node.file.node} of {node.file.federation!r}, server {node.file.server}")
    yield from _secret(node.key)
    if node.file.data.source is None:
        yield Finding("ok", f"data: part {node.file.node} of the scenario's data set ([data] source is not set)")
    else:
        try:
            check_data(node)
            yield Finding("ok", f"data: {data_source(node)} can be read")
        except FedsparseError as error:
            yield Finding("fix", f"data: {error}", f"change [data] in {node.path / NODE}")
    yield from connection(node)


def _server(federation: Federation) -> Iterator[Finding]:
    from fedsparse.deploy.server import healthy

    file = federation.file
    yield Finding("ok", f"federation {file.name!r}: {len(file.nodes)} nodes reach it as {file.host}:{file.port}")
    if federation.ca_key.exists():
        yield from _secret(federation.ca_key)
    else:
        yield Finding("ok", f"{federation.ca_key} is not here; only `fedsparse deploy renew` needs it")
    yield from _secret(federation.key)
    yield from server_files(federation)
    keys_left = [number for number in file.nodes if (federation.node_folder(number) / "node.key").is_file()]
    if keys_left:
        yield Finding(
            "warn",
            f"private keys of {len(keys_left)} nodes still lie here",
            "move each node's folder to its device; the server needs the public keys only",
        )
    if healthy(federation):
        yield Finding("ok", f"server: the SuperLink answers at {federation.inner}")
    else:
        yield Finding("warn", "server: it is not running", f"fedsparse deploy server {shell(federation.path)}")


def _secret(path: Path) -> Iterator[Finding]:
    try:
        mode = path.stat().st_mode & 0o777
    except OSError as error:
        yield Finding("fix", f"{path}: {error.strerror}", "copy the folder again")
        return
    if mode & 0o077:
        yield Finding("fix", f"{path} can be read by others (mode {mode:o})", f"chmod 600 {shell(path)}")
