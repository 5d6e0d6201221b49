"""How soon a run begins, and how much memory it takes with many clients.

Start-up: `fedsparse run quickstart` on Ray, from the start of the process to the end of the first round, caches warm.

Memory: the private memory (what no other process shares) of driver and workers together, the highest of samples every
50 ms, with 1,000 and with 10,000 clients, a million parameters, 100 clients a round, error memories on disk. It must
not depend on the number of clients. Ray's own processes are given apart.

    python -m benchmarks.footprint
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import save
from fedsparse.processes import marked

MIB = 2**20
MARK = "FEDSPARSE_FOOTPRINT"
SCENARIO = """
name = "footprint"
rounds = {rounds}
[data]
dataset = "benchmarks.footprint:data"
num_clients = {clients}
[model]
name = "mlp(hidden=9009)"                       # 1,000,009 parameters
[train]
local_steps = 1
batch_size = 32
lr = 0.01
clients_per_round = 100
[compression]
uplink = "topk(density=0.01)"
[engine]
name = "ray"
max_workers = 2
"""


def data() -> tuple[Any, ...]:
    """Return 40,000 examples of 100 features: four for each of 10,000 clients."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(41_000, 100)).astype(np.float32), rng.integers(0, 10, 41_000)
    return x[:40_000], y[:40_000], x[40_000:], y[40_000:]


def start(arguments: list[str], out: Path, mark: str) -> "subprocess.Popen[bytes]":
    """Start `fedsparse run` as a process of its own."""
    command = [sys.executable, "-m", "fedsparse.cli", "run", *arguments, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {MARK: mark})


def first_round_s() -> dict[str, float]:
    """Return the seconds from the start of the process to the first line of rounds.jsonl, and to its end."""
    with tempfile.TemporaryDirectory() as folder:
        lines, began = Path(folder) / "run" / "rounds.jsonl", time.perf_counter()
        process = start(["quickstart", "--set", "rounds=3"], Path(folder) / "run", "")
        while not (lines.exists() and lines.stat().st_size) and process.poll() is None:
            time.sleep(0.005)
        first = time.perf_counter() - began
        if process.wait():
            raise RuntimeError("the run failed.")
        return {"first_round_after_s": first, "whole_run_of_3_rounds_s": time.perf_counter() - began}


def private_bytes(pid: int) -> int:
    """Return a process's private memory, 0 where it has just ended."""
    try:
        rows = [row.split() for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(row[1]) for row in rows if row[0].startswith("Private_")) * 1024


def role(pid: int, driver: int) -> str:
    """Say what a process of a run is."""
    if pid == driver:
        return "driver"
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return "gone"
    return "workers" if title.startswith("ray::Worker") else "ray_itself"


def peak_memory(clients: int, rounds: int) -> dict[str, Any]:
    """Run, and return the highest private memory of each kind of process, and of driver and workers together."""
    mark, peaks = uuid.uuid4().hex, dict.fromkeys(("driver", "workers", "ray_itself", "driver_and_workers"), 0)
    with tempfile.TemporaryDirectory() as folder:
        scenario = Path(folder) / "footprint.toml"
        scenario.write_text(SCENARIO.format(clients=clients, rounds=rounds))
        process = start([str(scenario)], Path(folder) / "run", mark)
        while process.poll() is None:
            now = dict.fromkeys(("driver", "workers", "ray_itself", "gone"), 0)
            for pid in marked(mark):
                now[role(pid, process.pid)] += private_bytes(pid)
            now["driver_and_workers"] = now["driver"] + now["workers"]
            peaks = {kind: max(peak, now[kind]) for kind, peak in peaks.items()}
            time.sleep(0.05)
        if process.returncode:
            raise RuntimeError("the run failed.")
    return {f"{kind}_mib": round(peak / MIB) for kind, peak in peaks.items()}


def median(measure: Callable[[], dict[str, float]], repeats: int) -> dict[str, float]:
    """Return the medians of several measurements, after one that warms the caches."""
    found = [measure() for _ in range(repeats + 1)][1:]
    return {key: round(statistics.median(one[key] for one in found), 2) for key in found[0]}


def main() -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--rounds", type=int, default=8, help="of the runs whose memory is measured")
    parser.add_argument("--repeats", type=int, default=5, help="of the start-up")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = [{"what": "quickstart", **median(first_round_s, given.repeats)}]
    for clients in given.clients:
        rows.append({"what": "private memory", "clients": clients, **peak_memory(clients, given.rounds)})
    save("footprint", rows, "start-up: median; memory: highest sample; 1 M parameters, 100 clients a round, 2 workers")


if __name__ == "__main__":
    main()
