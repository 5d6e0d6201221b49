"""Which messages wait, which run, and how many go to a worker at once."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flwr.app import Message

from .transport import Packed

ORDER_S = 0.01  # seconds of a client from which on it matters when in a round it runs
SLOW_S = 0.5  # seconds for one message, from which on a worker gets its next batch only when it is done


@dataclass(slots=True, eq=False)
class Task:
    """One message on its way to a client and back.

    Parameters
    ----------
    id : str
        The message id.
    client : int
        The client.
    message : Message
        The instruction.
    content : list or None
        Its packed content.
    keys : frozenset
        Keys of the shared arrays that the content refers to.
    deaths : int
        How many workers died while this task, perhaps, ran on them.
    wanted : bool
        False once nobody waits for the reply.
    """

    id: str
    client: int
    message: Message
    content: Packed
    keys: frozenset[int]
    deaths: int = 0
    wanted: bool = True


class TaskQueue:
    """Tasks, never two of one client at the same time: those of the slowest clients first, else in order of arrival.

    A client with many examples that came last would keep all other workers waiting. How slow a client is shows the
    first time that it runs; until then it counts as the mean of its messages' type.

    A batch is as long as fills `target_s` seconds by what messages of its type took lately, but at most `max_batch`,
    and short enough at the end that all workers finish together, though no shorter than `min_share`. A task that a
    worker died on travels alone.
    """

    def __init__(self, max_batch: int, target_s: float, min_share: int = 1) -> None:
        self.max_batch, self.target_s, self.min_share = max_batch, target_s, min_share
        self._waiting: deque[Task] = deque()
        self._behind: dict[int, deque[Task]] = {}
        self._busy: set[int] = set()
        self._seconds: dict[str, float] = {}
        self._slow: dict[str, dict[int, float]] = {}  # by message type: seconds of clients for which the order matters

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, tasks: Iterable[Task]) -> None:
        """Append new tasks; those of one client stay in their order."""
        tasks = list(tasks)
        if tasks and (slow := self._slow.get(kind := _kind(tasks[0]))):
            mean = self._seconds[kind]
            tasks.sort(key=lambda task: slow.get(task.client, mean), reverse=True)
        self._waiting.extend(tasks)

    def add_first(self, tasks: list[Task]) -> None:
        """Put tasks back that have to run again."""
        for task in reversed(tasks):
            self._busy.discard(task.client)
            self._waiting.appendleft(task)

    def done(self, task: Task) -> None:
        """Note that a client is free again."""
        self._busy.discard(task.client)
        behind = self._behind.get(task.client)
        if behind is not None:
            self._waiting.appendleft(behind.popleft())
            if not behind:
                del self._behind[task.client]

    def observe(self, batch: list[Task], seconds: float) -> None:
        """Learn how long messages of a type take, and those of slow clients."""
        kind, each = _kind(batch[0]), seconds / len(batch)
        if each >= ORDER_S:
            self._slow.setdefault(kind, {}).update((task.client, each) for task in batch)
        self._seconds[kind] = 0.7 * self._seconds[kind] + 0.3 * each if kind in self._seconds else each

    def next_batch(self, workers: int) -> list[Task]:
        """Take the next tasks for one of `workers` workers; an empty list where none can start."""
        batch: list[Task] = []
        limit = 1
        while self._waiting and len(batch) < limit:
            task = self._waiting.popleft()
            if not task.wanted and task.client not in self._busy:
                self.done(task)
            if not task.wanted:
                continue
            if task.client in self._busy:
                self._behind.setdefault(task.client, deque()).append(task)
                continue
            if batch and (task.deaths or _kind(task) != _kind(batch[0])):
                self._waiting.appendleft(task)
                break
            if not batch:
                limit = 1 if task.deaths else self._limit(_kind(task), workers)
            self._busy.add(task.client)
            batch.append(task)
        return batch

    def depth(self, workers: int) -> int:
        """Return how many batches a worker may hold.

        A second one hides the time that it needs to get there. It would wait behind a slow client, though, while
        another worker is idle; so it is for quick clients only, and there must be more than enough of them.
        """
        if len(self._waiting) < 4 * workers or self._waiting[0].deaths:
            return 1
        return 2 if self._seconds.get(_kind(self._waiting[0]), SLOW_S) < SLOW_S else 1

    def _limit(self, kind: str, workers: int) -> int:
        if kind not in self._seconds:
            return 1
        fills = int(self.target_s / max(self._seconds[kind], 1e-6))
        fair = -(-(len(self._waiting) + 1) // (2 * workers))
        return max(1, min(self.max_batch, fills, max(fair, self.min_share)))


def _kind(task: Task) -> Any:
    return task.message.metadata.message_type
