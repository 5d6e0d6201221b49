"""Real SuperLink, gateway and SuperNodes with TLS and authentication: parity, faults, hostile nodes."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from fleet import check_conservation

from fedsparse.run import RoundDone, RunFolder, run_scenario
from fedsparse.scenario import apply_overrides, from_toml
from fedsparse.scenario.schema import Scenario

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment"), pytest.mark.timeout(600)]

TOML = """
name = "deployed"
rounds = 5
[data]
dataset = "digits"
num_clients = 4
partition = "dirichlet(alpha=1.0)"
[model]
name = "mlp(hidden=16)"
[train]
lr = 0.2
local_steps = 5
[compression]
uplink = "topk(density=0.05)"
[evaluation]
every = 100
"""


def scenario(*overrides: str) -> Scenario:
    return apply_overrides(from_toml(TOML), list(overrides))


def inline(chosen: Scenario, out: Path) -> list[dict]:
    run_scenario(chosen, out, engine="inline")
    return RunFolder(out).rounds()


def test_whatever_is_killed_the_model_is_the_simulations_bit_for_bit(make_fleet, tmp_path):
    """Nodes die before training, after it, after storing, after replying, the SuperLink dies: nothing changes."""
    fleet = make_fleet(4)
    fleet.start_server()
    for number in range(4):
        fleet.start_node(number)
    fleet.plan({"0:2": "before", "1:3": "trained", "2:4": "stored"})
    chosen = scenario("rounds=7")

    def on_event(event):
        if isinstance(event, RoundDone) and event.line["round"] == 4:
            fleet.kill_node(3)  # its reply is in the model
        if isinstance(event, RoundDone) and event.line["round"] == 5:
            threading.Timer(1.0, lambda: os.kill(fleet.superlink(), signal.SIGKILL)).start()

    lines = fleet.run(chosen, tmp_path / "deployed", on_event)
    reference = inline(chosen, tmp_path / "inline")
    assert [line["accepted"] for line in lines] == [["0", "1", "2", "3"]] * 7, fleet.said("server")
    assert (tmp_path / "deployed/model.safetensors").read_bytes() == (
        tmp_path / "inline/model.safetensors"
    ).read_bytes()
    assert [line["uplink_bytes"] for line in lines] == [line["uplink_bytes"] for line in reference]
    assert {path.name for path in fleet.records.glob("fired-*")} == {"fired-0-2", "fired-1-3", "fired-2-4"}
    assert "superlink ended with code -9" in fleet.said("server")
    assert check_conservation(fleet, lines, 4) == 28


def test_what_hostile_and_broken_nodes_send_is_rejected_and_named(make_fleet, tmp_path):
    """Garbage, a bomb, NaN, 1e30, a replay, an old version, a full disk: without harm to the round, nothing is lost."""
    fleet = make_fleet(3)
    memory = fleet.federation.node_folder(1) / "memory"
    memory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", memory]
    full = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
    filler = memory / "filler"

    def on_event(event):
        if isinstance(event, RoundDone) and full and event.line["round"] in (3, 4):
            if event.line["round"] == 3:
                filler.write_bytes(b"0" * (os.statvfs(memory).f_bavail * os.statvfs(memory).f_bsize))
            else:
                filler.unlink()

    try:
        fleet.start_server()
        for number in range(3):
            fleet.start_node(number)
        kinds = ["garbage", "bomb", "nan", "huge", "replay", "wrong spec", "cut", "old"]
        fleet.plan({f"2:{number}": kind for number, kind in enumerate(kinds, start=2)})
        chosen = scenario("rounds=10", "data.num_clients=3", "strategy.max_update_norm=1000.0")
        lines = fleet.run(chosen, tmp_path / "deployed", on_event)
        check_conservation(fleet, lines, 3)
    finally:
        if full:
            subprocess.run(["umount", "-l", memory], check=False)
    expected = {
        2: "no fedsparse frame",
        3: "length",
        4: "not finite",
        5: "norm",
        6: "expected update 6",
        7: "made by",
        8: "checksum",
        9: "protocol",
    }
    reasons = {line["round"]: line["failed"].get("2", "") for line in lines}
    for server_round, words in expected.items():
        assert words in reasons[server_round], reasons
    assert reasons[1] == reasons[10] == ""
    assert all("0" in line["accepted"] for line in lines)
    if full:
        assert "No space left" in lines[3]["failed"]["1"]
    assert all("1" in line["accepted"] for line in lines if not (full and line["round"] == 4))
    assert lines[9]["restored"] == 1  # what was cut in round 8: the old version of round 9 did not touch its memory
    assert sum(line["restored"] for line in lines) >= 6
