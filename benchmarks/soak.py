"""A long deployment: 20 nodes, 50 rounds on loopback; does the memory of the server and of the nodes stay flat?

Run with about 16 GB of memory free; every message starts a process on every node::

    python -m benchmarks.soak [NODES ROUNDS]

Real processes: SuperLink, executor, gateway, and for each node its supervisor, SuperNode and executor.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._report import save
from fedsparse.deploy.federation import Node
from fedsparse.deploy.node import mark_of as node_mark
from fedsparse.deploy.server import mark_of
from fedsparse.processes import marked
from fedsparse.run import RoundDone
from fedsparse.scenario import apply_overrides, from_toml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/deploy"))

from fleet import Fleet

APPS = ("fedsparse.flower_app:server_app", "benchmarks.soak_app:app")
TOML = """
name = "soak"
rounds = 50
[data]
dataset = "digits"
num_clients = 20
[model]
name = "mlp(hidden=32)"
[train]
lr = 0.1
local_steps = 5
[compression]
uplink = "topk(density=0.05)"
[evaluation]
every = 1000
"""
LASTING = ("flower-superlink", "flower-supernode", "flower-superexec", "fedsparse.deploy.gateway", "flwr-serverapp")


def private_mb(pid: int) -> float:
    """Return the memory that a process has for itself."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) / 1024


def memory(mark: str) -> dict[str, float]:
    """Return the private MB of a machine's lasting processes, by program."""
    found: dict[str, float] = {}
    for pid in marked(mark):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
            name = next((name for name in LASTING if name in command), None)
            if name is not None:
                found[name] = found.get(name, 0.0) + private_mb(pid)
        except OSError:
            continue
    return found


def main(nodes: int = 20, rounds: int = 50) -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fedsparse-soak-") as folder:
        fleet = Fleet(Path(folder) / "fleet", nodes)
        try:
            fleet.start_server()
            for number in range(nodes):
                fleet.start_node(number)

            def on_event(event: Any) -> None:
                if not isinstance(event, RoundDone):
                    return
                each = [memory(node_mark(Node.open(fleet.federation.node_folder(n)))) for n in range(nodes)]
                row = {"round": event.line["round"], "wall_s": round(event.line["wall_s"], 2)}
                row |= {"accepted": len(event.line["accepted"])}
                row |= {f"{name} MB": round(mb, 1) for name, mb in memory(mark_of(fleet.federation)).items()}
                for name in ("flower-supernode", "flower-superexec"):
                    values = [entry.get(name, 0.0) for entry in each]
                    row[f"node {name} MB"] = round(median(values), 1)
                    row[f"node {name} MB, largest"] = round(max(values), 1)
                database = fleet.federation.server / "state.db"
                row["database MB"] = round(sum(p.stat().st_size for p in database.parent.glob("state.db*")) / 1e6, 1)
                rows.append(row)
                print(row, flush=True)

            settings = [f"rounds={rounds}", f"data.num_clients={nodes}"]
            fleet.run(apply_overrides(from_toml(TOML), settings), Path(folder) / "run", on_event, apps=APPS)
        finally:
            fleet.stop()
    save("soak", rows, f"{nodes} nodes on loopback, private memory after each round; nodes: median and largest")


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:]))
