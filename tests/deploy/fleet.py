"""A federation of real processes on loopback: SuperLink, gateway and SuperNodes, as `fedsparse deploy` starts them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedsparse.compression.frame import decode_own
from fedsparse.compression.memory_file import read_file
from fedsparse.deploy.create import create
from fedsparse.deploy.federation import Federation, Node
from fedsparse.deploy.node import mark_of as node_mark
from fedsparse.deploy.server import mark_of
from fedsparse.processes import marked, stop_all
from fedsparse.run.folder import RunFolder
from fedsparse.run.on_deployment import run_on_deployment
from fedsparse.scenario import Scenario

HERE = Path(__file__).parent
APPS = ("fedsparse.flower_app:server_app", "deploy_apps:app")

Line = dict[str, Any]


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Fleet:
    """A server and its nodes; each node's output is in `said`."""

    def __init__(self, folder: Path, nodes: int, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.records = folder / "records"
        self.records.mkdir(parents=True)
        port, inner = free_ports(2)
        self.federation: Federation = create(folder / "fed", host, nodes, port, inner)
        self.variables: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        return {
            **os.environ,
            "PYTHONPATH": path,
            "FEDSPARSE_TEST_DIR": str(self.records),
            "COLUMNS": "200",
            **self.variables,
        }

    def start(self, name: str, *command: str, prefix: tuple[str, ...] = (), bare: bool = False) -> None:
        environment = self.environment()
        if bare:
            environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "device_site"), environment["PYTHONPATH"]])
        with (self.folder / f"{name}.out").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [*prefix, sys.executable, "-m", "fedsparse.cli", "deploy", *command],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def start_server(self) -> None:
        before = self.said("server").count("listens on")
        self.start("server", "server", str(self.federation.path))
        self.wait(lambda: self.said("server").count("listens on") > before, 90, "the server")

    def start_node(self, number: int, prefix: tuple[str, ...] = (), *, bare: bool = False) -> None:
        """Start a node; a bare one sees only the packages of a device's installation."""
        self.start(f"node-{number}", "node", str(self.federation.node_folder(number)), prefix=prefix, bare=bare)

    def said(self, name: str) -> str:
        path = self.folder / f"{name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, ready: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            dead = [name for name, process in self.processes.items() if process.poll() not in (None, 0)]
            if time.monotonic() > deadline or dead:
                said = "\n".join(f"--- {name}\n{self.said(name)[-1500:]}" for name in self.processes)
                raise AssertionError(f"waited for {what}; ended: {dead}\n{said}")
            time.sleep(0.2)

    def plan(self, faults: dict[str, str]) -> None:
        (self.records / "plan.json").write_text(json.dumps(faults))

    def run(
        self, scenario: Scenario, out: Path, on_event: Callable[[Any], None] | None = None, **options: Any
    ) -> list[Line]:
        """Run a scenario on the fleet, and return its rounds."""
        chosen: dict[str, Any] = {
            "overwrite": False,
            "resume": False,
            "command": "test",
            "apps": APPS,
        }
        engine = scenario.engine.model_copy(
            update={"name": "deployment", "federation": str(self.federation.path), "timeout": 240.0}
        )
        run_on_deployment(scenario.model_copy(update={"engine": engine}), out, on_event, **(chosen | options))
        return RunFolder(out).rounds()

    def kill_node(self, number: int) -> None:
        """Kill -9 the node's SuperNode and all below it; its supervisor lives."""
        for pid in marked(node_mark(Node.open(self.federation.node_folder(number)))):
            os.kill(pid, signal.SIGKILL)

    def serverapps(self) -> set[int]:
        """The processes that conduct runs."""
        return {pid for pid in marked(mark_of(self.federation)) if "flwr-serverapp" in _command(pid)}

    def kill_server(self, program: str) -> int:
        """Kill -9 one of the server's processes, and return its id."""
        for pid in marked(mark_of(self.federation)):
            if program in _command(pid):
                os.kill(pid, signal.SIGKILL)
                return pid
        raise AssertionError(f"no {program} runs")

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        stop_all(str(self.folder), None)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has ended
        return ""


def check_conservation(fleet: Fleet, lines: list[Line], nodes: int) -> int:
    """Check, for every client, accepted C(p) + residual + pending == sum of the committed updates; count these."""
    committed = 0
    for client in map(str, range(nodes)):
        (path,) = fleet.federation.node_folder(client).glob("memory/*/*.memory")
        stored = read_file(path)
        d = stored.residual.size
        frames = {int(f.stem.split("-")[2]): f.read_bytes() for f in fleet.records.glob(f"frame-{client}-*.bin")}
        accepted = [line["round"] for line in lines if client in line["accepted"]]
        total = np.zeros(d)
        for update_id in accepted:
            total += decode_own(frames[update_id], d).to_dense()
        total += stored.residual
        if stored.pending is not None and stored.pending.update_id not in accepted:
            total += decode_own(stored.pending.frame, d).to_dense()
        deltas = sum(np.load(fleet.records / f"delta-{client}-{n}.npy").astype(np.float64) for n in frames)
        np.testing.assert_allclose(total, deltas, atol=1e-5 * max(1.0, float(np.abs(deltas).max())))
        committed += len(frames)
    return committed
