"""The worker processes of `RayGrid`: started, given work, watched, replaced when they die, and ended."""

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsparse.errors import ConfigError, RunError

from . import worker as worker_module
from ._ray import RayError, RayTaskError, cloudpickle, ray
from .runner import Job, Outcome
from .shared_arrays import SharedArrays
from .task_queue import Task

START_LIMIT = 120.0  # seconds
MAX_FAILED_STARTS = 3


@dataclass(eq=False)
class Worker:
    """A worker process, as the server sees it: `batches` are with it, oldest first."""

    actor: Any
    ready: Any
    started: float
    batches: deque[tuple[Any, list[Task]]] = field(default_factory=deque)
    loaded: set[int] = field(default_factory=set)
    stop_at: float | None = None
    leaving: bool = False


@dataclass(frozen=True)
class Done:
    """A batch that came back."""

    tasks: list[Task]
    seconds: float
    outcomes: list[Outcome]


@dataclass(frozen=True)
class Lost:
    """A batch that did not come back, because its worker died or could not even read or answer it.

    One of its tasks may be the cause, even where the worker had gone on: the death of a worker can swallow the reply to
    the batch before the one that it ran.
    """

    tasks: list[Task]
    reason: str


class WorkerPool:
    """Ray actors with one message batch after the other.

    Parameters
    ----------
    count : int
        Number of workers.
    settings : tuple
        What a worker needs, see `worker.Worker.setup`.
    num_cpus, num_gpus : float
        Resources of each worker.
    arrays : SharedArrays
        Where the arrays are that the messages refer to.
    shared : sequence of str
        Paths that the workers must see, on whatever node they are.
    verbose : bool
        Let workers log.
    """

    def __init__(
        self,
        count: int,
        settings: tuple[Any, ...],
        *,
        num_cpus: float,
        num_gpus: float,
        arrays: SharedArrays,
        shared: Sequence[str] = (),
        verbose: bool = False,
    ) -> None:
        self._arrays = arrays
        self._failed_starts, self.shrunk_at = 0, 0.0
        self._actor = _actor_class().options(num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0, max_task_retries=0)
        try:
            self._settings = cloudpickle.dumps(settings)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise ConfigError(
                f"the client app cannot be sent to the workers ({error}); name it as 'package.module:attribute'."
            ) from error
        self._place = {
            "path": [entry or os.getcwd() for entry in sys.path],
            "cwd": os.getcwd(),
            "threads": max(1, int(num_cpus)),
            "gpu": num_gpus > 0,
            "verbose": verbose,
            "shared": [os.path.abspath(path) for path in shared],
        }
        self.workers = [self._start() for _ in range(count)]

    def wait_ready(self) -> None:
        """Wait until every worker has loaded the client app."""
        while any(worker.ready is not None for worker in self.workers):
            self.wait(1.0)

    def next_free(self, depth: int) -> Worker | None:
        """Return the worker with the least to do, if it has less than `depth` batches, no suspect, and is not stuck.

        One that is still starting gets nothing: if it died, nobody could tell its start from its work. While workers
        leave, nobody gets anything: the room that is being made would be taken before it is there.
        """
        if self.shrinking:
            return None
        ready = [worker for worker in self.workers if worker.ready is None and worker.stop_at is None]
        free = [worker for worker in ready if len(worker.batches) < depth and not _has_suspect(worker)]
        return min(free, key=lambda worker: len(worker.batches), default=None)

    def submit(self, worker: Worker, tasks: list[Task], jobs: list[Job]) -> None:
        """Send a batch to a worker, and before it the shared arrays that the worker does not have yet."""
        for key in sorted(set().union(*(task.keys for task in tasks)) - worker.loaded):
            keep = self._arrays.keys()
            worker.actor.load.options(num_returns=0).remote(key, self._arrays.ref(key), keep)
            worker.loaded = (worker.loaded & set(keep)) | {key}
        worker.batches.append((worker.actor.run.remote(jobs), tasks))

    def in_flight(self) -> list[Task]:
        """Return all tasks that are with a worker."""
        return [task for worker in self.workers for _, tasks in worker.batches for task in tasks]

    def wait(self, timeout: float | None) -> list[Done | Lost]:
        """Wait until something has happened, or `timeout` seconds; return all that has.

        Raises
        ------
        ConfigError
            Where a worker cannot load the client app.
        RunError
            Where workers do not start.
        """
        self._check_starts()
        refs = [worker.ready for worker in self.workers if worker.ready is not None]
        refs += [ref for worker in self.workers for ref, _ in worker.batches]
        if not refs:
            return []
        if any(worker.ready is not None for worker in self.workers):
            timeout = min(timeout, 1.0) if timeout is not None else 1.0
        ready, rest = ray.wait(refs, num_returns=1, timeout=timeout)
        if rest and ready:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        arrived = set(ready)
        return [event for worker in list(self.workers) for event in self._events(worker, arrived)]

    def stop_stuck(self, grace: float) -> list[Task]:
        """Replace workers that for `grace` seconds run nothing that anybody wants; return the tasks they had."""
        dropped: list[Task] = []
        for worker in list(self.workers):
            if not worker.batches or any(task.wanted for task in worker.batches[0][1]):
                worker.stop_at = None
            elif worker.stop_at is None:
                worker.stop_at = time.monotonic() + grace
            elif time.monotonic() >= worker.stop_at:
                dropped += [task for _, tasks in worker.batches for task in tasks]
                self._replace(worker)
        return dropped

    def stop_in(self) -> float | None:
        """Return the seconds until `stop_stuck` may have something to do."""
        times = [worker.stop_at for worker in self.workers if worker.stop_at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    @property
    def shrinking(self) -> bool:
        """Whether workers are on their way out; when the last one had gone, `shrunk_at` tells."""
        return any(worker.leaving for worker in self.workers)

    def halve(self) -> int:
        """Let half of the workers end once they have answered what they have; return how many stay, at least one."""
        stay = len(self.workers) - len(self.workers) // 2
        for worker in self.workers[stay:]:
            worker.leaving = True
            if not worker.batches:
                self._remove(worker)
        return stay

    def _remove(self, worker: Worker) -> None:
        _kill(worker)
        self.workers.remove(worker)
        self.shrunk_at = time.monotonic()

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            _kill(worker)
        self.workers = []

    def _events(self, worker: Worker, arrived: set[Any]) -> list[Done | Lost]:
        if worker.ready is not None and worker.ready in arrived:
            problem = _result(worker.ready)
            if isinstance(problem, str):
                raise ConfigError(problem)
            if isinstance(problem, RayError):
                self._failed_start(worker, problem)
                return []
            worker.ready, self._failed_starts = None, 0
        events: list[Done | Lost] = []
        while worker.batches and worker.batches[0][0] in arrived:
            ref, tasks = worker.batches[0]
            result = _result(ref)
            if isinstance(result, RayError) and not isinstance(result, RayTaskError):
                return events + self._died(worker, result)
            worker.batches.popleft()
            worker.stop_at = None
            if isinstance(result, RayError):
                events.append(Lost(tasks, f"client worker failed: {_first_line(result)}"))
            else:
                seconds, outcomes = result
                events.append(Done(tasks, seconds, outcomes))
        if worker.leaving and not worker.batches:
            self._remove(worker)
        return events

    def _died(self, worker: Worker, error: RayError) -> list[Done | Lost]:
        reason = f"client worker died: {_first_line(error)}"
        batches = [tasks for _, tasks in worker.batches]
        self._replace(worker)
        return [Lost(tasks, reason) for tasks in batches]

    def _failed_start(self, worker: Worker, error: RayError) -> None:
        self._failed_starts += 1
        if self._failed_starts > MAX_FAILED_STARTS:
            raise RunError(f"client workers die while they start: {_first_line(error)}")
        self._replace(worker)

    def _check_starts(self) -> None:
        late = [w for w in self.workers if w.ready is not None and time.monotonic() - w.started > START_LIMIT]
        if late:
            free = ray.available_resources()  # type: ignore[no-untyped-call]
            raise RunError(
                f"{len(late)} of {len(self.workers)} workers did not start within {START_LIMIT:.0f} s; Ray has "
                f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free. Is it busy with other work?"
            )

    def _start(self) -> Worker:
        actor = self._actor.remote()
        return Worker(actor, actor.setup.remote(self._place, self._settings), time.monotonic())

    def _replace(self, worker: Worker) -> None:
        if worker.leaving:
            self._remove(worker)
            return
        _kill(worker)
        self.workers[self.workers.index(worker)] = self._start()


def _actor_class() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cloudpickle.register_pickle_by_value(worker_module)  # type: ignore[no-untyped-call]
        return ray.remote(worker_module.Worker)


def _has_suspect(worker: Worker) -> bool:
    return any(task.deaths for _, tasks in worker.batches for task in tasks)


def _result(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return error


def _kill(worker: Worker) -> None:
    try:
        ray.kill(worker.actor, no_restart=True)
    except (RayError, ValueError):
        return


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if isinstance(error, RayTaskError) and lines else (lines[0] if lines else type(error).__name__)
