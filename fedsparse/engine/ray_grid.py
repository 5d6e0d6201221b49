"""Flower's `Grid` straight on Ray actors: the default engine."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Message

from fedsparse.errors import ConfigError

from ._flwr import APP_RAISED, EXPIRED, UNKNOWN, error_reply, message_fields, reply
from .apps import check_client_app, load_client_app
from .base import DEFAULT_CLIENT_APP, BaseGrid, expired, expiry
from .ray_pool import Done, Lost, WorkerPool
from .ray_session import RaySession
from .resources import check_resources, workers_that_fit
from .runner import Job, Outcome, out_of_memory
from .shared_arrays import SharedArrays
from .task_queue import Task, TaskQueue
from .transport import Packed, copy_arrays, pack, packed_bytes, unpack

log = logging.getLogger("fedsparse.engine")

BATCH_S, BATCH = 0.02, 64  # seconds of work that a batch aims at, and how many messages it has at most
TOGETHER_S, TOGETHER, LEAST = 0.1, 16, 4  # the same for apps that train a batch's clients together, and at least
GRACE_S = 5.0  # how long a client may go on after nobody waits for it any more
MORE_ROOM = 2  # further tries of a client that ran out of memory: each time half as many run beside it
ZERO_COPY = 256 * 2**20  # bytes of replies per push that may stay in the object store; more are copied out of it


class RayGrid(BaseGrid):
    """A `Grid` that runs clients on Ray actors.

    The arrays of a round are put into the object store once and read by all workers where they lie. Messages travel in
    batches that adapt to what a client takes; replies come as they complete. A worker that dies is replaced, and its
    messages are tried again, each alone. Where clients together run out of memory, on a GPU or not, half as many run
    at the same time from then on. Results do not depend on which worker ran what.

    Parameters
    ----------
    client_app, num_clients, run_config, node_config, timeout
        As in `BaseGrid`.
    num_cpus, num_gpus : float
        What one client needs; fractions let clients share. CPU clients do not see any GPU.
    num_workers : int, optional
        Number of clients that run at the same time; by default as many as fit.
    address : str, optional
        A Ray cluster to join. Without it, Ray is started on this machine, and stopped by `close`. A Ray instance that
        this process already uses is used, and left running.
    max_retries : int
        How often a message is tried again after its worker died.
    max_batch : int, optional
        Most messages that go to a worker at once; by default 64, or 16 where the app trains them together.
    shared : sequence of str
        Paths that every node of a cluster must see, such as the folder of the error memories.
    object_store_memory, ray_options, verbose
        See `RaySession`.

    Raises
    ------
    ConfigError
        Where the client app cannot be loaded or the resources are not there.
    """

    def __init__(
        self,
        client_app: Any = DEFAULT_CLIENT_APP,
        *,
        num_clients: int,
        run_config: Mapping[str, Any] | None = None,
        node_config: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        num_workers: int | None = None,
        address: str | None = None,
        max_retries: int = 2,
        max_batch: int | None = None,
        shared: Sequence[str] = (),
        object_store_memory: int | None = None,
        ray_options: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            client_app, num_clients=num_clients, run_config=run_config, node_config=node_config, timeout=timeout
        )
        for name, value in (("num_workers", num_workers), ("max_batch", max_batch)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value!r}.")
        check_resources(num_cpus, num_gpus)
        check_client_app(client_app)
        self._max_retries = max_retries
        self._arrays = SharedArrays()
        self._tasks: dict[str, Task] = {}
        self._replies: dict[str, Message] = {}
        self._handed_out = 0
        self._next_expiry = float("inf")
        self._pool: WorkerPool | None = None
        self._too_big = set[int]()
        loading = _Loading(client_app)
        self._session = RaySession(
            address=address, object_store_memory=object_store_memory, options=ray_options, verbose=verbose
        )
        try:
            count = workers_that_fit(num_cpus, num_gpus, num_workers, num_clients)
            if loading.finish():
                self._queue = TaskQueue(max_batch or TOGETHER, TOGETHER_S, LEAST)
            else:
                self._queue = TaskQueue(max_batch or BATCH, BATCH_S)
            settings = (client_app, num_clients, self.run_config, self.node_config)
            self._pool = WorkerPool(
                count,
                settings,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                arrays=self._arrays,
                shared=shared,
                verbose=verbose,
            )
        except BaseException:
            self.close()
            raise

    @property
    def num_workers(self) -> int:
        """Number of clients that run at the same time."""
        return len(self._running.workers)

    def wait_ready(self) -> None:
        """Wait until all workers have started and loaded the client app; the first messages do the same."""
        self._running.wait_ready()

    def close(self) -> None:
        """End the workers, and Ray where this engine started it."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._tasks.clear()
        self._replies.clear()
        self._arrays = SharedArrays()
        self._session.close()

    @property
    def _running(self) -> WorkerPool:
        if self._pool is None:
            raise RuntimeError("this engine is closed.")
        return self._pool

    def _push(self, batch: list[tuple[str, Message]]) -> None:
        pool = self._running  # first of all: in a closed engine, Ray would start itself again
        keys = self._arrays.admit(message for _, message in batch)
        contents: dict[int, tuple[Packed, frozenset[int]]] = {}
        tasks: list[Task] = []
        for message_id, message in batch:
            # Strategies give all messages of a round the same content object; pack it once.
            if id(message.content) not in contents:
                contents[id(message.content)] = _pack_shared(message, keys)
            packed, used = contents[id(message.content)]
            tasks.append(Task(message_id, self._client_of(message), message, packed, used))
            self._next_expiry = min(self._next_expiry, expiry(message))
        self._tasks.update((task.id, task) for task in tasks)
        self._queue.add(tasks)
        alive = [*self._tasks.values(), *pool.in_flight()]
        self._arrays.trim({key for task in alive for key in task.keys})
        self._handed_out = 0
        self._dispatch()

    def _pull(self, ids: list[str]) -> list[Message]:
        self._step(0.0)
        return [self._replies.pop(message_id) for message_id in ids if message_id in self._replies]

    def _wait(self, ids: list[str], deadline: float | None) -> None:
        missing = {message_id for message_id in ids if message_id in self._tasks}
        while missing:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            missing.difference_update(self._step(left))

    def _forget(self, ids: list[str]) -> None:
        late = [self._tasks.pop(message_id) for message_id in ids if message_id in self._tasks]
        for message_id in ids:
            self._replies.pop(message_id, None)
        for task in late:
            task.wanted = False
        if late and self._pool is not None:
            self._pool.stop_stuck(GRACE_S)

    def _step(self, timeout: float | None) -> list[str]:
        """Hand out work, take what comes within `timeout` seconds; return the ids that now have a reply."""
        finished = self._expire()
        self._queue.add_first(self._running.stop_stuck(GRACE_S))
        self._dispatch()
        limits = [timeout, self._running.stop_in(), self._next_expiry - time.time()]
        for event in self._running.wait(max(0.0, min(limit for limit in limits if limit is not None))):
            finished += self._take(event)
        self._dispatch()
        return finished

    def _dispatch(self) -> None:
        pool = self._running
        while len(self._queue) and (worker := pool.next_free(self._queue.depth(len(pool.workers)))) is not None:
            tasks = self._queue.next_batch(len(pool.workers))
            if not tasks:
                return
            jobs = [
                Job(task.client, message_fields(task.message), task.content, self.states.get(task.client))
                for task in tasks
            ]
            pool.submit(worker, tasks, jobs)

    def _take(self, event: Done | Lost) -> list[str]:
        if isinstance(event, Lost):
            return self._try_again([(task, event.reason) for task in event.tasks], UNKNOWN, self._max_retries)
        self._queue.observe(event.tasks, event.seconds)
        pairs = list(zip(event.tasks, event.outcomes, strict=True))
        crowded = [(task, outcome.reason) for task, outcome in pairs if out_of_memory(outcome)]
        if crowded:
            self._make_room(event, crowded)
        done = [self._finish(task, outcome) for task, outcome in pairs if not out_of_memory(outcome)]
        return done + self._try_again(crowded, APP_RAISED, self._max_retries + MORE_ROOM)

    def _try_again(self, failed: list[tuple[Task, str]], code: int, most: int) -> list[str]:
        """Put tasks back, each to travel alone; answer those that have been tried `most` times again."""
        again: list[Task] = []
        finished: list[str] = []
        for task, reason in failed:
            task.deaths += 1
            if task.deaths > most:
                self._too_big.add(task.client)
                self._queue.done(task)
                finished += self._answer(task, error_reply(task.message, code, reason))
            else:
                again.append(task)
        self._queue.add_first(again)
        return finished

    def _make_room(self, event: Done, crowded: list[tuple[Task, str]]) -> None:
        """Run half as many clients at the same time: together they took more memory than there is.

        Not for those that began before the last room was made, nor for a client that is too big even so.
        """
        pool, began = self._running, time.monotonic() - event.seconds
        if pool.shrinking or began < pool.shrunk_at or all(task.client in self._too_big for task, _ in crowded):
            return
        before, after = self.num_workers, pool.halve()
        if after < before:
            task, reason = crowded[0]
            log.warning(
                "client %d ran out of memory (%s): %d clients at a time from now on, not %d. Set engine.max_workers.",
                task.client, reason.partition("\n")[0][:120], after, before,
            )  # fmt: skip

    def _finish(self, task: Task, outcome: Outcome) -> str:
        self._queue.done(task)
        self._keep_state(task.client, outcome.state)
        if not task.wanted:
            return task.id
        if outcome.content is None:
            answer = error_reply(task.message, outcome.code, outcome.reason)
        elif expired(task.message):
            answer = error_reply(task.message, EXPIRED, "the client answered after the message's time to live")
        else:
            content = unpack(self._release(outcome.content))
            answer = reply(task.message, content, outcome.created_at, outcome.ttl)
        self._answer(task, answer)
        return task.id

    def _answer(self, task: Task, answer: Message) -> list[str]:
        if not task.wanted:
            return []
        task.wanted = False
        del self._tasks[task.id]
        self._replies[task.id] = answer
        return [task.id]

    def _release(self, content: Packed) -> Packed:
        """Copy a reply out of the object store, once this push's replies hold enough of it."""
        self._handed_out += packed_bytes(content)
        if self._handed_out <= ZERO_COPY:
            return content
        return [(name, kind, copy_arrays(value) if kind == "array" else value) for name, kind, value in content]

    def _expire(self) -> list[str]:
        """Answer for messages whose time to live is over."""
        if time.time() <= self._next_expiry:
            return []
        finished: list[str] = []
        for task in list(self._tasks.values()):
            if expired(task.message):
                why = "the message's time to live was over before the client answered"
                finished += self._answer(task, error_reply(task.message, EXPIRED, why))
        self._next_expiry = min((expiry(task.message) for task in self._tasks.values()), default=float("inf"))
        return finished


def _pack_shared(message: Message, keys: dict[int, int]) -> tuple[Packed, frozenset[int]]:
    used: set[int] = set()

    def share(record: ArrayRecord) -> int | None:
        key = keys.get(id(record))
        if key is not None:
            used.add(key)
        return key

    return pack(message.content, share), frozenset(used)


class _Loading(threading.Thread):
    """Import the client app's module here while Ray starts: a mistake in it shows early, and its imports are shared."""

    def __init__(self, client_app: Any) -> None:
        super().__init__(daemon=True)
        self._client_app, self._loaded = client_app, client_app
        self._failed = False
        self.start()

    def run(self) -> None:
        """Import the module."""
        if isinstance(self._client_app, str):
            try:
                self._loaded = load_client_app(self._client_app)
            except Exception:
                self._failed = True

    def finish(self) -> bool:
        """Wait for the import; raise what is wrong with it. Return whether the app trains clients together."""
        self.join()
        if self._failed:
            # Once more, in the main thread: some modules import only there, and its error is the one to show.
            self._loaded = load_client_app(self._client_app)
        return hasattr(self._loaded, "train_ahead")
