"""A run that was killed at any moment and resumed ends with the very bits of one that was not."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsparse.compare import compare_scenario
from fedsparse.compression.memory_file import read_file
from fedsparse.errors import ConfigError, RunError
from fedsparse.run import RoundDone, RunFolder, Started, run_scenario
from fedsparse.run.checkpoint import Checkpoint
from fedsparse.scenario import apply_overrides, from_toml
from fedsparse.scenario.schema import Scenario

SMALL = """
name = "small"
rounds = 6
[data]
dataset = "digits"
num_clients = 6
partition = "dirichlet(alpha=0.3)"
[model]
name = "mlp(hidden=16)"
[train]
lr = 0.2
local_steps = 5
clients_per_round = 4
lr_schedule = "cosine"
[compression]
uplink = "topk(density=0.05)|qsgd(levels=8)"
[engine]
name = "inline"
"""

SETTINGS = [
    [],
    ["compression.uplink=none"],
    ['compression.uplink=hard_threshold(budget="30kB")|sign', "rounds=8"],
    ["compression.uplink=accordion(topk(density=0.01), high=0.1)", "compression.momentum_correction=0.9"],
    ["strategy.name=FedAdam", "strategy.options.eta=0.05", "compression.uplink=hard_threshold(lam=0.02)"],
    ["strategy.name=FedAvgM", "strategy.options.server_momentum=0.9", "evaluation.iterate_average=uniform"],
    ["devices.mix=phone-4g", "devices.dropout=0.2", "devices.over_select=0.5", "devices.network_sigma=1.0"],
    ["devices.mix=phone-4g", "devices.network_sigma=1.0", "compression.uplink=balanced(topk(density=0.05))"],
    ["compression.memory_dtype=float16", "compression.momentum_correction=0.5"],
    ["strategy.name=Krum", "model.name=cnn", "data.num_clients=5", "rounds=3"],
]


def small(*overrides: str) -> Scenario:
    return apply_overrides(from_toml(SMALL), list(overrides))


def outcome(out: Path) -> dict[str, Any]:
    """All that a run leaves but its times."""
    lines = RunFolder(out).rounds()
    summary = RunFolder(out).read_json("summary.json")
    for entry in (*lines, summary):
        for key in ("wall_s", "started", "command", "engine"):
            entry.pop(key, None)
    memories = {}
    for path in sorted(out.glob("memory/*/*.memory")):
        stored = read_file(path)
        vectors = [stored.residual, stored.velocity]
        memories[path.name] = [None if v is None else v.tobytes() for v in vectors], stored.pending
    return {"model": (out / "model.safetensors").read_bytes(), "lines": lines, "summary": summary, "memory": memories}


@pytest.mark.parametrize("overrides", SETTINGS, ids=lambda value: value[0] if value else "plain")
def test_stopped_in_every_round_it_ends_the_same(tmp_path, overrides):
    scenario = small(*overrides)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_scenario(scenario, whole)
    starts: list[int] = []
    while True:

        def stop(event: Started | RoundDone) -> None:
            if isinstance(event, Started):
                starts.append(event.rounds)
                assert not (parts / "summary.json").exists(), "that the run was stopped is no longer true"
            elif event.line["round"] < scenario.rounds:
                raise KeyboardInterrupt

        try:
            run_scenario(scenario, parts, resume=True, on_event=stop)
            break
        except KeyboardInterrupt:
            assert Checkpoint.load(parts) is not None
    assert starts == list(range(scenario.rounds))
    assert outcome(parts) == outcome(whole)
    assert not (parts / "checkpoint").exists()


@pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_the_same(tmp_path, engine):
    """kill -9 of the whole driver, also in the middle of a round, of a commit, of a write."""
    rounds = 30 if engine == "inline" else 8
    scenario = small(f"engine.name={engine}", f"rounds={rounds}", "model.name=mlp(hidden=64)", "train.local_steps=10")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_scenario(scenario, whole)
    text, seed = _as_toml(tmp_path, scenario), random.randrange(2**32)
    moments, kills = random.Random(seed), 0
    for _ in range(40):
        process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, str(text), str(parts)], stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        began = process.stdout.readline()  # the rounds begin: imports are not what is to be killed
        if began and kills < (6 if engine == "inline" else 2):
            time.sleep(moments.uniform(0.0, 0.25 if engine == "inline" else 0.6))
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, f"seed {seed}"
        kills += 1
    assert kills, "it was too fast to be killed"
    assert outcome(parts) == outcome(whole), f"seed {seed}, {kills} kills"


_DRIVER = """
import sys
from pathlib import Path
from fedsparse.run import run_scenario
from fedsparse.scenario import load
run_scenario(load(Path(sys.argv[1])), sys.argv[2], resume=True, on_event=lambda event: print(type(event), flush=True))
"""


def _as_toml(folder: Path, scenario: Scenario) -> Path:
    from fedsparse.scenario import to_toml

    path = folder / "scenario.toml"
    path.write_text(to_toml(scenario))
    return path


def test_a_run_that_cannot_go_on_says_why(tmp_path):
    out = tmp_path / "out"

    def stop(event: Started | RoundDone) -> None:
        if isinstance(event, RoundDone) and event.line["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_scenario(small(), out, on_event=stop)
    with pytest.raises(ConfigError, match="--resume to go on with it"):
        run_scenario(small(), out)
    with pytest.raises(ConfigError, match=r"train.lr was 0.2, is 0.1"):
        run_scenario(small("train.lr=0.1"), out, resume=True)
    (checkpoint,) = (out / "checkpoint").iterdir()
    whole = checkpoint.read_bytes()
    for bad in (b"", whole[:100], whole[:-1], b"x" * 4000):
        checkpoint.write_bytes(bad)
        with pytest.raises(RunError, match="cannot be read"):
            run_scenario(small(), out, resume=True)
    flipped = bytearray(whole)
    flipped[-500] ^= 0x40
    checkpoint.write_bytes(flipped)
    with pytest.raises(RunError, match="checksum"):
        run_scenario(small(), out, resume=True)
    checkpoint.write_bytes(whole.replace(b"small", b"smell"))
    with pytest.raises(RunError, match="of another run"):
        run_scenario(small(), out, resume=True)
    checkpoint.write_bytes(whole.replace(b"wall_s", b"wall_t"))
    with pytest.raises(RunError, match="cannot be read"):
        run_scenario(small(), out, resume=True)
    checkpoint.write_bytes(whole)
    lines = (out / "rounds.jsonl").read_bytes()
    for bad, words in (
        (lines[lines.index(b"\n") + 1 :], "lacks rounds"),
        (lines + b"garbage{\n", "damaged"),
        (b"\xff\n", "damaged"),
    ):
        (out / "rounds.jsonl").write_bytes(bad)
        with pytest.raises(RunError, match=words):
            run_scenario(small(), out, resume=True)
    (out / "rounds.jsonl").write_bytes(lines)
    checkpoint.write_bytes(whole.replace(b'{\\"version\\": 1', b'{\\"version\\": 7'))
    with pytest.raises(RunError, match="version 7"):
        run_scenario(small(), out, resume=True)
    checkpoint.write_bytes(whole)
    summary = run_scenario(small("description=another"), out, resume=True)
    assert summary.status == "completed"
    before = json.loads((out / "summary.json").read_text())
    assert run_scenario(small(), out, resume=True).started == before["started"]


def test_a_run_never_takes_the_place_of_a_comparison(tmp_path):
    compare_scenario(small("rounds=1"), tmp_path / "out", seeds=[0])
    with pytest.raises(ConfigError, match="holds a comparison"):
        run_scenario(small("rounds=1"), tmp_path / "out", resume=True)
    assert list((tmp_path / "out").glob("*/seed-0/model.safetensors"))


def test_without_checkpoints_an_older_one_does_not_stay(tmp_path, caplog):
    def stop(event: Started | RoundDone) -> None:
        if isinstance(event, RoundDone):
            raise KeyboardInterrupt

    for overrides in ([], ["engine.checkpoint=false"]):
        with pytest.raises(KeyboardInterrupt):
            run_scenario(small(*overrides), tmp_path / "run", resume=True, on_event=stop)
    assert Checkpoint.load(tmp_path / "run") is None
    run_scenario(small(), tmp_path / "run", resume=True)
    assert "its 2 rounds are given up" in caplog.text


def test_what_an_app_keeps_in_its_context_is_resumed(tmp_path):
    """Also where the client had answered, but its answer was lost with the driver."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg

    from clients import CompressionMod
    from fedsparse.engine import InlineGrid
    from strategies import CompressedStrategy

    def make(folder: Path) -> ClientApp:
        app = ClientApp(mods=[CompressionMod(folder)])

        @app.train()
        def train(message, context):
            count = int(context.state["count"]["n"]) + 1 if "count" in context.state else 1
            context.state["count"] = MetricRecord({"n": count})
            model = message.content["arrays"].to_numpy_ndarrays()
            content = RecordDict({"arrays": ArrayRecord([array + count for array in model])})
            content["metrics"] = MetricRecord({"num-examples": 1})
            return Message(content, reply_to=message)

        return app

    start = ArrayRecord([np.zeros(8, np.float32)])
    strategy = CompressedStrategy(FedAvg(), "topk(k=2)", run="a")
    with InlineGrid(make(tmp_path), num_clients=2) as grid:
        grid.send_and_receive(strategy.configure_train(1, start, ConfigRecord(), grid))
        kept = dict(grid.states)
    assert len(kept) == 2
    with InlineGrid(make(tmp_path), num_clients=2) as grid:  # as if nothing had reached the server
        again = CompressedStrategy(FedAvg(), "topk(k=2)", run="a")
        grid.send_and_receive(again.configure_train(1, start, ConfigRecord(), grid))
        assert grid.states == kept
