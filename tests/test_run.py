"""Running one scenario: what the folder says, whatever happens to the run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from clients.training import evaluate
from fedsparse.compare import read
from fedsparse.data import load_dataset
from fedsparse.errors import ConfigError, RunError
from fedsparse.models import build_model, load_arrays, model_arrays
from fedsparse.report import findings
from fedsparse.run import RoundDone, RunFolder, Started, Summary, run_scenario
from fedsparse.run.task import Task
from fedsparse.scenario import Scenario, apply_overrides, from_toml

TINY = """
name = "tiny"
seed = 3
rounds = 4
target_accuracy = 0.25
[data]
dataset = "digits"
num_clients = 6
partition = "dirichlet(alpha=0.3)"
[model]
name = "mlp(hidden=16)"
[train]
lr = 0.2
local_steps = 20
clients_per_round = 4
[compression]
uplink = "hard_threshold(lam=0.05)|sign"
[engine]
name = "inline"
"""
KEYS = [
    "round", "wall_s", "virtual_s", "cohort", "accepted", "failed", "uplink_bytes", "downlink_bytes",
    "uplink_frame_bits_formula", "nnz", "density", "lam", "train_loss", "eval_loss", "eval_accuracy", "residual_norm",
    "total_error", "objective", "predicted_bytes", "budget_spent", "budget_predicted",
]  # fmt: skip

USER_CODE = """
import numpy as np
import torch

def data():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    x[:40][np.arange(40) < {marked}, 2] = 1e6
    return x[:40], y[:40], x[40:], y[40:]

