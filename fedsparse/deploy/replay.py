"""Answers that may have been lost on their way to a node: given again, instead of asking the SuperLink twice.

Flower's nodes repeat a request whose answer did not come. The SuperLink takes it for a new one: it refuses an object
that it has got already, whereupon the node gives up its whole reply, and it hands out a message once only.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx

PULL, PUSH_MESSAGES, PUSH_OBJECT = (f"/v1/fleet/{name}" for name in ("pull-messages", "push-messages", "push-object"))
KEPT_S = 600.0

Ask = Callable[[], Awaitable[httpx.Response]]


@dataclass
class Replay:
    """Remembers the answers to pushes, and each node's last message until it does something with it."""

    _pushed: dict[tuple[str, str, bytes], tuple[float, "asyncio.Task[httpx.Response]"]] = field(default_factory=dict)
    _handed: dict[str, httpx.Response] = field(default_factory=dict)

    async def push(self, node: str, path: str, body: bytes, ask: Ask) -> httpx.Response:
        """Ask once, however often the node does; a failure is not remembered."""
        key = (node, path, hashlib.sha256(body).digest())
        self._forget()
        if key not in self._pushed:
            self._pushed[key] = time.monotonic(), asyncio.ensure_future(ask())
        task = self._pushed[key][1]
        try:
            # The node may go away while the SuperLink still works on it.
            answer = await asyncio.shield(task)
        except httpx.HTTPError:
            self._pushed.pop(key, None)
            raise
        if answer.status_code != 200:
            self._pushed.pop(key, None)
        return answer

    def not_taken(self, node: str) -> httpx.Response | None:
        """Return the message that was handed to a node which asks for one again without having touched it."""
        return self._handed.get(node)

    def hand(self, node: str, answer: httpx.Response) -> None:
        """Remember a message that is on its way to a node."""
        self._handed[node] = answer

    def moved_on(self, node: str) -> None:
        """Forget it: the node has it, or was started anew."""
        self._handed.pop(node, None)

    def _forget(self) -> None:
        old = time.monotonic() - KEPT_S
        for key in [key for key, (at, task) in self._pushed.items() if at < old and task.done()]:
            del self._pushed[key]
