"""Comparisons: paired runs, honest numbers, and a report that needs nothing else."""

import csv
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from fedsparse.compare import Comparison, RunBegins, RunEnds, compare_scenario, read
from fedsparse.compare.results import Run, Variant
from fedsparse.compare.statistics import interval
from fedsparse.compare.table import digits, header, rows
from fedsparse.console import Watch
from fedsparse.data import load_dataset
from fedsparse.errors import ConfigError
from fedsparse.report import build, findings
from fedsparse.report.page import render
from fedsparse.run import run_scenario
from fedsparse.run.summary import summarise
from fedsparse.scenario import Scenario, apply_overrides, expand, from_toml

TINY = """
name = "tiny"
description = "Is <b>1 < 2</b> & so on?"
rounds = 3
seeds = [0, 5]
[data]
dataset = "digits"
num_clients = 6
partition = "dirichlet(alpha=0.3)"
[model]
name = "mlp(hidden=16)"
[train]
lr = 0.2
local_steps = 10
clients_per_round = 4
[engine]
name = "inline"
[[variant]]
name = "dense"
[[variant]]
name = "sparse"
"compression.uplink" = "topk(density=0.1)"
"""


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison, list[Any]]:
    out = tmp_path_factory.mktemp("compare") / "out"
    events: list[Any] = []
    comparison = compare_scenario(from_toml(TINY), out, on_event=events.append, command="fedsparse compare tiny")
    return out, comparison, events


def test_variants_are_paired_by_seed(finished: tuple[Path, Comparison, list[Any]]) -> None:
    out, _, events = finished
    begins = [event for event in events if isinstance(event, RunBegins)]
    assert [(event.seed, event.variant) for event in begins] == [
        (0, "dense"), (0, "sparse"), (5, "dense"), (5, "sparse"),
    ]  # fmt: skip
    for seed in (0, 5):
        dense, sparse = out / f"dense/seed-{seed}", out / f"sparse/seed-{seed}"
        assert (dense / "partition.json").read_bytes() == (sparse / "partition.json").read_bytes()
        assert [line["cohort"] for line in lines_of(dense)] == [line["cohort"] for line in lines_of(sparse)]
        first = [json.loads((folder / "summary.json").read_text())["initial_accuracy"] for folder in (dense, sparse)]
        assert first[0] == first[1]
    assert (out / "dense/seed-0/partition.json").read_bytes() != (out / "dense/seed-5/partition.json").read_bytes()


def test_a_run_of_a_comparison_is_the_run_alone(finished: tuple[Path, Comparison, list[Any]], tmp_path: Path) -> None:
    out, comparison, _ = finished
    alone = expand(comparison.scenario)["sparse"].model_copy(update={"seed": 5})
    run_scenario(alone, tmp_path / "alone")
    for name in ("model.safetensors",):
        assert (tmp_path / "alone" / name).read_bytes() == (out / "sparse/seed-5" / name).read_bytes()
    memories = sorted(path.name for path in (out / "sparse/seed-5/memory").rglob("*.memory"))
    assert memories == sorted(path.name for path in (tmp_path / "alone/memory").rglob("*.memory")) != []
    assert not (out / ".memory").exists()


