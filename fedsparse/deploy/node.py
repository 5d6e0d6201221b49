"""A device: Flower's SuperNode, kept running, with its error memory on the disk and in nobody else's way."""

import platform
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedsparse.deploy.checks import Finding, first_problem
from fedsparse.deploy.federation import Node
from fedsparse.deploy.fleet import sign_off
from fedsparse.deploy.supervise import QUICK, Child, Sayings, Supervisor
from fedsparse.errors import ConfigError, brief, cause
from fedsparse.flower_programs import flower_environment, free_port, program
from fedsparse.run.folder import write_text
from fedsparse.run.lock import exclusive
from fedsparse.userobject import names_object

CHECK_EVERY_S, TIDY_EVERY_S, TAKEN_S = 15.0, 3600.0, 150.0
# Flower holds a node for connected as long as its last heartbeat promised.
STILL_CONNECTED = "305"
FLOWER_ID = "flower-id"
_ID = re.compile(r"SuperNode ID: (\d+)")


class NodeRunner:
    """Keeps a device's SuperNode running.

    Parameters
    ----------
    node : Node
        Which.
    say : callable
        Gets what people should know.
    """

    def __init__(self, node: Node, say: Callable[[str], None]) -> None:
        self._node, self._say = node, Sayings(say)
        self._taken_since: float | None = None
        self._failing = False  # the log is about to tell why training failed
        self._problem: str | None = "not connected yet"
        self._checked, self._tidied = 0.0, -TIDY_EVERY_S
        self._checking: threading.Thread | None = None

    def run(self) -> None:
        """Go on until SIGINT or SIGTERM.

        Raises
        ------
        ConfigError
            Another process runs this node, or its data cannot be used.
        """
        node = self._node
        check_data(node)
        with exclusive(node.path, f"the node {node.path} runs already: stop it first."):
            command = [
                program("flower-supernode"),
                *("--root-certificates", str(node.ca), "--superlink", node.file.server),
                *("--auth-supernode-private-key", str(node.key), "--node-config", node_config(node)),
                *("--host", "127.0.0.1", "--port", str(free_port())),
            ]
            self.child = Child(
                "flower-supernode",
                command,
                environment(node),
                node.path / "logs" / "node.log",
                on_line=self._listen,
                before_start=self._sign_off,
                memory_mb=node.file.limits.memory_mb,
            )
            self._say(
                f"node {node.file.node} of {node.file.federation!r}, server {node.file.server}; logs are in "
                f"{node.path / 'logs'}; stop with Ctrl-C"
            )
            Supervisor([self.child], mark_of(node), self._ended, self._tick).run()

    def _listen(self, line: str) -> None:
        """Note Flower's id for this node, and failures; start again where a reply was given up, to be asked again."""
        if found := _ID.search(line):
            self._taken_since = None
            write_text(self._node.path / FLOWER_ID, f"{found[1]} {owner(self._node)}")
        if self._failing and line[:1].strip() and not line.startswith("Traceback"):
            self._failing = False
            self._say(f"training failed here: {brief(line)}", f"training {line[:40]}")
        self._failing |= "ClientApp raised an exception" in line
        if "Failed to send message" in line and (process := self.child.process) is not None:
            self._say("a reply could not be sent: starting again, so that the server asks for it again")
            process.terminate()

    def _sign_off(self) -> None:
        """Let the server forget a SuperNode that was killed, or died with the power."""
        with suppress(OSError, ValueError):
            path = self._node.path / FLOWER_ID
            number, whose = path.read_text().split(" ", 1)
            # The id in a copy of another device's folder is not ours to sign off: that may well live.
            if whose == owner(self._node) and sign_off(self._node, int(number)):
                path.unlink()

    def _ended(self, child: Child, code: int) -> None:
        text = "\n".join(child.tail)
        if f"Exit Code: {STILL_CONNECTED}" in text:
            self._is_taken(child)
        else:
            self._say(child.farewell(code), f"ended {code}")
        self._checked = 0.0

    def _is_taken(self, child: Child) -> None:
        """Say why the server refuses this node: its own earlier connection at first, in the long run another device."""
        self._taken_since = self._taken_since or time.monotonic()
        if time.monotonic() - self._taken_since < TAKEN_S:
            self._say(
                f"the server still counts this node as connected; again in {child.pause_s:.0f} s", STILL_CONNECTED
            )
        else:
            self._say(
                "the server has counted this node as connected for minutes: another device seems to run with a copy "
                "of this folder. Each needs its own: on the server, `fedsparse deploy add DIR` makes one."
            )

    def _tick(self) -> None:
        if time.monotonic() - self._tidied > TIDY_EVERY_S:
            self._tidied = time.monotonic()
            forget_old_runs(self._node)
        if time.monotonic() - self._checked < CHECK_EVERY_S or (self._checking and self._checking.is_alive()):
            return
        self._checked = time.monotonic()
        self._checking = threading.Thread(target=self._check, daemon=True)
        self._checking.start()

    def _check(self) -> None:
        """Say when the way to the server breaks, what is wrong with it, and when it works again."""
        finding = first_problem(self._node)
        text = _words(finding) if finding is not None else None
        if text != self._problem:
            self._problem = text
            if text is None:
                self._say.forget()
            self._say(text or f"connected to {self._node.file.server}")


