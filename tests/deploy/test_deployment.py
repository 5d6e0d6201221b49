"""Real SuperLink, gateway and SuperNodes with TLS and authentication: parity, faults, hostile nodes."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fleet import check_conservation

from fedsparse.data import load_dataset, partition
from fedsparse.deploy.control import Control
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
    """Nodes die before training, after it, after storing, after replying; SuperLink and ServerApp die."""
    fleet = make_fleet(4)
    fleet.start_server()
    for number in range(4):
        fleet.start_node(number)
    fleet.plan({"0:2": "before", "1:3": "trained", "2:4": "stored"})
    chosen, serverapps = scenario("rounds=7"), []

    def on_event(event):
        if isinstance(event, RoundDone) and event.line["round"] == 4:
            fleet.kill_node(3)  # its reply is in the model
        if isinstance(event, RoundDone) and event.line["round"] == 6 and not serverapps:
            serverapps.append(fleet.kill_server("flwr-serverapp"))
            threading.Thread(target=kill_the_next, args=(serverapps,), daemon=True).start()
        if isinstance(event, RoundDone) and event.line["round"] == 5:
            threading.Timer(1.0, lambda: fleet.kill_server("flower-superlink")).start()

    def kill_the_next(before: list[int]) -> None:
        """Kill the ServerApp that takes over, before it has done a round."""
        while len(before) < 2:
            time.sleep(0.1)
            if fleet.serverapps() - set(before):
                before.append(fleet.kill_server("flwr-serverapp"))

    lines = fleet.run(chosen, tmp_path / "deployed", on_event)
    assert len(serverapps) == 2
    reference = inline(chosen, tmp_path / "inline")
    assert [line["accepted"] for line in lines] == [["0", "1", "2", "3"]] * 7, fleet.said("server")
    assert (tmp_path / "deployed/model.safetensors").read_bytes() == (
        tmp_path / "inline/model.safetensors"
    ).read_bytes()
    assert [line["uplink_bytes"] for line in lines] == [line["uplink_bytes"] for line in reference]
    assert {path.name for path in fleet.records.glob("fired-*")} == {"fired-0-2", "fired-1-3", "fired-2-4"}
    assert serverapps, "the ServerApp was killed"
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
        claims = fleet.federation.node_folder(2) / "node.toml"  # that it is node 0: its key says otherwise
        claims.write_text(claims.read_text().replace("node = 2", "node = 0", 1))
        for number in range(3):
            fleet.start_node(number)
        kinds = ["garbage", "bomb", "nan", "huge", "replay", "wrong spec", "cut", "old"]
        plan = {f"2:{number}": kind for number, kind in enumerate(kinds, start=2)}
        fleet.plan(plan | {"2:11": "no message"})
        chosen = scenario("rounds=12", "data.num_clients=3", "strategy.max_update_norm=1000.0")
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
        11: "cannot be read",
    }
    reasons = {line["round"]: line["failed"].get("2", "") for line in lines}
    for server_round, words in expected.items():
        assert words in reasons[server_round], reasons
    assert reasons[1] == reasons[10] == reasons[12] == ""
    assert all("0" in line["accepted"] for line in lines)
    if full:
        assert "No space left" in lines[3]["failed"]["1"]
    assert all("1" in line["accepted"] for line in lines if not (full and line["round"] == 4))
    assert lines[9]["restored"] == 1  # only now, with an accepted update, can it tell


def test_devices_train_on_their_own_data_without_the_packages_of_a_simulation(make_fleet, tmp_path):
    """What lies in a device's file gives the very model that the same part of the shared set gives."""
    chosen = scenario("rounds=2", "data.num_clients=2", "compression.uplink=topk(density=0.05)|qsgd(levels=8)")
    digits = load_dataset("digits")
    parts = partition(chosen.data.partition, digits.y_train, 2, chosen.seed)
    fleet = make_fleet(2)
    for number, part in enumerate(parts):
        x = digits.x_train[part].astype(np.float32) * np.float32(digits.scale)
        folder = fleet.federation.node_folder(number)
        if number == 0:
            np.savez(folder / "own.npz", x=x, y=digits.y_train[part])
        else:
            labels = digits.y_train[part]
            rows = [",".join([*(f"p{i}" for i in range(x[0].size)), "label"])]
            for example, label in zip(x, labels, strict=True):
                rows.append(",".join([*(repr(float(value)) for value in example.ravel()), str(label)]))
            (folder / "own.csv").write_text("\n".join(rows))
        text = (folder / "node.toml").read_text()
        suffix = ("npz", "csv")[number]
        text = text.replace("[data]", f'[data]\nsource = "own.{suffix}"', 1)
        (folder / "node.toml").write_text(text.replace("[limits]", "[limits]\nmemory_mb = 1024", 1))
    fleet.start_server()
    for number in range(2):
        fleet.start_node(number, bare=True)
    lines = fleet.run(chosen, tmp_path / "deployed")
    assert [line["accepted"] for line in lines] == [["0", "1"]] * 2
    inline(chosen, tmp_path / "inline")
    deployed, simulated = (tmp_path / name / "model.safetensors" for name in ("deployed", "inline"))
    assert deployed.read_bytes() == simulated.read_bytes()


