"""What every engine of ours has in common: nodes with stable ids, contexts, and Flower's send-and-receive."""

import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedsparse.errors import ConfigError

from ._flwr import RUN_ID, NodeInfo, Run, empty_run, ensure_identity, stamp

FIRST_NODE_ID = 1000
DEFAULT_CLIENT_APP = "clients.client_app:app"


class BaseGrid(Grid):
    """A Flower `Grid` whose clients are numbered 0 to ``num_clients - 1``.

    Client ``i`` is node ``FIRST_NODE_ID + i``, in every run and every engine; `get_nodes` names it ``str(i)``.

    Parameters
    ----------
    client_app : str or ClientApp or callable
        ``"package.module:attribute"``, a ClientApp, or a callable without arguments that returns one.
    num_clients : int
        Number of simulated clients.
    run_config, node_config : mapping, optional
        The `run_config` of each client's Context; more entries for its `node_config`, beside ``partition-id`` and
        ``num-partitions``.
    timeout : float, optional
        Upper bound in seconds for every `send_and_receive`; the smaller one of it and the caller's counts.
    """

    def __init__(
        self,
        client_app: Any = DEFAULT_CLIENT_APP,
        *,
        num_clients: int,
        run_config: Mapping[str, Any] | None = None,
        node_config: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        if isinstance(num_clients, bool) or not isinstance(num_clients, int) or num_clients < 1:
            raise ConfigError(f"num_clients must be a whole number of at least 1, got {num_clients!r}.")
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"timeout must be a number of seconds above 0, or None, got {timeout!r}.")
        self.client_app = client_app
        self.num_clients = num_clients
        self.run_config = dict(run_config or {})
        self.node_config = dict(node_config or {})
        self.timeout = timeout
        self.states: dict[int, bytes] = {}
        self._run = empty_run(RUN_ID)
        self._node_ids = [FIRST_NODE_ID + client for client in range(num_clients)]
        ensure_identity(RUN_ID)

    # Flower's interface

    def set_run(self, run: Run) -> None:
        """Set the run information."""
        self._run = run

    @property
    def run(self) -> Run:
        """Run information."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Build a message; `Message(...)` does the same."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the node ids, in client order."""
        return list(self._node_ids)

    def get_nodes(self) -> list[NodeInfo]:
        """Return what is known of the nodes: id, and the client's number as its name."""
        return [NodeInfo(node_id=node, name=str(node - FIRST_NODE_ID)) for node in self._node_ids]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Accept messages for the clients; return their ids, in the order of the messages."""
        batch = list(messages)
        for message in batch:
            self._client_of(message)
        ids = [stamp(message, self._run.run_id) for message in batch]
        self._push(list(zip(ids, batch, strict=True)))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are there by now, each once."""
        return self._pull(list(message_ids))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages, wait for the replies, and return them in the order of the messages.

        The order does not depend on which client was faster, so that sums over the replies are reproducible. Clients
        that have not answered after `timeout` seconds are missing; what they answer later is ignored.
        """
        limits = [limit for limit in (timeout, self.timeout) if limit is not None]
        deadline = time.monotonic() + min(limits) if limits else None
        ids = self.push_messages(messages)
        try:
            self._wait(ids, deadline)
            replies = {reply.metadata.reply_to_message_id: reply for reply in self._pull(ids)}
        finally:
            self._forget(ids)
        return [replies[message_id] for message_id in ids if message_id in replies]

    # What an engine adds

    @abstractmethod
    def _push(self, batch: list[tuple[str, Message]]) -> None:
        """Take stamped messages."""

    @abstractmethod
    def _pull(self, ids: list[str]) -> list[Message]:
        """Return and forget the replies to some messages, without waiting for any."""

    @abstractmethod
    def _wait(self, ids: list[str], deadline: float | None) -> None:
        """Work until all replies are there, or until the deadline (monotonic clock)."""

    @abstractmethod
    def _forget(self, ids: list[str]) -> None:
        """Drop messages that nobody waits for any more."""

    def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Helpers for engines

    def _client_of(self, message: Message) -> int:
        client = message.metadata.dst_node_id - FIRST_NODE_ID
        if not 0 <= client < self.num_clients:
            raise ValueError(
                f"no node {message.metadata.dst_node_id}: the nodes of this engine are {FIRST_NODE_ID} to "
                f"{FIRST_NODE_ID + self.num_clients - 1}."
            )
        return client

    def _keep_state(self, client: int, state: bytes | None) -> None:
        if state is None:
            self.states.pop(client, None)
        else:
            self.states[client] = state


def expired(message: Message) -> bool:
    """Say whether a message's time to live is over."""
    return time.time() > expiry(message)


def expiry(message: Message) -> float:
    """Return the Unix time until which a message may be answered."""
    return message.metadata.created_at + message.metadata.ttl
