"""Messages to real devices, where the SuperLink dies in the middle of taking them, and nodes go away."""

import time
from collections.abc import Iterable

import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from google.protobuf.message import DecodeError

from fedsparse.engine import FIRST_NODE_ID, InlineGrid, deployed_grid
from fedsparse.engine.deployed_grid import MOST_TRIES, DeployedGrid

from .conftest import ask


class Dying(InlineGrid):
    """Takes the messages and hands them out, but says the first times that it did not."""

    failures = 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = super().push_messages(messages)
        if self.failures:
            self.failures -= 1
            raise ObjectPushError("an object", 1, "a session")
        return ids


@pytest.mark.parametrize("failures", [0, 1, MOST_TRIES - 1])
def test_messages_that_were_taken_and_denied_are_sent_anew(failures: int) -> None:
    with Dying("engine_apps:app", num_clients=3) as grid:
        grid.failures = failures
        replies = list(DeployedGrid(grid).send_and_receive(ask("train.noop", range(3)), timeout=60))
    assert sorted(reply.metadata.src_node_id for reply in replies) == [FIRST_NODE_ID + n for n in range(3)]
    assert not any(reply.has_error() for reply in replies)


def test_a_superlink_that_never_takes_them_is_an_error() -> None:
    with Dying("engine_apps:app", num_clients=1) as grid:
        grid.failures = MOST_TRIES
        with pytest.raises(ObjectPushError):
            DeployedGrid(grid).send_and_receive(ask("train.noop", range(1)), timeout=60)


class Garbled(InlineGrid):
    """One client's reply is no message, and what is pulled with it is gone: the SuperLink hands out replies once."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        if any(reply.metadata.src_node_id == FIRST_NODE_ID + 1 for reply in replies):
            raise DecodeError("Error parsing message")
        return replies


def test_a_reply_that_cannot_be_read_concerns_its_node_alone() -> None:
    with Garbled("engine_apps:app", num_clients=3) as grid:
        replies = list(DeployedGrid(grid).send_and_receive(ask("train.noop", range(3)), timeout=60))
    failed = {reply.metadata.src_node_id: reply.error.reason for reply in replies if reply.has_error()}
    assert list(failed) == [FIRST_NODE_ID + 1]
    assert "cannot be read (DecodeError: Error parsing message)" in failed[FIRST_NODE_ID + 1]
    assert sorted(reply.metadata.src_node_id for reply in replies) == [FIRST_NODE_ID + n for n in range(3)]


class Away(InlineGrid):
    """The nodes `gone` go away as they are asked, and are back after `absence` seconds, or never."""

    gone: tuple[int, ...] = ()
    absence = 1.0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        ids = super().push_messages(messages)
        if not hasattr(self, "began"):
            self.began, self.lost = time.monotonic(), dict(zip(ids, messages, strict=True))
        return ids

    def _is_away(self, node: int) -> bool:
        return node - FIRST_NODE_ID in self.gone and time.monotonic() - self.began < self.absence

    def get_nodes(self) -> list[NodeInfo]:
        return [node for node in super().get_nodes() if not self._is_away(node.node_id)]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        lost = [m for m in message_ids if m in self.lost and self._is_away(self.lost[m].metadata.dst_node_id)]
        error = Error(ErrorCode.NODE_UNAVAILABLE, "away")
        replies = super().pull_messages([name for name in message_ids if name not in lost])
        return [*replies, *(Message(error, reply_to=self.lost.pop(name)) for name in lost)]


@pytest.mark.parametrize(
    ("gone", "absence", "failed"),
    [((0, 1, 2), 1.5, []), ((0, 1), 100.0, [0, 1]), ((0, 1), 0.3, [])],
    ids=["all, for long", "two, for ever", "two, for a moment"],
)
def test_nodes_that_went_away_are_given_up_only_while_others_are_there(monkeypatch, gone, absence, failed) -> None:
    """Where nobody is there the network or the power is gone, and a run of days must not end by that."""
    monkeypatch.setattr(deployed_grid, "PATIENCE_S", 0.7)
    monkeypatch.setattr(deployed_grid, "NODES_EVERY_S", 0.05)
    with Away("engine_apps:app", num_clients=3) as grid:
        grid.gone, grid.absence = gone, absence
        replies = list(DeployedGrid(grid).send_and_receive(ask("train.noop", range(3)), timeout=60))
    assert sorted(reply.metadata.src_node_id - FIRST_NODE_ID for reply in replies) == [0, 1, 2]
    assert sorted(r.metadata.src_node_id - FIRST_NODE_ID for r in replies if r.has_error()) == failed
