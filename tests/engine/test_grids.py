"""Both engines behave alike: the same app gives the same replies, states and errors."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp

from fedsparse.engine import FIRST_NODE_ID, BaseGrid, InlineGrid, RayGrid, make_grid
from fedsparse.errors import ConfigError

from .conftest import ask

APP = "engine_apps:app"
SETTINGS: dict[str, Any] = {"num_clients": 8, "run_config": {"lr": 0.5}, "node_config": {"site": "here"}}


def digest(reply: Message) -> Any:
    """Everything in a reply that must not depend on the engine."""
    meta = reply.metadata
    head = meta.src_node_id, meta.dst_node_id, meta.message_type, meta.group_id
    if reply.has_error():
        return head, reply.error.code, reply.error.reason
    body: dict[str, Any] = {}
    for name, record in reply.content.items():
        if isinstance(record, ArrayRecord):
            body[name] = {key: (a.dtype, a.shape, a.stype, a.data) for key, a in record.items()}
        else:
            body[name] = {key: value for key, value in record.items() if key != "pid"}
    return head, body


@pytest.fixture(params=["inline", pytest.param("ray", marks=pytest.mark.slow)])
def build(request: pytest.FixtureRequest) -> Callable[..., BaseGrid]:
    """A function that builds the engine of this parameter."""
    if request.param == "ray":
        request.getfixturevalue("ray_instance")
    return lambda app=APP, **options: make_grid(request.param, app, **{"num_workers": 2} | SETTINGS | options)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_instance")
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("app", [APP, "engine_apps:make_app", "object"])
def test_the_engine_does_not_show_in_replies(workers: int, app: Any, model: ArrayRecord) -> None:
    if app == "object":
        import engine_apps

        app = engine_apps.app
    digests = []
    for grid in (InlineGrid(app, **SETTINGS), RayGrid(app, num_workers=workers, **SETTINGS)):
        with grid:
            seen = []
            for kind in ("train", "train.echo", "train.unruly", "train.nowhere", "train.noop"):
                messages = ask(kind, [5, 0, 1, 2, 3, 4], model)
                before = dict(messages[0].content["config"])
                replies = grid.send_and_receive(messages)
                assert [r.metadata.reply_to_message_id for r in replies] == [m.metadata.message_id for m in messages]
                assert dict(messages[0].content["config"]) == before
                assert list(model) == ["w", "v"]
                seen.append([digest(reply) for reply in replies])
            digests.append(seen)
    assert digests[0] == digests[1]
    train, echo, unruly, nowhere, _ = digests[1]
    np.testing.assert_array_equal(np.frombuffer(train[0][1]["arrays"]["w"][3][-8:], np.float32), [50003.0, 50004.0])
    assert echo[0][1]["arrays"]["v"][3] == model["v"].data
    assert [reply[1] for reply in unruly[1:5]] == [2, 2, 2, 2]
    assert unruly[1][2] == "KeyError: 'lost'"
    assert "nowhere" in nowhere[0][2]


def test_state_lives_from_round_to_round_and_is_rolled_back(build: Callable[..., BaseGrid]) -> None:
    with build() as grid:
        counts = []
        for number in range(4):
            replies = grid.send_and_receive(ask("train.state", range(4), round=number))
            counts.append([r.error.code if r.has_error() else r.content["metrics"]["n"] for r in replies])
        assert counts == [[0, 0, 0, 0], [1, 2, 0, 1], [2, 1, 0, 2], [3, 2, 0, 3]]
        assert sorted(grid.states) == [0, 1, 3]


def test_two_messages_to_one_client_run_one_after_the_other(build: Callable[..., BaseGrid]) -> None:
    with build() as grid:
        replies = grid.send_and_receive(ask("train.state", [3, 3, 0, 3, 0, 3], round=0))
        assert [reply.content["metrics"]["n"] for reply in replies] == [0, 1, 0, 2, 1, 3]


def test_nodes_have_stable_ids_and_their_clients_name(build: Callable[..., BaseGrid], model: ArrayRecord) -> None:
    with build() as grid:
        nodes = list(grid.get_nodes())
        assert [(node.node_id, node.name) for node in nodes] == [(FIRST_NODE_ID + i, str(i)) for i in range(8)]
        assert list(grid.get_node_ids()) == [node.node_id for node in nodes]
        replies = grid.send_and_receive(ask("query", range(8), model))
        told = [reply.content["node"] for reply in replies]
        assert [(node["partition-id"], node["num-partitions"]) for node in told] == [(i, 8) for i in range(8)]
        with pytest.raises(ValueError, match="no node 7"):
            grid.push_messages(ask("query", [7 - FIRST_NODE_ID]))


def test_pull_gives_each_reply_once(build: Callable[..., BaseGrid]) -> None:
    with build() as grid:
        ids = grid.push_messages(ask("train.noop", range(8)))
        got: list[str] = []
        deadline = time.monotonic() + 30
        while len(got) < 8 and time.monotonic() < deadline:
            got += [reply.metadata.reply_to_message_id for reply in grid.pull_messages(ids)]
        assert sorted(got) == sorted(ids)
        assert grid.pull_messages(ids) == []


def test_what_is_late_is_missing_and_never_comes_back(build: Callable[..., BaseGrid]) -> None:
    with build() as grid:
        for reply in grid.send_and_receive(ask("train.noop", [0, 1])):  # workers are up
            assert reply.has_content()
        messages = ask("train.sleep", [0, 1, 2], **{"client-2": 1.2})
        replies = grid.send_and_receive(messages, timeout=0.6)
        assert [reply.content["metrics"]["client"] for reply in replies] == [0, 1]
        replies = grid.send_and_receive(ask("train.sleep", [0, 1, 2]), timeout=30)
        assert [reply.content["metrics"]["client"] for reply in replies] == [0, 1, 2]
        assert grid.pull_messages([message.metadata.message_id for message in messages]) == []


def test_a_message_is_not_answered_after_its_time_to_live(build: Callable[..., BaseGrid]) -> None:
    with build() as grid:
        grid.send_and_receive(ask("train.noop", [0, 1]))
        quick, slow = ask("train.sleep", [0, 1], **{"client-1": 0.7})
        slow.metadata.ttl = 0.3
        replies = grid.send_and_receive([quick, slow])
        assert replies[0].has_content()
        assert replies[1].error.code == 3


@pytest.mark.parametrize(
    ("app", "hint"),
    [
        ("engine_apps:ap", "Did you mean 'app'"),
        ("engine_apps", "package.module:attribute"),
        ("no_such_module_at_all:app", "no module 'no_such_module_at_all'"),
        ("engine_apps_broken:app", "does not import: ZeroDivisionError"),
        ("engine_apps:not_an_app", "gives a ndarray"),
        ("engine_apps:broken", "no data today"),
        (17, "no ClientApp"),
        (ClientApp, None),
    ],
)
def test_what_the_user_got_wrong_is_said(build: Callable[..., BaseGrid], app: Any, hint: str | None) -> None:
    if hint is None:
        with build(app) as grid:
            assert "No train function" in grid.send_and_receive(ask("train", [0]))[0].error.reason
        return
    with pytest.raises(ConfigError, match=hint):
        build(app).send_and_receive(ask("train", [0]))


@pytest.mark.parametrize("options", [{"num_clients": 0}, {"num_clients": 2.5}, {"timeout": 0}, {"timeout": -1.0}])
def test_impossible_numbers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_grid("inline", APP, **SETTINGS | options)


def test_engines_are_known_by_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'inline'"):
        make_grid("inlin", APP, num_clients=1)


def test_the_inline_engine_runs_here(model: ArrayRecord) -> None:
    with InlineGrid(APP, **SETTINGS) as grid:
        assert grid.send_and_receive(ask("query", [0], model))[0].content["node"]["pid"] == os.getpid()
