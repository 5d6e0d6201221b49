"""Flower's own engine, started and stopped for one run."""

import json
from pathlib import Path

import pytest

from fedsparse.engine import run_with_flower
from fedsparse.errors import ConfigError, RunError
from fedsparse.processes import marked

COMPONENTS = {"server_app": "flower_test_app:server_app", "client_app": "engine_apps:app"}


def leftovers(base: Path) -> list[object]:
    return [*marked(str(base)), *base.iterdir()]


@pytest.mark.slow
def test_a_run_through_flower_leaves_its_result_and_nothing_else(tmp_path: Path, base: Path) -> None:
    lines: list[str] = []
    scenario = json.dumps({"clients": 3, "text": 'with "quotes"\nand lines'})
    code = run_with_flower(scenario, out=tmp_path, num_clients=3, num_cpus=2, on_line=lines.append, **COMPONENTS)
    said = json.loads((tmp_path / "said.json").read_text())
    assert code == 0
    assert said["scenario"] == json.loads(scenario)
    assert sorted(node["partition-id"] for node in said["clients"]) == [0, 1, 2]
    assert "all clients have answered" in lines
    assert leftovers(base) == []


@pytest.mark.slow
def test_a_run_that_fails_says_why(tmp_path: Path, base: Path) -> None:
    with pytest.raises(RunError, match="no more lemons") as caught:
        run_with_flower(json.dumps({"fail": "no more lemons"}), out=tmp_path, num_clients=2, **COMPONENTS)
    assert "flower_test_app.py" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert leftovers(base) == []


def test_fractions_of_cpus_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="whole CPUs"):
        run_with_flower("{}", out=tmp_path, num_clients=2, client_cpus=0.5)
