"""The engine for tests and debugging: clients run one after the other, in this process."""

import time
from collections import deque
from typing import Any

from flwr.app import Message

from ._flwr import EXPIRED, error_reply, message_fields, reply
from .apps import load_client_app
from .base import BaseGrid, expired
from .runner import Job, Runner, Turn
from .transport import lease_arrays, pack, unpack

BATCH = 16  # messages that the app may see together


class InlineGrid(BaseGrid):
    """A `Grid` that runs each client when its reply is asked for, in the order of the messages.

    Messages and states go through the same packing as in `RayGrid`, so that a client sees, may change and leaves behind
    exactly the same. See `BaseGrid` for the parameters.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        app = load_client_app(self.client_app)
        self._runner = Runner(app, self.num_clients, self.run_config, self.node_config)
        self._waiting: dict[str, tuple[Message, list[tuple[str, str, Any]]]] = {}
        self._replies: dict[str, Message] = {}

    def _push(self, batch: list[tuple[str, Message]]) -> None:
        for message_id, message in batch:
            packed = [
                (name, kind, lease_arrays(value) if kind == "array" else value)
                for name, kind, value in pack(message.content)
            ]
            self._waiting[message_id] = message, packed

    def _pull(self, ids: list[str]) -> list[Message]:
        self._wait(ids, None)
        return [self._replies.pop(message_id) for message_id in ids if message_id in self._replies]

    def _wait(self, ids: list[str], deadline: float | None) -> None:
        waiting = deque(message_id for message_id in ids if message_id in self._waiting)
        while waiting:
            batch = self._take(waiting)
            turns = self._runner.open([job for _, _, job in batch])
            for (message_id, message, _), turn in zip(batch, turns, strict=True):
                if deadline is not None and time.monotonic() >= deadline:
                    self._forget(ids)
                    return
                answer = self._answer(message, turn)
                if deadline is None or time.monotonic() < deadline:
                    self._replies[message_id] = answer

    def _take(self, waiting: deque[str]) -> list[tuple[str, Message, Job]]:
        """Take the next messages, never two of one client: the second one needs the state that the first one leaves."""
        batch: list[tuple[str, Message, Job]] = []
        clients = set[int]()
        while waiting and len(batch) < BATCH:
            message, packed = self._waiting[waiting[0]]
            client = self._client_of(message)
            if client in clients:
                break
            clients.add(client)
            message_id = waiting.popleft()
            del self._waiting[message_id]
            batch.append((message_id, message, Job(client, message_fields(message), packed, self.states.get(client))))
        return batch

    def _forget(self, ids: list[str]) -> None:
        for message_id in ids:
            self._waiting.pop(message_id, None)

    def _answer(self, message: Message, turn: Turn) -> Message:
        if expired(message):
            return error_reply(message, EXPIRED, "the message's time to live was over before the client could answer")
        outcome = self._runner.answer(turn)
        self._keep_state(turn.job.client, outcome.state)
        if expired(message):
            return error_reply(message, EXPIRED, "the client answered after the message's time to live")
        if outcome.content is None:
            return error_reply(message, outcome.code, outcome.reason)
        return reply(message, unpack(outcome.content), outcome.created_at, outcome.ttl)
