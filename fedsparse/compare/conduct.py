"""Run every variant with every seed, and write down what came out."""

import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedsparse.compare.parallel import Finished, Piece, check_jobs, run_pieces
from fedsparse.compare.results import Comparison, read_run, read_runs, variant_folder
from fedsparse.compare.table import csv_text
from fedsparse.errors import ConfigError, RunError
from fedsparse.run import Grids, RoundDone, RunFolder, Started, environment, run_scenario
from fedsparse.run.folder import RUNS, SCENARIO, SUMMARY, TABLE, check_output, clear, is_ours, save_text, write_text
from fedsparse.run.lock import exclusive
from fedsparse.run.signals import terminates
from fedsparse.scenario import Scenario, apply_overrides, expand, to_toml, validate_deep


@dataclass(frozen=True)
class RunBegins:
    """A run of a comparison begins, or an earlier process has completed it already."""

    variant: str
    seed: int
    number: int
    total: int
    done_before: bool


@dataclass(frozen=True)
class RunEnds:
    """A run of a comparison is over; `error` says why it failed."""

    variant: str
    seed: int
    error: str | None


Listener = Callable[[RunBegins | RunEnds | Started | RoundDone], None]


def compare_scenario(
    scenario: Scenario,
    out: str | os.PathLike[str],
    *,
    seeds: Sequence[int] | None = None,
    engine: str | None = None,
    on_event: Listener | None = None,
    verbose: bool = False,
    overwrite: bool = False,
    command: str | None = None,
    jobs: int = 1,
) -> Comparison:
    """Run all variants with all seeds; the same seed gives the same data split, initial model and cohorts.

    A comparison that was stopped goes on where it was when it is called again; one run that fails does not stop the
    others.

    Parameters
    ----------
    scenario : Scenario
        With its variants; without any, it is compared with nothing.
    out : path
        Folder of the comparison; runs go to ``<variant>/seed-<seed>`` in it.
    seeds : sequence of int, optional
        Default: the scenario's `seeds`, or its `seed`.
    engine, on_event, verbose, overwrite, command
        As in `fedsparse.run.run_scenario`.
    jobs : int
        Runs at a time, each in its own process; more than one needs the inline engine.

    Raises
    ------
    ConfigError, DataError
        What is wrong with any variant, before the first run starts.
    """
    chosen = tuple(seeds) if seeds is not None else scenario.seeds or (scenario.seed,)
    if engine is not None:
        scenario = apply_overrides(scenario, [f"engine.name={engine}"])
    scenario = apply_overrides(scenario, [f"seeds={list(chosen)}"])
    variants = expand(scenario)
    for resolved in variants.values():
        validate_deep(resolved)
    check_jobs(jobs, variants.values())
    path = Path(out)
    if not _continues(path, scenario, overwrite):
        check_output(path, overwrite=overwrite)
    options: dict[str, Any] = {
        "verbose": verbose,
        "overwrite": True,
        "resume": True,
        "command": command or environment.command(),
    }
    with terminates(), exclusive(path):
        return _compare(scenario, path, chosen, variants, on_event or (lambda event: None), jobs, overwrite, options)


def _compare(
    scenario: Scenario,
    path: Path,
    chosen: tuple[int, ...],
    variants: dict[str, Scenario],
    tell: Listener,
    jobs: int,
    overwrite: bool,
    options: dict[str, Any],
) -> Comparison:
    _try_tasks(variants, chosen[0])
    _prepare(path, scenario, overwrite)
    facts: dict[str, Any] = {
        "status": "running",
        "command": options["command"],
        "machine": environment.machine(),
        "versions": environment.versions(),
        "started": environment.now(),
        "engine": scenario.engine.name,
    }
    began = time.monotonic()

    def write(status: str) -> Comparison:
        comparison = read_runs(path, scenario, chosen, facts | {"status": status, "wall_s": _since(began)})
        _write(path, comparison)
        return comparison

    write("running")
    plan = [
        Piece(
            name, variants[name].model_copy(update={"seed": seed, "seeds": None}), variant_folder(path, name, seed), n
        )
        for n, (seed, name) in enumerate(product(chosen, variants), 1)
    ]
    failed = False
    try:
        left = []
        for piece in plan:
            if _completed(piece.folder, piece.scenario):
                tell(RunBegins(piece.variant, piece.seed, piece.number, len(plan), True))
            else:
                left.append(piece)
        finished = (
            run_pieces(left, jobs, **options)
            if jobs > 1
            else _one_by_one(left, path / ".memory", options, tell, len(plan))
        )
        with closing(finished):
            for end in finished:
                if jobs > 1:
                    _tell_all(end, tell, len(plan))
                failed = failed or end.error is not None
                tell(RunEnds(end.piece.variant, end.piece.seed, end.error))
                write("running")
    except KeyboardInterrupt:
        write("interrupted")
        raise
    except Exception:
        write("failed")
        raise
    return write("failed" if failed else "completed")