def _words(finding: Finding) -> str:
    return f"{finding.what}. {finding.todo[:1].upper()}{finding.todo[1:]}." if finding.todo else f"{finding.what}."


def owner(node: Node) -> str:
    """Return what tells this folder from its copies, also on other devices: its path and the network's address."""
    address = uuid.getnode()
    device = platform.node() if address >> 40 & 1 else f"{address:012x}"  # that bit: there is none, and this is drawn
    return f"{device} {node.path}"


def node_config(node: Node) -> str:
    """Return what the apps on this node are told, as flower-supernode takes it."""
    values: dict[str, str | int | bool] = {
        "partition-id": node.file.node,
        "num-partitions": max(node.file.num_nodes, node.file.node + 1),
        "memory-dir": str(node.memory),
        "durable": True,
        "threads": node.file.limits.threads,
    }
    if node.file.data.source is not None:
        values["data"] = data_source(node)
    return " ".join(f"{key}={_toml(value)}" for key, value in values.items())


def data_source(node: Node) -> str:
    """Return what the node trains on; relative paths begin at its folder.

    Raises
    ------
    ConfigError
        It can be no path.
    """
    source = str(node.file.data.source)
    if names_object(source):
        return source
    try:
        return str((node.path / Path(source).expanduser()).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # an unknown ~user, links in a circle, a null byte
        raise ConfigError(f"data.source = {source!r} can be no path: {cause(error)}.") from None


def check_data(node: Node) -> None:
    """Refuse data that cannot be read, before the server counts on this node.

    Raises
    ------
    ConfigError, DataError
        Where [data] names nothing usable.
    """
    if node.file.data.source is None:
        return
    from fedsparse.data.local import load_local

    load_local(data_source(node))


def environment(node: Node) -> dict[str, str]:
    """Return the environment of the node's processes; it has the mark by which they are found."""
    return flower_environment(
        node.path / "flower",
        FEDSPARSE_NODE=mark_of(node),
        OMP_NUM_THREADS=str(node.file.limits.threads),
        MALLOC_ARENA_MAX="2",
        **QUICK,
    )


def mark_of(node: Node) -> str:
    """Return the text that marks the processes of a node."""
    return f"fedsparse-node:{node.path}/."  # that of node-1 must not be found in node-10's


def forget_old_runs(node: Node) -> None:
    """Keep the error memory of the latest runs only: a device's disk is small, and runs come and go."""
    if not node.memory.is_dir():
        return
    runs = sorted((folder for folder in node.memory.iterdir() if folder.is_dir()), key=_last_change, reverse=True)
    for folder in runs[node.file.limits.keep_runs :]:
        shutil.rmtree(folder, ignore_errors=True)


def _last_change(folder: Path) -> float:
    return max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)


def _toml(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if '"' in value or "\\" in value or "\n" in value:
        raise ConfigError(f"{value!r} cannot be given to flower-supernode: use a path without quotes.")
    return f'"{value}"'
