"""A Ray instance of our own comes and goes without a trace."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flwr.app import ArrayRecord

from fedsparse.engine import RayGrid
from fedsparse.engine._workspace import Workspace
from fedsparse.errors import ConfigError
from fedsparse.processes import marked

from .conftest import ask

pytestmark = pytest.mark.slow
APP = "engine_apps:app"


def descendants() -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[-1].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def test_engines_start_and_close_again_and_again(
    base: Path, model: ArrayRecord, capfd: pytest.CaptureFixture[str]
) -> None:
    processes = descendants()
    kept = []
    for _ in range(2):
        with RayGrid(APP, num_clients=3, object_store_memory=100 * 2**20) as grid:
            assert len(list(base.iterdir())) == 1
            assert len(descendants()) > len(processes)
            kept += grid.send_and_receive(ask("train.echo", range(3), model))
        grid.close()
        with pytest.raises(RuntimeError, match="closed"):
            grid.send_and_receive(ask("train.echo", range(3), model))
    deadline = time.monotonic() + 10
    while descendants() != processes and time.monotonic() < deadline:
        time.sleep(0.1)
    assert descendants() == processes
    assert list(base.iterdir()) == []
    assert not list(Path("/dev/shm").glob("plasma*"))
    assert all(reply.content["arrays"] == model for reply in kept)  # replies outlive the engine
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def clients(mark: str) -> list[str]:
    """Marked processes; Ray's own two agents take a minute to notice that a killed driver is gone."""
    names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in marked(mark)]
    return [name for name in names if "Agent" not in name]


DRIVER = """
import sys
from pathlib import Path
from fedsparse.engine import RayGrid, _workspace
_workspace.BASE = Path(sys.argv[1])
from conftest import ask
with RayGrid("engine_apps:app", num_clients=4, num_workers=2, object_store_memory=10**8) as grid:
    grid.send_and_receive(ask("train.noop", range(4)))
    print("working", flush=True)
    grid.send_and_receive(ask("train.sleep", range(4), **{f"client-{i}": 600.0 for i in range(4)}))
"""


def hear_interrupts() -> None:
    """Undo what a shell does to its background jobs, whose children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_process(base: Path, how: signal.Signals) -> None:
    mark = f"FEDSPARSE_TEST={os.getpid()}-{how}"
    name, value = mark.split("=")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), name: value}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(base)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_interrupts,
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "working\n"
        time.sleep(0.5)
        if how == signal.SIGINT:
            os.killpg(driver.pid, how)  # as a terminal does it: to everyone in the foreground
        else:
            driver.kill()
        _, err = driver.communicate(timeout=30)
    # Ray notices a killed driver by its silence, which a busy machine draws out.
    deadline = time.monotonic() + 90
    while clients(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert clients(mark) == []
    if how == signal.SIGINT:
        assert err.rstrip().endswith("KeyboardInterrupt")
    else:
        with Workspace() as workspace:  # the next run tidies up
            assert list(base.iterdir()) == [workspace.path]
    assert list(base.iterdir()) == []


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("address", ["nowhere", "ray://somewhere:10001", "port:", "127.0.0.1:CLOSED"])
def test_a_cluster_that_is_not_there_is_noticed_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match=r"must be 'host:port'|no Ray cluster answers"):
        RayGrid(APP, num_clients=1, address=address.replace("CLOSED", closed_port()))


def test_a_cluster_is_joined_by_its_address_and_left_running(
    base: Path, model: ArrayRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_TMPDIR", str(base))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        for _ in range(2):
            with RayGrid(APP, num_clients=6, address=cluster.address) as grid:
                assert grid.num_workers == 2
                grid.wait_ready()
                replies = grid.send_and_receive(ask("train.echo", range(6), model))
                assert all(reply.content["arrays"] == model for reply in replies)
        assert list(base.iterdir()) == [base / "ray"]
    finally:
        cluster.shutdown()


def test_no_service_of_ours_listens_to_the_network():
    """Ray's ports have no login: whoever reaches them runs code. A run on one machine opens none to others."""
    program = (
        "import json, os, subprocess\n"
        "from fedsparse.engine import RayGrid\n"
        "with RayGrid('engine_apps:app', num_clients=2):\n"
        "    ours = {os.getpid()}\n"
        "    table = subprocess.run(['ps', '-eo', 'pid,ppid'], capture_output=True, text=True).stdout\n"
        "    rows = [tuple(map(int, line.split())) for line in table.splitlines()[1:]]\n"
        "    for _ in range(6): ours |= {pid for pid, parent in rows if parent in ours}\n"
        "    inodes = set()\n"
        "    for pid in ours:\n"
        "        try: links = [os.readlink(f'/proc/{pid}/fd/{fd}') for fd in os.listdir(f'/proc/{pid}/fd')]\n"
        "        except OSError: continue\n"
        "        inodes |= {link[8:-1] for link in links if link.startswith('socket:[')}\n"
        "    found = []\n"
        "    for name in ('tcp', 'tcp6'):\n"
        "        for line in open(f'/proc/net/{name}').read().splitlines()[1:]:\n"
        "            part = line.split()\n"
        "            if part[3] == '0A' and part[9] in inodes: found.append(part[1].rsplit(':', 1)[0])\n"
        "    print(json.dumps(found))\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=here, check=True)
    listening = json.loads(done.stdout.splitlines()[-1])
    assert listening, "Ray listens somewhere"
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert set(listening) <= loopback