def _one_by_one(
    pieces: list[Piece], memory: Path, options: dict[str, Any], tell: Listener, total: int
) -> Generator[Finished, None, None]:
    """Run in this process, on one engine for all."""
    with Grids(memory, verbose=options["verbose"]) as grids:
        for piece in pieces:
            tell(RunBegins(piece.variant, piece.seed, piece.number, total, False))
            error = None
            try:
                run_scenario(piece.scenario, piece.folder, on_event=tell, grids=grids, **options)
            except RunError as problem:
                error = str(problem)
            yield Finished(piece, [], error)


def _tell_all(end: Finished, tell: Listener, total: int) -> None:
    """Tell afterwards what a run in another process had to tell."""
    tell(RunBegins(end.piece.variant, end.piece.seed, end.piece.number, total, False))
    for event in end.events:
        tell(event)


def _prepare(path: Path, scenario: Scenario, overwrite: bool) -> None:
    """Take over the folder: a new one, or that of the same comparison."""
    try:
        if not _continues(path, scenario, overwrite):
            clear(path)
        path.mkdir(parents=True, exist_ok=True)
        write_text(path / SCENARIO, to_toml(scenario))
    except OSError as error:
        raise ConfigError(f"cannot write into the output folder {path}: {error.strerror}.") from None


def _continues(path: Path, scenario: Scenario, overwrite: bool) -> bool:
    """Whether a folder holds this comparison, maybe with other seeds, and is to be gone on with."""
    if overwrite or not is_ours(path):
        return False
    try:
        before = RunFolder(path).scenario()
    except ConfigError:
        return False
    return before.model_copy(update={"seeds": None}) == scenario.model_copy(update={"seeds": None})


def _try_tasks(variants: dict[str, Scenario], seed: int) -> None:
    """Build each variant's data and model once, so that what does not fit shows before the first run."""
    from fedsparse.run.task import Task

    tried = set()
    for resolved in variants.values():
        if (key := (resolved.data, resolved.model, resolved.engine.device)) not in tried:
            tried.add(key)
            Task(resolved.model_copy(update={"seed": seed}))


def _completed(folder: Path, scenario: Scenario) -> bool:
    run = read_run(folder)
    if run is None or not run.completed:
        return False
    written = RunFolder(folder)  # `read_run` may leave rounds out
    whole = [line["round"] for line in written.rounds()] == list(range(1, scenario.rounds + 1))
    return whole and written.scenario() == scenario


def _write(path: Path, comparison: Comparison) -> None:
    content = comparison.to_json()
    RunFolder(path).write_json(SUMMARY, content)
    save_text(path / TABLE, csv_text(*_flat(content["variants"])))
    save_text(path / RUNS, csv_text(*_flat(content["runs"])))


def _flat(entries: list[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    """Lay out dicts as a table; nested dicts become several columns, lists a text."""
    lines = []
    for entry in entries:
        line: dict[str, object] = {}
        for key, value in entry.items():
            if isinstance(value, dict):
                line.update({f"{key}_{inner}": content for inner, content in value.items()})
            elif isinstance(value, list):
                line[key] = " ".join("-" if item is None else str(item) for item in value)
            else:
                line[key] = value
        lines.append(line)
    columns = list(dict.fromkeys(key for line in lines for key in line))
    return columns, [[line.get(column) for column in columns] for line in lines]


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)