def test_a_late_node_joins_and_a_dead_server_is_resumed(make_fleet, tmp_path):
    """Two of three nodes begin; the server loses its power; the run goes on with all three."""
    fleet = make_fleet(3)
    fleet.start_server()
    fleet.start_node(0)
    out, toml = tmp_path / "run", tmp_path / "deployed.toml"
    toml.write_text(
        TOML.replace("num_clients = 4", "num_clients = 3").replace(
            "[compression]", "[engine]\nmin_clients = 2\n[compression]"
        )
    )
    command = [sys.executable, "-m", "fedsparse.cli", "run", str(toml), "--engine", "deployment", "--out", str(out)]
    command += ["--federation", str(fleet.federation.path)]
    with (tmp_path / "first.out").open("w") as told:
        first = subprocess.Popen(command, env=fleet.environment(), stderr=told)
    words = "waiting for nodes: 1 of 2 are connected (not there: 1, 2)"
    fleet.wait(lambda: words in (tmp_path / "first.out").read_text(), 60, "the word that it waits")
    fleet.start_node(1)
    fleet.wait(lambda: len(RunFolder(out).rounds()) >= 2, 180, "two rounds")
    for process in (first, fleet.processes.pop("server")):
        process.kill()
        process.wait()
    done = len(RunFolder(out).rounds())
    assert 2 <= done < 5
    fleet.start_node(2)
    fleet.start_server()
    again = subprocess.run([*command, "--resume"], env=fleet.environment(), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    lines = RunFolder(out).rounds()
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["accepted"] == ["0", "1"]
    assert lines[-1]["accepted"] == ["0", "1", "2"]
    assert json.loads((out / "summary.json").read_text())["status"] == "completed"
    shown = subprocess.run(
        [sys.executable, "-m", "fedsparse.cli", "deploy", "status", str(fleet.federation.path)],
        env=fleet.environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [line.split()[:2] for line in shown.splitlines()[1:4]] == [["0", "online"], ["1", "online"], ["2", "online"]]
    assert f"latest run: {out}, 5 rounds" in shown


def test_a_run_is_stopped_replaced_and_gone_on_with(make_fleet, tmp_path):
    """By a signal, by `deploy stop`, by kill -9 of what follows it: nobody else writes, and nothing is lost."""
    fleet = make_fleet(2)
    fleet.start_server()
    for number in (0, 1):
        fleet.start_node(number)
    out, toml = tmp_path / "my run", tmp_path / "deployed.toml"
    toml.write_text(TOML.replace("num_clients = 4", "num_clients = 2").replace("rounds = 5", "rounds = 300"))
    base = [sys.executable, "-m", "fedsparse.cli"]
    command = [*base, "run", str(toml), "--engine", "deployment", "--out", str(out)]
    command += ["--federation", str(fleet.federation.path)]
    control = Control(fleet.federation.inner, fleet.federation.ca)

    def start(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*command, *more], env=fleet.environment(), stderr=subprocess.PIPE, text=True)

    def rounds() -> int:
        return len(RunFolder(out).rounds())

    def status() -> str:
        return json.loads((out / "summary.json").read_text())["status"]

    early = start()  # a signal while the run is being submitted
    fleet.wait(lambda: (out / "rounds.jsonl").exists(), 60, "the folder")
    early.terminate()
    early.communicate(timeout=120)
    assert control.going() == []

    first = start("--overwrite")
    fleet.wait(lambda: rounds() >= 2, 120, "two rounds")
    first.terminate()
    time.sleep(0.3)
    first.terminate()  # whoever is impatient loses nothing
    assert "stopped; what was done so far is in" in first.communicate(timeout=60)[1]
    assert (first.returncode, status(), control.going()) == (130, "interrupted", [])
    done = rounds()
    assert time_stands_still(out)
    inline(scenario(f"rounds={done}", "data.num_clients=2"), tmp_path / "inline")
    left, simulated = (path / "model.safetensors" for path in (out, tmp_path / "inline"))
    assert left.read_bytes() == simulated.read_bytes(), "what a stopped run leaves is its model"

    second = start("--resume")
    fleet.wait(lambda: rounds() > done, 120, "another round")
    second.kill()
    second.communicate()
    assert len(control.going()) == 1, "the run goes on without whoever followed it"
    other = subprocess.run(
        [*command, "--resume", "--set", "train.lr=0.1"], env=fleet.environment(), capture_output=True, text=True
    )
    assert other.returncode == 2
    assert "cannot be resumed with other settings" in other.stderr
    assert len(control.going()) == 1, "what cannot be resumed stops nobody"
    third = start("--overwrite")
    fleet.wait(lambda: third.poll() is not None or 1 <= rounds() < done, 120, "a new run")
    assert len(control.going()) == 1, "the earlier one was stopped"
    shown = subprocess.run([*base, "deploy", "stop", str(fleet.federation.path)], capture_output=True, text=True)
    assert "stopped run" in shown.stdout
    told = third.communicate(timeout=60)[1]
    assert (third.returncode, status()) == (1, "interrupted")
    assert "With --resume it goes on" in told
    assert "was stopped on the server" in told
    assert control.going() == []


def time_stands_still(folder: Path) -> bool:
    """Whether nobody writes there any more."""
    state = [{path: path.stat().st_mtime_ns for path in folder.rglob("*")} for _ in range(2) if time.sleep(3) is None]
    return state[0] == state[1]
