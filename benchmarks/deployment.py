"""A deployment over a slow link: bytes on the node's interface, and the time of a round, beside dense FedAvg.

As root on Linux with iproute2 (about six minutes)::

    python -m benchmarks.deployment

One node in a network namespace behind 2 Mbit/s, a model of 1,000,060 parameters; then the latency of a round of a tiny
model on loopback, with the gateway holding questions for messages and without.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._report import save
from fedsparse.deploy import gateway
from fedsparse.scenario import apply_overrides, from_toml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/deploy"))

from fleet import Fleet
from links import Link

APPS = ("fedsparse.flower_app:server_app", "clients.client_app:app")
UPLINKS = (
    "none",
    "topk(density=0.01)",
    'topk(density=0.01)|qsgd(levels=8, norm="max")',
    "hard_threshold(lam=0.001)|sign",
)
TOML = """
name = "deployment"
rounds = 3
[data]
dataset = "digits"
num_clients = 1
[model]
name = "mlp(hidden=13334)"
[train]
lr = 0.1
local_steps = 5
[evaluation]
every = 100
"""


def over_a_link(rate: str) -> list[dict[str, Any]]:
    """Measure every compressor on one slow link."""
    rows = []
    with Link(9, rate) as link, tempfile.TemporaryDirectory(prefix="fedsparse-bench-") as folder:
        fleet = Fleet(Path(folder) / "fleet", 1, link.address)
        try:
            fleet.start_server()
            fleet.start_node(0, link.prefix)
            for number, uplink in enumerate(UPLINKS):
                up, down = link.uplink_bytes, link.downlink_bytes
                chosen = apply_overrides(from_toml(TOML), [f"compression.uplink={uplink}"])
                lines = fleet.run(chosen, Path(folder) / f"run-{number}", apps=APPS)
                frames = sum(line["uplink_bytes"] for line in lines) / len(lines)
                rows.append(
                    {
                        "link": rate,
                        "uplink": uplink,
                        "frame bytes a round": round(frames),
                        "interface bytes up a round": round((link.uplink_bytes - up) / len(lines)),
                        "interface bytes down a round": round((link.downlink_bytes - down) / len(lines)),
                        "median s a round": round(median(line["wall_s"] for line in lines), 2),
                    }
                )
        finally:
            fleet.stop()
    dense = rows[0]
    for row in rows:
        row["times fewer bytes up"] = round(dense["interface bytes up a round"] / row["interface bytes up a round"], 1)
        row["times faster"] = round(dense["median s a round"] / row["median s a round"], 2)
    return rows


def latency() -> list[dict[str, Any]]:
    """Measure rounds of a tiny model, the gateway's hold on and off in turn."""
    times: dict[str, list[float]] = {"held": [], "asked every 3 s": []}
    for turn in range(2):
        for name in times:
            with tempfile.TemporaryDirectory(prefix="fedsparse-bench-") as folder:
                fleet = Fleet(Path(folder) / "fleet", 2)
                fleet.variables[gateway.HOLD] = "20" if name == "held" else "0"
                try:
                    fleet.start_server()
                    for number in range(2):
                        fleet.start_node(number)
                    settings = ["model.name=softmax", "data.num_clients=2", "rounds=6", "compression.uplink=topk(k=10)"]
                    lines = fleet.run(apply_overrides(from_toml(TOML), settings), Path(folder) / "run", apps=APPS)
                    times[name] += [line["wall_s"] for line in lines[1:]]
                finally:
                    fleet.stop()
        del turn
    return [
        {"question for messages": name, "median s a round": round(median(found), 2), "rounds": len(found)}
        for name, found in times.items()
    ]


if __name__ == "__main__":
    save("deployment", [*over_a_link("2mbit"), *latency()], "one node in a network namespace; then two on loopback")
