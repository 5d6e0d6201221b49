"""Who takes part in a round: seeded, by stable client id, whatever ids Flower gives to its nodes."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsparse.errors import RunError
from fedsparse.seeding import generator
from fedsparse.wrapped_grid import WrappedGrid

log = logging.getLogger(__name__)


def client_order(client: str) -> tuple[int, int, str]:
    """Sort key: numbers by value, then names."""
    return (0, int(client), client) if client.isdecimal() else (1, 0, client)


class Clients:
    """Maps stable client ids to Flower's node ids.

    A node's name is its client id where every node has one (fedsparse's engines; SuperNodes registered with a name).
    Otherwise each new node is asked for its partition-id by a QUERY message, and one that cannot answer goes by its
    node id, which Flower draws anew for every run.
    """

    def __init__(self) -> None:
        self._asked: dict[int, str] = {}

    def online(self, grid: Grid) -> dict[str, int]:
        """Return client id -> node id of all nodes that are there now, in client order."""
        nodes = list(grid.get_nodes())
        names = {node.name: node.node_id for node in nodes}
        if len(names) < len(nodes) or "" in names:
            self._ask(grid, [node.node_id for node in nodes if node.node_id not in self._asked])
            names = {self._asked[node.node_id]: node.node_id for node in nodes}
            if len(names) < len(nodes):
                raise RunError("two nodes report the same partition-id; give each node its own in its node config.")
        return {client: names[client] for client in sorted(names, key=client_order)}

    def _ask(self, grid: Grid, nodes: list[int]) -> None:
        if not nodes:
            return
        questions = [Message(RecordDict({"node": ConfigRecord()}), node, MessageType.QUERY) for node in nodes]
        for reply in grid.send_and_receive(questions, timeout=120):
            record = reply.content.config_records.get("node") if reply.has_content() else None
            if record is not None and "partition-id" in record:
                self._asked[reply.metadata.src_node_id] = str(record["partition-id"])
        for node in nodes:
            if node not in self._asked:
                log.warning("node %d does not tell its partition-id: cohorts will differ from run to run", node)
                self._asked[node] = str(node)

    def wait_for(self, grid: Grid, count: int, timeout: float) -> dict[str, int]:
        """Return `online` as soon as it has `count` clients."""
        deadline, told = time.monotonic() + timeout, False
        while len(list(grid.get_node_ids())) < count:
            if time.monotonic() > deadline:
                there = len(list(grid.get_node_ids()))
                raise RunError(f"waited {timeout:.0f} s for {count} clients, {there} are connected.")
            if not told:
                log.info("waiting for %d clients to connect", count)
                told = True
            time.sleep(0.5)
        return self.online(grid)


def choose(clients: Iterable[str], size: int, seed: int, purpose: str, server_round: int) -> list[str]:
    """Return `size` of the clients, uniformly without replacement, in client order."""
    pool = sorted(clients, key=client_order)
    picked = generator(seed, purpose, server_round).choice(len(pool), size=min(size, len(pool)), replace=False)
    return [pool[i] for i in sorted(picked)]


class CohortGrid(WrappedGrid):
    """A view of a Grid in which only the cohort exists."""

    def __init__(self, grid: Grid, node_ids: list[int]) -> None:
        super().__init__(grid)
        self._node_ids = node_ids

    def get_node_ids(self) -> Iterable[int]:
        """Return the cohort's node ids."""
        return list(self._node_ids)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the cohort's nodes."""
        chosen = set(self._node_ids)
        return [node for node in self._grid.get_nodes() if node.node_id in chosen]


_SAMPLING = {
    "fraction_train": 1.0,
    "fraction_evaluate": 1.0,
    "min_train_nodes": 1,
    "min_evaluate_nodes": 1,
    "min_available_nodes": 1,
}


@contextmanager
def takes_everyone(inner: Strategy) -> Iterator[None]:
    """Let the inner strategy send to every node of the view it is given: its own sampling is unseeded."""
    saved = {name: getattr(inner, name) for name in _SAMPLING if hasattr(inner, name)}
    for name in saved:
        setattr(inner, name, _SAMPLING[name])
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(inner, name, value)


def sample_size(inner: Strategy, kind: str, total: int) -> int:
    """Return how many of `total` nodes the inner strategy's own settings ask for (`kind`: train or evaluate)."""
    fraction = getattr(inner, f"fraction_{kind}", 1.0)
    if fraction == 0.0:
        return 0
    return min(total, max(int(total * fraction), getattr(inner, f"min_{kind}_nodes", 1), 1))