def test_the_summary_follows_from_the_rounds(finished: tuple[Path, Comparison, list[Any]]) -> None:
    out, comparison, _ = finished
    summary = json.loads((out / "summary.json").read_text())
    final = {
        name: [lines_of(out / name / f"seed-{seed}")[-1]["eval_accuracy"] for seed in (0, 5)]
        for name in ("dense", "sparse")
    }
    t = 12.7062047362  # of one degree of freedom, 97.5 %
    for entry in summary["variants"]:
        values = final[entry["name"]]
        assert entry["final_accuracy"]["mean"] == pytest.approx(mean(values))
        assert entry["final_accuracy"]["half"] == pytest.approx(t * stdev(values) / 2**0.5)
        total = [sum(line["uplink_bytes"] for line in lines_of(out / entry["name"] / f"seed-{s}")) for s in (0, 5)]
        assert entry["uplink_bytes"] == mean(total)
    differences = [b - a for a, b in zip(final["dense"], final["sparse"], strict=True)]
    assert summary["variants"][0]["difference_to_first"] is None
    assert summary["variants"][1]["difference_to_first"]["mean"] == pytest.approx(mean(differences))
    assert summary["variants"][1]["difference_to_first"]["half"] == pytest.approx(t * stdev(differences) / 2**0.5)
    assert summary["target_accuracy"] == pytest.approx(mean(final["dense"]) - 0.01)
    assert (summary["status"], summary["command"]) == ("completed", "fedsparse compare tiny")
    dense, sparse = (entry["compression_ratio"] for entry in summary["variants"])
    assert 0.98 < dense < 1
    assert 8 < sparse < 20

    with open(out / "summary.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(line["final_accuracy_mean"]) for line in table] == [mean(final["dense"]), mean(final["sparse"])]
    with open(out / "runs.csv", newline="") as file:
        runs = list(csv.DictReader(file))
    assert [(line["variant"], line["seed"]) for line in runs] == [
        ("dense", "0"), ("dense", "5"), ("sparse", "0"), ("sparse", "5"),
    ]  # fmt: skip
    assert read(out).to_json() == comparison.to_json()


def test_a_comparison_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "out"
    scenario = apply_overrides(from_toml(TINY), ["rounds=1"])
    seen = {"runs": 0}

    def stop(event: Any) -> None:
        seen["runs"] += isinstance(event, RunEnds)
        if seen["runs"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare_scenario(scenario, out, on_event=stop)
    assert json.loads((out / "summary.json").read_text())["status"] == "interrupted"
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/seed-*/model.safetensors")}
    assert len(kept) == 3
    events: list[Any] = []
    result = compare_scenario(scenario, out, on_event=events.append)
    assert [event.done_before for event in events if isinstance(event, RunBegins)] == [True, True, True, False]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert result.facts["status"] == "completed"

    more = compare_scenario(scenario, out, seeds=[0, 5, 6])
    assert [len(variant.done) for variant in more.variants] == [3, 3]
    with pytest.raises(ConfigError, match=r"already holds a run\. Say --overwrite"):
        compare_scenario(apply_overrides(scenario, ["train.lr=0.1"]), out)
    (out / "notes.txt").write_text("mine")
    compare_scenario(apply_overrides(scenario, ["train.lr=0.1"]), out, seeds=[7], overwrite=True)
    assert sorted(path.name for path in out.glob("*/seed-*")) == ["seed-7", "seed-7"]
    assert (out / "notes.txt").exists()


def test_a_long_run_that_is_complete_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long runs only evaluated rounds are kept in memory: that is no sign of an unfinished one."""
    scenario = apply_overrides(from_toml(TINY), ["rounds=3", "evaluation.every=3"])
    compare_scenario(scenario, tmp_path, seeds=[0])
    monkeypatch.setattr("fedsparse.compare.results.LONG", 2)
    events: list[Any] = []
    for path in tmp_path.glob("*/seed-0/rounds.jsonl"):
        path.touch()  # another time: not the lines that were read before
    compare_scenario(scenario, tmp_path, seeds=[0], on_event=events.append)
    assert all(event.done_before for event in events if isinstance(event, RunBegins))


@pytest.mark.slow
def test_runs_that_share_ray_workers_are_as_if_alone(
    finished: tuple[Path, Comparison, list[Any]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed = out / "sparse/seed-0"
    compare_scenario(from_toml(TINY), out, seeds=[0], engine="ray")
    for name in ("dense/seed-0", "sparse/seed-0"):
        for file in ("model.safetensors", "partition.json"):
            assert (out / name / file).read_bytes() == (finished[0] / name / file).read_bytes()
    memory = {path.name: path.read_bytes() for path in killed.rglob("*.memory")}
    assert memory == {path.name: path.read_bytes() for path in (finished[0] / "sparse/seed-0").rglob("*.memory")} != {}

    # As after kill -9 in the middle of a run: no summary, half a file, links to memories.
    (killed / "summary.json").unlink()
    (killed / ".model.safetensors.1.partial").write_bytes(b"half")
    (out / ".memory").mkdir()
    (out / ".memory/sparse-seed-0-0").symlink_to(tmp_path / "nowhere")
    again = compare_scenario(from_toml(TINY), out, seeds=[0], engine="ray")
    assert again.facts["status"] == "completed"
    assert memory == {path.name: path.read_bytes() for path in killed.rglob("*.memory")}
    assert not (killed / ".model.safetensors.1.partial").exists()
    assert not (out / ".memory").exists()


@pytest.mark.slow
def test_runs_side_by_side_give_the_same_files(finished: tuple[Path, Comparison, list[Any]], tmp_path: Path) -> None:
    text, events = TINY + '[[variant]]\nname = "explosive"\n"train.lr" = 1e30\n', list[Any]()
    result = compare_scenario(from_toml(text), tmp_path / "out", jobs=2, on_event=events.append)
    assert [len(variant.done) for variant in result.variants] == [2, 2, 0]
    assert "diverged" in " ".join(findings(result))
    assert sorted(event.number for event in events if isinstance(event, RunBegins)) == [1, 2, 3, 4, 5, 6]
    for run in ("dense/seed-0", "dense/seed-5", "sparse/seed-0", "sparse/seed-5"):
        for file in ("model.safetensors", "partition.json"):
            assert (tmp_path / "out" / run / file).read_bytes() == (finished[0] / run / file).read_bytes()
    with pytest.raises(ConfigError, match=r"jobs = 2 needs engine\.name = 'inline'"):
        compare_scenario(from_toml(text), tmp_path / "other", jobs=2, engine="ray")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_killed_process_is_one_failed_run(tmp_path: Path) -> None:
    (tmp_path / "bomb.py").write_text(
        "import os, signal, numpy as np\n"
        "def data():\n"
        "    if os.getpid() != int(os.environ['PARENT']): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return np.zeros((8, 64)), np.arange(8) % 2, np.zeros((4, 64)), np.arange(4) % 2\n"
    )
    text = TINY + '[[variant]]\nname = "killed"\n"data.dataset" = "bomb:data"\n'
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setenv("PARENT", str(os.getpid()))
        patch.setenv("PYTHONPATH", str(tmp_path))
        ends: list[Any] = []
        result = compare_scenario(from_toml(text), tmp_path / "out", seeds=[0], jobs=2, on_event=ends.append)
    watch = Watch(9, jobs=2)
    for event in ends:
        watch(event)  # also where a run that came to nothing is the first to end
    watch(RunEnds("killed", 0, "its process ended"))
    errors = {event.variant: event.error for event in ends if isinstance(event, RunEnds)}
    assert errors == {"dense": None, "sparse": None, "killed": "its process ended with exit code -9"}
    assert result.facts["status"] == "failed"


def test_a_variant_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    text = TINY + '[[variant]]\nname = "explosive"\n"train.lr" = 1e30\n'
    result = compare_scenario(from_toml(text), tmp_path / "out", seeds=[0])
    assert result.facts["status"] == "failed"
    assert [len(variant.done) for variant in result.variants] == [1, 1, 0]
    said = " ".join(findings(result))
    assert "explosive, seed 0 failed: AllClientsFailed: round 1: all 4 clients failed" in said
    assert "diverged" in said
    assert "1 of 1 runs missing or failed" in rows(result)[2][0]
    assert "One seed only" in said
    render(result)


class Page(HTMLParser):
    """Collects what a browser would fetch, the ids, and the texts of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [f"{tag} {key}" for key in values if key in ("src", "href", "data", "action", "poster", "srcset")]
        self.ids += [value for key, value in attrs if key == "id" and value]
        self.inside = tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.inside, []).append(data)


def test_the_report_stands_alone_and_shows_what_was_found(finished: tuple[Path, Comparison, list[Any]]) -> None:
    out, comparison, _ = finished
    path = build(out)
    text = path.read_text()
    page = Page()
    page.feed(text)
    assert page.links == []
    own = [part for part in page.texts["script"] if len(part) < 1_000_000]
    assert len(page.texts["script"]) - len(own) == 1, "plotly.js must be inlined once"
    for part in [*own, *page.texts["style"]]:
        assert not re.search(r"https?://|//cdn|@import|url\(", part)
    figures = json.loads(own[0])
    inside = {"density", "residual", "total-error"}  # no variant has a threshold or a budget
    assert set(figures) == {"accuracy-bytes", "accuracy-rounds", "labels"} | inside <= set(page.ids)
    means = [trace for trace in figures["accuracy-bytes"]["data"] if "name" in trace]
    assert [trace["name"] for trace in means] == ["dense", "sparse"]
    for trace, variant in zip(means, comparison.variants, strict=True):
        spent = [sum(run.summary.uplink_bytes for run in variant.done) / 2e6]
        assert trace["x"][-1] == pytest.approx(spent[0])
        assert trace["y"][-1] == pytest.approx(100 * mean(variant.each("final_accuracy")))
    assert [trace["name"] for trace in figures["residual"]["data"] if "name" in trace] == ["sparse"]
    assert sum(map(sum, figures["labels"]["data"][0]["z"])) == load_dataset("digits").y_train.size
    assert "Is &lt;b&gt;1 &lt; 2&lt;/b&gt; &amp; so on?" in text
    assert "fedsparse compare tiny" in text
    for sentence in findings(comparison):
        assert sentence in text
    assert build(out).read_text() == text
    run_page = build(out / "sparse/seed-0").read_text()
    assert "the model classified" in run_page


def variant_of(scenario: Scenario, name: str, curves: list[list[float]], bytes_each: int) -> Variant:
    runs = []
    for seed, curve in enumerate(curves):
        zeros = dict.fromkeys(["downlink_bytes", "uplink_frame_bits_formula", "nnz"], 0)
        lines = [
            {"round": i, "uplink_bytes": bytes_each, "dense_bytes": 100, "eval_accuracy": value, "eval_loss": 1.0}
            | {
                "train_loss": 1.0,
                "failed": {},
                "cohort": ["0"],
                "accepted": ["0"],
                "density": 1.0,
                "residual_norm": 0.0,
                **zeros,
            }
            for i, value in enumerate(curve, 1)
        ]
        runs.append(Run(seed, Path(), summarise(scenario, lines, "completed"), lines))
    return Variant(name, scenario, tuple(runs))


def test_what_did_not_reach_the_target_is_not_dressed_up() -> None:
    scenario = apply_overrides(from_toml(TINY), ["target_accuracy=0.8"])
    first = variant_of(scenario, "dense", [[0.5, 0.81, 0.9], [0.5, 0.7, 0.9]], 1_000_000)
    half = variant_of(scenario, "half", [[0.85, 0.6, 0.6], [0.5, 0.6, 0.7]], 1000)
    never = variant_of(scenario, "never", [[0.1, 0.1, 0.1]] * 2, 10)
    good = variant_of(scenario, "good", [[0.9, 0.9, 0.9], [0.9, 0.9, 0.9]], 50_000)
    both = Comparison(scenario, (0, 1), (first, half, never, good), {})
    table = rows(both)
    assert header(both)[-2:] == ["uplink MB to 80.0 %", "rounds to it"]
    assert [row[-2:] for row in table] == [
        ["2.50", "2"],
        ["reached by 1 of 2"] * 2,
        ["not reached", "not in 3"],
        ["0.0500 (49x less)", "1"],
    ]
    assert both.savings(good) == pytest.approx((40 * 60) ** 0.5)
    assert both.savings(half) is None
    said = findings(both)
    assert said[0].startswith("To reach 80.0 % test accuracy, good needed 49 times fewer uplink bytes than dense")
    assert "never 80.0 (95% interval 80.0 to 80.0) points below dense" in said[1]
    none = Comparison(scenario, (0, 1), (never, half), {})
    assert findings(none)[0] == "No variant reached 80.0 % test accuracy with every seed."


def test_intervals_are_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.half) == (2.0, pytest.approx(4.302652729911 / 3**0.5))
    assert found.excludes_zero is False
    single = interval([0.5])
    assert single is not None
    assert single.half is None
    assert interval([]) is None


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (23.0819, "23.1"), (0.10123, "0.101"), (1234.5, "1234"), (0.000999, "0.000999")]
)
def test_numbers_keep_their_digits(value: float, text: str) -> None:
    assert digits(value) == text
