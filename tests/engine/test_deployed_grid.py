"""Messages to real devices, where the SuperLink dies in the middle of taking them."""

from collections.abc import Iterable

import pytest
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from fedsparse.engine import FIRST_NODE_ID, InlineGrid
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
