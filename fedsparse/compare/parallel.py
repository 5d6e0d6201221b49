"""Several runs of a comparison at a time, each in a process of its own."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from fedsparse.errors import ConfigError, FedsparseError, RunError
from fedsparse.run import RoundDone, Started, environment, run_scenario
from fedsparse.scenario import Scenario

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Piece:
    """One run to do: its variant and seed, what to run, and where to."""

    variant: str
    scenario: Scenario
    folder: Path
    number: int

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.scenario.seed


@dataclass(frozen=True)
class Finished:
    """A run is over; `events` are what it told, `error` says why it failed."""

    piece: Piece
    events: list[Started | RoundDone]
    error: str | None


def check_jobs(jobs: int, variants: Iterable[Scenario]) -> None:
    """Refuse to run engines side by side that each take the whole machine."""
    if jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}.")
    for scenario in variants if jobs > 1 else ():
        if scenario.engine.name != "inline":
            raise ConfigError(
                f"jobs = {jobs} needs engine.name = 'inline', where a run takes one CPU; the {scenario.engine.name} "
                "engine already uses all of them in one run. Say --engine inline, or leave --jobs out."
            )


def run_pieces(pieces: Iterable[Piece], jobs: int, **options: Any) -> Generator[Finished, None, None]:
    """Yield runs as they finish, `jobs` at a time.

    Parameters
    ----------
    pieces : iterable of Piece
        In the order to start them.
    jobs : int
        Processes.
    **options
        For `run_scenario`.

    Raises
    ------
    RunError
        Where a process was killed; what it had written stays.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, environment.cpus() // jobs)
    left, running = iter(pieces), dict[Connection, tuple[SpawnProcess, Piece]]()
    try:
        while True:
            while len(running) < jobs and (piece := next(left, None)) is not None:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(sender, os.getpid(), threads, piece, options))
                process.start()
                sender.close()  # so that the end of the process shows
                running[receiver] = process, piece
            if not running:
                return
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                process, piece = running.pop(ready)
                yield Finished(piece, *_received(ready, process))
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join()


def _received(receiver: Connection, process: SpawnProcess) -> tuple[list[Started | RoundDone], str | None]:
    try:
        events, error = receiver.recv()
    except EOFError:
        process.join()
        return [], f"its process ended with exit code {process.exitcode}"
    process.join()
    if isinstance(error, FedsparseError) and not isinstance(error, RunError):
        raise error
    return events, None if error is None else str(error)


def _run(sender: Connection, parent: int, threads: int, piece: Piece, options: dict[str, Any]) -> None:
    _die_with(parent)
    # Evaluation uses every CPU of a machine that it has for itself; here others run beside it.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    events: list[Started | RoundDone] = []
    error: FedsparseError | None = None
    with suppress(KeyboardInterrupt):
        try:
            run_scenario(piece.scenario, piece.folder, on_event=events.append, **options)
        except FedsparseError as problem:
            error = problem
        sender.send((events, error))


def _die_with(parent: int) -> None:
    """Let a parent that is killed take its runs with it, where the system can (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)