class Picky(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        if self.training and (x[:, 2] > 1e5).any():
            raise ValueError("this example is cursed")
        return self.linear(x)

def model(input_shape, num_classes):
    return Picky()
"""


def tiny(*overrides: str) -> Scenario:
    return apply_overrides(from_toml(TINY), overrides)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def user_module(folder: Path, monkeypatch: pytest.MonkeyPatch, marked: int) -> tuple[str, str]:
    name = f"cursed_{marked}_{folder.name}".replace("-", "_")
    (folder / f"{name}.py").write_text(USER_CODE.format(marked=marked))
    monkeypatch.syspath_prepend(str(folder))
    return f"data.dataset={name}:data", f"model.name={name}:model"


def test_a_run_leaves_a_folder_whose_numbers_agree(tmp_path: Path) -> None:
    events: list[Any] = []
    scenario = tiny()
    summary = run_scenario(scenario, tmp_path / "out", on_event=events.append, command="how I did it")
    folder = tmp_path / "out"
    lines = lines_of(folder)
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert all(set(KEYS) <= set(line) and line["virtual_s"] is None for line in lines)
    assert [type(event) for event in events] == [Started, *[RoundDone] * 4]
    assert [event.line for event in events[1:]] == lines

    assert summary.status == "completed"
    assert Summary.from_json(json.loads((folder / "summary.json").read_text())) == summary
    assert summary.uplink_bytes == sum(line["uplink_bytes"] for line in lines)
    assert summary.downlink_bytes == sum(line["downlink_bytes"] for line in lines)
    parameters = 64 * 16 + 16 + 16 * 10 + 10
    assert (summary.num_parameters, summary.dense_bytes) == (parameters, 4 * parameters * 16)
    assert summary.compression_ratio == summary.dense_bytes / summary.uplink_bytes
    assert summary.final_accuracy == lines[-1]["eval_accuracy"]
    assert summary.best_accuracy == max(line["eval_accuracy"] for line in lines)
    reached = [line["round"] for line in lines if line["eval_accuracy"] >= 0.25]
    assert summary.rounds_to_target == reached[0]
    assert summary.uplink_bytes_to_target == sum(line["uplink_bytes"] for line in lines[: reached[0]])
    assert summary.command == "how I did it"
    assert summary.final_accuracy > summary.initial_accuracy + 0.1

    assert RunFolder(folder).scenario() == scenario
    assert {path.name for path in folder.iterdir()} == {
        "scenario.toml", "rounds.jsonl", "summary.json", "model.safetensors", "partition.json", "memory",
    }  # fmt: skip
    counts = np.array(json.loads((folder / "partition.json").read_text())["label_counts"])
    assert counts.shape == (6, 10)
    assert (counts.sum(axis=0) == np.bincount(load_dataset("digits").y_train)).all()
    assert len(list(folder.glob("memory/**/*.memory"))) == len({client for line in lines for client in line["cohort"]})


def test_evaluation_as_often_and_of_what_the_scenario_asks(tmp_path: Path) -> None:
    wanted = ["evaluation.every=3", "evaluation.objective=true", "train.weight_decay=0.1"]
    summary = run_scenario(apply_overrides(tiny(), wanted), tmp_path / "out")
    lines = lines_of(tmp_path / "out")
    assert [line["eval_accuracy"] is None for line in lines] == [True, True, False, False]
    assert summary.rounds_completed == 4
    data, arrays = load_dataset("digits"), load_file(tmp_path / "out/model.safetensors")
    model = build_model("mlp(hidden=16)", data.input_shape, 10, seed=99)
    load_arrays(model, arrays)
    loss, _ = evaluate(model, data.x_train, data.y_train, data.scale, torch.device("cpu"))
    squares = sum(float((array.astype(np.float64) ** 2).sum()) for array in arrays.values())
    assert summary.final_objective == lines[-1]["objective"] == pytest.approx(loss + 0.05 * squares, rel=1e-6)


def test_the_average_of_the_rounds_is_what_is_evaluated_and_saved(tmp_path: Path) -> None:
    models = []
    for rounds in (1, 2, 3):
        run_scenario(apply_overrides(tiny(), [f"rounds={rounds}"]), tmp_path / str(rounds))
        models.append(load_file(tmp_path / f"{rounds}/model.safetensors"))
    averaged = ["rounds=3", "evaluation.iterate_average=quadratic(a=5)"]
    summary = run_scenario(apply_overrides(tiny(), averaged), tmp_path / "average")
    weights = [(5 + 20 * t) ** 2 for t in (1, 2, 3)]  # 20 local steps a round
    got = load_file(tmp_path / "average/model.safetensors")
    for name, array in got.items():
        expected = sum(w * m[name].astype(np.float64) for w, m in zip(weights, models, strict=True)) / sum(weights)
        np.testing.assert_allclose(array, expected, rtol=1e-6)
    plain = json.loads((tmp_path / "3/summary.json").read_text())
    assert summary.uplink_bytes == plain["uplink_bytes"]
    assert summary.final_loss != plain["final_loss"]


def test_the_model_on_disk_is_the_one_that_was_evaluated(tmp_path: Path) -> None:
    summary = run_scenario(tiny(), tmp_path / "out")
    data = load_dataset("digits")
    model = build_model("mlp(hidden=16)", data.input_shape, 10, seed=99)
    load_arrays(model, load_file(tmp_path / "out/model.safetensors"))
    import torch

    logits = model(torch.from_numpy(np.array(data.x_test)).float() / 16)
    assert float((logits.argmax(1).numpy() == data.y_test).mean()) == pytest.approx(summary.final_accuracy)


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run_scenario(tiny(f"seed={seed}"), tmp_path / name)
    model = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert model["a"] == model["b"] != model["c"]

    def without_time(name: str) -> list[dict[str, Any]]:
        return [{key: value for key, value in line.items() if key != "wall_s"} for line in lines_of(tmp_path / name)]

    assert without_time("a") == without_time("b")


def test_settings_reach_the_clients(tmp_path: Path) -> None:
    clipped = ("train.clip_norm=1e-6", "compression.uplink=none", "rounds=1")
    run_scenario(tiny(*clipped), tmp_path / "clipped")
    run_scenario(tiny(*clipped[1:]), tmp_path / "free")
    assert lines_of(tmp_path / "clipped")[0]["update_norm"] <= 0.2 * 20 * 1e-6 * 1.01
    assert lines_of(tmp_path / "free")[0]["update_norm"] > 0.1
    assert lines_of(tmp_path / "free")[0]["residual_norm"] == 0
    run_scenario(tiny("strategy.name=FedAdam", "strategy.options.eta=0.01", "rounds=1"), tmp_path / "adam")
    start = model_arrays(build_model("mlp(hidden=16)", (1, 8, 8), 10, seed=3))
    moved = load_file(tmp_path / "adam/model.safetensors")
    steps = np.concatenate([(moved[name] - start[name]).ravel() for name in start])
    assert 0.005 < np.abs(steps).max() <= 0.0101  # Adam's first step is eta (1 - beta_1) / sqrt(1 - beta_2) at most


def test_torch_threads_are_what_they_were(tmp_path: Path) -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_scenario(tiny("rounds=1"), tmp_path / "out")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_client_that_raises_is_named_and_the_round_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = user_module(tmp_path, monkeypatch, marked=1)
    scenario = tiny(*names, "data.partition=iid", "train.clients_per_round=6", "train.batch_size=64")
    summary = run_scenario(scenario, tmp_path / "out")
    lines = lines_of(tmp_path / "out")
    failed = {client for line in lines for client in line["failed"]}
    assert len(failed) == 1
    for line in lines:
        (client,) = line["failed"]
        assert "ValueError: this example is cursed" in line["failed"][client]
        assert set(line["accepted"]) == set(line["cohort"]) - {client}
    assert (summary.status, summary.client_failures, summary.rounds_completed) == ("completed", 4, 4)


@pytest.mark.parametrize("overrides", [(), ("compression.momentum_correction=0.5",)])
def test_error_memories_that_are_gone_are_counted(tmp_path: Path, overrides: tuple[str, ...], caplog: Any) -> None:
    """Also across a resumed run, and where a dropout takes away the reply that says so."""
    scenario = tiny("rounds=12", "devices.mix=phone-4g", "devices.dropout=0.4", "train.clients_per_round=6", *overrides)
    out, lost = tmp_path / "out", dict[str, int]()

    def lose(event: Started | RoundDone) -> None:
        if isinstance(event, Started):
            return
        for client in event.line["accepted"]:  # so that the server knows of it
            if event.line["round"] == 3 and not lost.get(client):
                (path,) = out.glob(f"memory/*/{client}.memory")
                path.unlink()
                lost[client] = 3
        if event.line["round"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_scenario(scenario, out, on_event=lose)
    assert lost
    summary = run_scenario(scenario, out, resume=True)
    lines = lines_of(out)
    assert sum(line["memory_resets"] for line in lines[3:]) == len(lost) == summary.memory_resets
    assert "damaged or gone and restarted from zero" in caplog.text
    assert any("restarted from zero" in sentence for sentence in findings(read(out)))


@pytest.mark.parametrize("overrides", [("compression.uplink=none",), ("compression.error_memory=false",)])
def test_without_error_memory_none_is_missed(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    summary = run_scenario(tiny(*overrides), tmp_path / "out")
    assert (summary.status, summary.memory_resets) == ("completed", 0)
    assert not list((tmp_path / "out").glob("memory/*/*.memory"))


def test_when_all_clients_fail_the_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = user_module(tmp_path, monkeypatch, marked=40)
    with pytest.raises(RunError, match=r"all 4 clients failed; the first, client \d: .*this example is cursed"):
        run_scenario(tiny(*names, "data.partition=iid"), tmp_path / "out")
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    (line,) = lines_of(tmp_path / "out")
    assert summary["status"] == "failed"
    assert "this example is cursed" in summary["error"]
    assert (len(line["failed"]), line["accepted"], line["eval_accuracy"]) == (4, [], None)
    assert summary["rounds_completed"] == 0
    start = load_file(tmp_path / "out/model.safetensors")
    assert set(start) == {"linear.weight", "linear.bias"}


def test_a_folder_in_use_is_never_mixed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_scenario(tiny("rounds=1"), out)
    before = (out / "summary.json").read_bytes()
    with pytest.raises(ConfigError, match=r"already holds a run\. Say --overwrite"):
        run_scenario(tiny("rounds=2"), out)
    assert (out / "summary.json").read_bytes() == before
    (out / "my-notes.txt").write_text("keep me")
    run_scenario(tiny("rounds=2"), out, overwrite=True)
    assert len(lines_of(out)) == 2
    assert (out / "my-notes.txt").read_text() == "keep me"
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "scenario.toml").write_text("name = 'killed at the very start'")
    with pytest.raises(ConfigError, match=r"holds scenario\.toml alone.*--overwrite"):
        run_scenario(tiny("rounds=1"), begun)
    run_scenario(tiny("rounds=1"), begun, overwrite=True)
    assert len(lines_of(begun)) == 1
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="holds no run of fedsparse"):
            run_scenario(tiny(), other, overwrite=overwrite)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_a_last_line_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    run_scenario(tiny("rounds=2"), tmp_path / "out")
    with open(tmp_path / "out/rounds.jsonl", "a") as file:
        file.write('{"round": 3, "up')
    assert [line["round"] for line in RunFolder(tmp_path / "out").rounds()] == [1, 2]


def hear_interrupts() -> None:
    """Undo what a shell does to its background jobs, whose children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start_and_interrupt(tmp_path: Path, engine: str, kind: signal.Signals) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "tiny.toml").write_text(TINY)
    command = [sys.executable, "-m", "fedsparse.cli", "run", "tiny.toml", "--out", "out", "--engine", engine]
    process = subprocess.Popen(
        [*command, "--set", "rounds=100000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_interrupts,
    )
    rounds, deadline = tmp_path / "out/rounds.jsonl", time.monotonic() + 90
    while not rounds.exists() or rounds.read_text().count("\n") < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not start"
        time.sleep(0.05)
    if kind == signal.SIGINT:
        os.killpg(process.pid, kind)  # as a terminal does it: to all processes of the job
    else:
        process.send_signal(kind)
    stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("inline", signal.SIGINT),
        ("inline", signal.SIGTERM),
        pytest.param("ray", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("ray", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_stopping_a_run_leaves_a_valid_folder(tmp_path: Path, engine: str, kind: signal.Signals) -> None:
    ended = start_and_interrupt(tmp_path, engine, kind)
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "what was done so far is in out" in ended.stderr
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    lines = lines_of(tmp_path / "out")
    assert summary["status"] == "interrupted"
    assert summary["rounds_completed"] == len(lines) >= 3
    assert summary["final_accuracy"] == lines[-1]["eval_accuracy"]
    assert not list((tmp_path / "out").glob(".*"))
    task = Task(RunFolder(tmp_path / "out").scenario())
    assert task.evaluate(load_file(tmp_path / "out/model.safetensors"))[1] == summary["final_accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [(), ("strategy.name=Krum", "compression.uplink=topk(density=0.1)|qsgd(levels=4)", "train.momentum=0.9")],
)
def test_all_engines_give_the_same_bits(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    engines = {
        "inline": ["engine.name=inline"],
        "ray1": ["engine.name=ray", "engine.max_workers=1"],
        "ray2": ["engine.name=ray", "engine.max_workers=2", f"engine.num_cpus={min(1, (os.cpu_count() or 1) / 2)}"],
    }
    if not overrides:
        engines["flower"] = ["engine.name=flower"]
    for name, engine in engines.items():
        run_scenario(tiny(*overrides, *engine), tmp_path / name)
    models = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in engines}
    assert len(set(models.values())) == 1, {name: hash(model) for name, model in models.items()}

    def facts(name: str) -> list[dict[str, Any]]:
        return [{key: value for key, value in line.items() if key != "wall_s"} for line in lines_of(tmp_path / name)]

    for name in engines:
        assert facts(name) == facts("inline"), name
        assert json.loads((tmp_path / name / "summary.json").read_text())["status"] == "completed"


def test_clients_train_together_and_learn_the_same_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked to train alone; and when everybody is, nothing but the time changes."""
    scenario = tiny("model.name=mlp(hidden=16)")
    with monkeypatch.context() as patched:
        patched.setattr("clients.client_app.train", None)
        run_scenario(scenario, tmp_path / "together")
    monkeypatch.setattr("clients.client_app.LocalTraining.train_ahead", staticmethod(lambda turns: None))
    run_scenario(scenario, tmp_path / "alone")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("together", "alone")]
    assert models[0] == models[1]
    losses = [[line["train_loss"] for line in lines_of(tmp_path / name)] for name in ("together", "alone")]
    assert losses[0] == losses[1]


def own_workers() -> list[int]:
    """Return the Ray workers that descend from this process: other tests may have some too."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if not (entry / "cmdline").read_bytes().startswith(b"ray::Worker"):
                continue
            ancestor = int(entry.name)
            while ancestor > 1 and ancestor != os.getpid():
                ancestor = int((Path("/proc") / str(ancestor) / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):
            continue
        if ancestor == os.getpid():
            found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_killed_workers_change_nothing(tmp_path: Path) -> None:
    """kill -9 of a worker in every other round: retried clients answer with the bytes that they had stored."""
    killed = []

    def kill(event: Started | RoundDone) -> None:
        if isinstance(event, RoundDone) and event.line["round"] % 2:
            deadline = time.monotonic() + 10  # rounds are quick, and a new process has no name at first
            while not (workers := own_workers()) and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(workers[0], signal.SIGKILL)
            killed.append(workers[0])

    spec = "compression.uplink=topk(density=0.05)|qsgd(levels=16)"
    quiet = run_scenario(tiny(spec, "rounds=6", "engine.name=inline"), tmp_path / "quiet")
    hit = run_scenario(
        tiny(spec, "rounds=6", "engine.name=ray", "engine.max_workers=2"), tmp_path / "hit", on_event=kill
    )
    assert len(killed) == 3
    assert hit.status == quiet.status == "completed"
    assert (tmp_path / "hit/model.safetensors").read_bytes() == (tmp_path / "quiet/model.safetensors").read_bytes()
    assert all(not line["failed"] for line in RunFolder(tmp_path / "hit").rounds())


def test_error_memories_that_do_not_fit_are_refused_before_anything_is_trained(tmp_path, monkeypatch, caplog):
    usage = shutil.disk_usage(tmp_path)
    scenario = tiny("compression.uplink=topk(density=0.1)", "data.num_clients=5", "train.clients_per_round=2")
    d = run_scenario(scenario, tmp_path / "fits").num_parameters
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4 * d * 5 - 1))
    with pytest.raises(ConfigError, match="error memories take up to"):
        run_scenario(scenario, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run_scenario(apply_overrides(scenario, ["compression.memory_dtype=float16"]), tmp_path / "half")
    run_scenario(apply_overrides(scenario, ["rounds=1"]), tmp_path / "two-clients")
    run_scenario(apply_overrides(scenario, ["compression.error_memory=false"]), tmp_path / "none")
    monkeypatch.setattr("fedsparse.run.disk.WORTH_A_WORD", 1)
    run_scenario(apply_overrides(scenario, ["rounds=1"]), tmp_path / "said")
    assert "error memories take up to" in caplog.text
