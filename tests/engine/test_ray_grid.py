"""What only the Ray engine has: workers that die or hang, shares of CPUs and GPUs, arrays in shared memory."""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from fedsparse.engine import InlineGrid, RayGrid, ray_grid
from fedsparse.errors import ConfigError

from .conftest import ask

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_instance")]
APP = "engine_apps:app"
SETTINGS: dict[str, Any] = {"num_clients": 12, "run_config": {"lr": 0.5}}


def test_a_dying_worker_takes_nobody_with_it(model: ArrayRecord, tmp_path: Path) -> None:
    for client in (5, 6):
        (tmp_path / "inline").mkdir(exist_ok=True)
        (tmp_path / "inline" / f"{client}-0").touch()
    (tmp_path / "ray").mkdir()
    with InlineGrid(APP, **SETTINGS) as grid:
        survivors = [client for client in range(12) if client != 3]
        replies = grid.send_and_receive(ask("train.die", survivors, model, folder=str(tmp_path / "inline")))
        expected = {
            client: reply.content["arrays"]["0"].numpy() for client, reply in zip(survivors, replies, strict=True)
        }
    with RayGrid(APP, num_workers=2, **SETTINGS) as grid:
        grid.send_and_receive(ask("train.noop", range(12)))
        grid.send_and_receive(ask("train.state", range(12), round=0))
        states = dict(grid.states)
        replies = grid.send_and_receive(ask("train.die", range(12), model, folder=str(tmp_path / "ray")))
        for client, reply in enumerate(replies):
            if client == 3:
                assert reply.error.code == 0
                assert reply.error.reason.startswith("client worker died: ")
            else:
                np.testing.assert_array_equal(reply.content["arrays"]["0"].numpy(), expected[client])
        tries = Counter(int(path.name.split("-")[0]) for path in (tmp_path / "ray").iterdir())
        assert 2 <= tries[3] <= 3
        assert tries[5] == tries[6] == 2
        assert grid.states == states
        assert all(reply.has_content() for reply in grid.send_and_receive(ask("train.noop", range(12))))


def test_clients_that_crowd_the_memory_run_fewer_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RayGrid(APP, num_workers=4, **SETTINGS) as grid:
        grid.wait_ready()
        replies = grid.send_and_receive(ask("train.crowd", range(9), folder=str(tmp_path)))
        assert [reply.content["metrics"]["client"] for reply in replies] == list(range(9))
        assert grid.num_workers == 2
        assert "2 clients at a time from now on, not 4" in caplog.text
        (hopeless,) = grid.send_and_receive(ask("train.crowd", [9], folder=str(tmp_path)))
        assert "CUDA out of memory" in hopeless.error.reason
        left = grid.num_workers
        grid.send_and_receive(ask("train.crowd", [9], folder=str(tmp_path)))
        assert grid.num_workers == left >= 1
        assert all(reply.has_content() for reply in grid.send_and_receive(ask("train.noop", range(12))))


def test_a_client_that_hangs_loses_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_grid, "GRACE_S", 0.3)
    with RayGrid(APP, num_workers=1, **SETTINGS) as grid:
        grid.send_and_receive(ask("train.noop", range(3)))
        first = grid.send_and_receive(ask("train.sleep", range(3), **{"client-1": 1000.0}), timeout=0.5)
        assert [reply.content["metrics"]["client"] for reply in first] == [0]
        start = time.monotonic()
        again = grid.send_and_receive(ask("train.sleep", range(3)), timeout=60)
        assert [reply.content["metrics"]["client"] for reply in again] == [0, 1, 2]
        assert time.monotonic() - start < 30


def test_replies_come_as_they_complete_and_are_returned_in_order() -> None:
    with RayGrid(APP, num_workers=2, **SETTINGS) as grid:
        grid.send_and_receive(ask("train.noop", range(4)))
        messages = ask("train.sleep", range(6), **{"client-0": 1.5})
        ids = grid.push_messages(messages)
        early: list[float] = []
        deadline = time.monotonic() + 1.2
        while len(early) < 5 and time.monotonic() < deadline:
            early += [reply.content["metrics"]["client"] for reply in grid.pull_messages(ids)]
        assert sorted(early) == [1, 2, 3, 4, 5]
        ordered = grid.send_and_receive(ask("train.sleep", range(6), **{"client-0": 0.2}))
        assert [reply.content["metrics"]["client"] for reply in ordered] == [0, 1, 2, 3, 4, 5]


def test_clients_get_their_share_of_gpus_and_no_more(model: ArrayRecord) -> None:
    def gpus(count: int, **options: Any) -> Counter[str]:
        with RayGrid(APP, **SETTINGS, **options) as grid:
            assert grid.num_workers == count
            grid.wait_ready()
            replies = [grid.send_and_receive(ask("query", range(12), model)) for _ in range(3)]
            told = {reply.content["node"]["pid"]: reply.content["node"]["gpus"] for one in replies for reply in one}
            return Counter(str(value) for value in told.values())

    assert set(gpus(4, num_cpus=0.5, num_gpus=0.5)) == {"0", "1"}
    assert set(gpus(2, num_cpus=0.5, num_gpus=0.6)) <= {"0", "1"}
    assert set(gpus(1, num_cpus=1, num_gpus=2)) == {"0,1"}
    assert set(gpus(4, num_cpus=1)) == {""}


@pytest.mark.parametrize(
    ("options", "say"),
    [
        ({"num_gpus": 3}, r"3 GPUs each do not fit: Ray has 4 CPUs and 2 GPUs .* 2 GPUs are free"),
        ({"num_cpus": 5}, "5 CPUs and 0 GPUs"),
        ({"num_workers": 5}, r"5 client\(s\) at a time"),
        ({"num_gpus": 1.5}, "a fraction up to 1 or a whole number"),
        ({"num_cpus": 0}, "num_cpus must be above 0"),
        ({"num_gpus": -1}, "num_gpus must be"),
        ({"num_workers": 0}, "num_workers must be at least 1"),
    ],
)
def test_resources_that_are_not_there_are_named(options: dict[str, Any], say: str) -> None:
    with pytest.raises(ConfigError, match=say):
        RayGrid(APP, **SETTINGS, **options)


def test_workers_are_like_this_process(model: ArrayRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "only_here_app.py"
    module.write_text("import torch\nfrom engine_apps import app\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with RayGrid("only_here_app:app", num_workers=1, **SETTINGS) as grid:
        node = grid.send_and_receive(ask("query", [4], model))[0].content["node"]
        assert node["cwd"] == os.getcwd()
        assert (node["threads"], node["torch-threads"]) == ("1", 1)
        assert node["data-type"] == "bytes"


def test_arrays_are_put_once_for_all_clients_and_rounds(model: ArrayRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    puts: list[Any] = []
    real = ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or real(value))
    with RayGrid(APP, num_workers=2, **SETTINGS) as grid:
        for _ in range(3):
            same = ArrayRecord(dict(model))  # as a strategy that builds its records anew from the same arrays
            replies = grid.send_and_receive(ask("train.echo", range(12), same))
            assert all(reply.content["arrays"] == model for reply in replies)
        assert len(puts) == 1
        for step in range(6):
            other = ArrayRecord([np.full(10_000, step, np.float32)])
            replies = grid.send_and_receive(ask("train.echo", range(12), other))
            assert all(reply.content["arrays"]["0"].numpy()[-1] == step for reply in replies)
        assert len(puts) == 7
    assert replies[0].content["arrays"]["0"].numpy().flags.writeable
