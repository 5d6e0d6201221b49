"""A Ray cluster of several nodes, joined by its address: here several raylets on one machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsparse.run import RunFolder, run_scenario
from fedsparse.scenario import apply_overrides, from_toml
from fedsparse.scenario.loading import to_toml

pytestmark = pytest.mark.slow

SCENARIO = """
name = "cluster"
rounds = 12
[data]
dataset = "digits"
num_clients = 8
[model]
name = "mlp(hidden=16)"
[train]
lr = 0.2
local_steps = 5
clients_per_round = 6
[compression]
uplink = "topk(density=0.05)"
[engine]
name = "inline"
"""

# The cluster lives in a process of its own, so that this one never shares a Ray instance with other tests.
CLUSTER = """
import os, signal, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 10**8})
second = cluster.add_node(num_cpus=1, object_store_memory=10**8)
cluster.wait_for_nodes()
print(cluster.address, second.all_processes["raylet"][0].process.pid, flush=True)
sys.stdin.readline()
cluster.shutdown()
"""

RUN = """
import os, signal, sys
from fedsparse.run import RoundDone, run_scenario
from fedsparse.scenario import load
from pathlib import Path
def on_event(event):
    if isinstance(event, RoundDone) and event.line["round"] == 3 and len(sys.argv) > 3:
        os.kill(int(sys.argv[3]), signal.SIGKILL)
print(run_scenario(load(Path(sys.argv[1])), sys.argv[2], on_event=on_event).status)
"""


@pytest.fixture
def cluster() -> Iterator[tuple[str, str]]:
    environment = os.environ | {"RAY_DISABLE_DOCKER_CPU_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None
    words: list[str] = []
    while len(words) != 2 or ":" not in words[0]:
        line = process.stdout.readline()
        assert line, "the cluster does not start"
        words = line.split()
    try:
        yield words[0], words[1]
    finally:
        process.communicate("\n", timeout=60)


def test_two_nodes_give_the_bits_of_one_process_also_where_one_of_them_dies(
    cluster: tuple[str, str], tmp_path: Path
) -> None:
    address, raylet = cluster
    run_scenario(from_toml(SCENARIO), tmp_path / "inline")
    file = tmp_path / "cluster.toml"
    file.write_text(to_toml(apply_overrides(from_toml(SCENARIO), ["engine.name=ray", f"engine.address={address}"])))
    for name, arguments in (("two", []), ("one-dies", [raylet])):
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(file), str(tmp_path / name), *arguments],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.stdout.split()[-1:] == ["completed"], done.stderr[-2000:]
        for result in ("model.safetensors", "partition.json"):
            assert (tmp_path / name / result).read_bytes() == (tmp_path / "inline" / result).read_bytes()
        lines = [RunFolder(tmp_path / run).rounds() for run in ("inline", name)]
        for line in (*lines[0], *lines[1]):
            del line["wall_s"]
        assert lines[0] == lines[1]


def test_a_node_that_does_not_see_the_memories_is_named(tmp_path: Path) -> None:
    program = (
        "from fedsparse.engine import RayGrid\n"
        "from fedsparse.errors import ConfigError\n"
        "try: RayGrid(num_clients=1, shared=['/nowhere/.lock']).wait_ready()\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert "does not see /nowhere/.lock" in done.stdout
