"""What the server knows of its nodes: who is there, what they sent, what was accepted."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsparse.deploy.control import Control
from fedsparse.deploy.federation import Federation
from fedsparse.deploy.gateway import read_traffic
from fedsparse.errors import RunError
from fedsparse.run.folder import ROUNDS, read_rounds, write_text

LATEST = "latest-run.json"


@dataclass(frozen=True)
class NodeStatus:
    """One node; None means not known.

    Parameters
    ----------
    node : str
        Its number.
    state : str
        ``"online"``, ``"offline"``, ``"never seen"``, or ``"unknown"`` while the server is stopped.
    seen_s : float
        Seconds since its last request.
    address : str
        Where that came from.
    up_bytes, down_bytes : int
        Bodies of its requests and of their answers, since the federation exists.
    accepted, failed : int
        Updates of the latest run.
    residual_norm : float
        ``||e||_2`` of its error memory after the last accepted update.
    reason : str
        Why its last update failed, if it did.
    """

    node: str
    state: str
    seen_s: float | None = None
    address: str | None = None
    up_bytes: int = 0
    down_bytes: int = 0
    accepted: int = 0
    failed: int = 0
    residual_norm: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Status:
    """A federation: its nodes, its latest run, and whether the server answers."""

    running: bool
    nodes: list[NodeStatus]
    refused: int
    run: str | None = None


def status(federation: Federation) -> Status:
    """Collect what is known; a stopped server is no error."""
    try:
        known = {node.name: node for node in Control(federation.inner, federation.ca).nodes()}
        running = True
    except RunError:
        known, running = {}, False
    traffic = read_traffic(federation)
    out = _latest(federation)
    lines = read_rounds(Path(out) / ROUNDS) if out is not None else []
    nodes = [
        _node(number, known.get(number), running, traffic.get(number, {}), lines)
        for number in sorted(federation.file.nodes, key=int)
    ]
    run = f"{out}, {len(lines)} rounds" if out is not None else None
    return Status(running, nodes, int(traffic.get("refused", {}).get("requests", 0)), run)


def remember(federation: Federation, out: Path) -> None:
    """Note which folder the latest run writes."""
    write_text(federation.server / LATEST, json.dumps({"out": str(out.absolute())}))


def _latest(federation: Federation) -> str | None:
    try:
        return str(json.loads((federation.server / LATEST).read_text(encoding="utf-8"))["out"])
    except (OSError, ValueError, KeyError):
        return None


def _node(number: str, known: Any, running: bool, traffic: dict[str, Any], lines: list[dict[str, Any]]) -> NodeStatus:
    reasons = [line["failed"][number] for line in lines if number in line["failed"]]
    norms = [line["residual_norms"][number] for line in lines if number in line.get("residual_norms", {})]
    seen = traffic.get("seen")
    state = "unknown"
    if running:
        state = known.status if known is not None else "not registered"
        state = "never seen" if state == "registered" else state
    failed_last = bool(lines) and number in lines[-1]["failed"]
    return NodeStatus(
        number,
        state,
        max(0.0, time.time() - seen) if seen else None,
        traffic.get("address"),
        int(traffic.get("up", 0)),
        int(traffic.get("down", 0)),
        sum(number in line["accepted"] for line in lines),
        len(reasons),
        norms[-1] if norms else None,
        reasons[-1] if failed_last else None,
    )
