"""Run a scenario on an engine, and leave a folder that tells the truth however it ends."""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsparse.errors import ConfigError
from fedsparse.run import environment
from fedsparse.run.folder import PARTITION, SUMMARY, RunFolder, check_output, is_ours
from fedsparse.run.grids import Grids
from fedsparse.run.lock import exclusive, unconducted
from fedsparse.run.logs import logs
from fedsparse.run.signals import terminates, uninterrupted
from fedsparse.run.summary import Summary, summarise
from fedsparse.scenario import Scenario, validate_deep

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from fedsparse.run.checkpoint import Checkpoint
    from fedsparse.run.task import Task


@dataclass(frozen=True)
class Started:
    """A run begins, or goes on: `rounds` of it are done, and what they sent is counted in `uplink_bytes`."""

    scenario: Scenario
    num_parameters: int
    initial_accuracy: float
    rounds: int = 0
    uplink_bytes: int = 0


@dataclass(frozen=True)
class RoundDone:
    """A round is over; `line` is what rounds.jsonl has of it."""

    scenario: Scenario
    line: dict[str, Any]


log = logging.getLogger(__name__)

Listener = Callable[[Started | RoundDone], None]


def run_scenario(
    scenario: Scenario,
    out: str | os.PathLike[str],
    *,
    engine: str | None = None,
    on_event: Listener | None = None,
    verbose: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    command: str | None = None,
    grids: Grids | None = None,
) -> Summary:
    """Run one scenario and write its folder.

    Parameters
    ----------
    scenario : Scenario
        What to run; its variants are ignored.
    out : path
        Folder of the run.
    engine : str, optional
        Takes the place of the scenario's engine.
    on_event : callable, optional
        Told when the run starts and after each round.
    verbose : bool
        Let the engine log.
    overwrite : bool
        Replace an earlier run in `out`.
    resume : bool
        Go on after the last complete round of a run of the same scenario in `out`, with the same result as if it had
        never been stopped; the engine may be another one. A completed run is left as it is; where there is none, one
        begins. Together with `overwrite`, a run of another scenario is replaced.
    command : str, optional
        How to run this again, for the record; default: this process's command line.
    grids : Grids, optional
        Engines shared with other runs.

    Returns
    -------
    Summary
        Also in summary.json.

    Raises
    ------
    ConfigError, DataError
        What is wrong with the scenario or the output, before anything starts.
    RunError
        The run failed; its folder says so as well.
    KeyboardInterrupt
        On Ctrl-C or SIGTERM, after a valid folder with the model so far has been written.
    """
    scenario = scenario.model_copy(update={"variant": ()})
    if engine is not None and engine != scenario.engine.name:
        from fedsparse.scenario import apply_overrides

        scenario = apply_overrides(scenario, [f"engine.name={engine}"])
    validate_deep(scenario)
    check_output(out, overwrite=overwrite, resume=resume)
    command = command or environment.command()
    with terminates(), logs(verbose), exclusive(out), ExitStack() as stack:
        if scenario.engine.name == "flower":
            if resume and not overwrite:
                raise ConfigError("a run on Flower's own engine cannot be resumed: take --engine ray, or --overwrite.")
            from fedsparse.run.on_flower import run_on_flower

            return run_on_flower(scenario, Path(out), on_event, verbose, overwrite, command)
        if scenario.engine.name == "deployment":
            from fedsparse.run.on_deployment import run_on_deployment

            return run_on_deployment(scenario, Path(out), on_event, overwrite, resume, command, verbose=verbose)
        stack.enter_context(unconducted(out))
        checkpoint = None
        if resume and is_ours(Path(out)):
            from fedsparse.run.resume import find

            earlier = find(Path(out), scenario, replace=overwrite)
            if isinstance(earlier, Summary):
                return earlier
            checkpoint, overwrite = earlier, True
        from fedsparse.run.disk import check_disk
        from fedsparse.run.task import Task

        task = Task(scenario)
        if checkpoint is None:
            check_disk(scenario, task.num_parameters, Path(out))
        grids, folder = grids or Grids(verbose=verbose), RunFolder(out)
        name = run_name(scenario, out) if checkpoint is None else str(checkpoint.strategy["run"])
        with grids.open(scenario, folder.memory) as grid:
            if checkpoint is None:
                folder = RunFolder.create(out, scenario, overwrite=overwrite)
            else:
                folder.reopen(scenario, checkpoint.server_round)
            grids.link(folder.memory, name)
            return conduct(scenario, task, folder, grid, name, command, on_event, checkpoint=checkpoint)


def run_name(scenario: Scenario, out: str | os.PathLike[str]) -> str:
    """Return the name of the error memories of a run: that of its folder tells variants and seeds apart."""
    folder = Path(out).absolute()
    return f"{folder.parent.name}-{folder.name}-{scenario.seed}"


def conduct(
    scenario: Scenario,
    task: "Task",
    folder: RunFolder,
    grid: "Grid",
    name: str,
    command: str,
    on_event: Listener | None = None,
    *,
    keep_model: bool = False,
    checkpoint: "Checkpoint | None" = None,
) -> Summary:
    """Train on a grid, and write the folder's files.

    Parameters
    ----------
    scenario, task, folder, grid
        What to run, on what data and model, where, and with which clients.
    name : str
        Names the clients' error memories.
    command : str
        For the record.
    on_event : callable, optional
        As in `run_scenario`.
    keep_model : bool
        Write the model after every round, for a process that may be ended without notice.
    checkpoint : Checkpoint, optional
        Go on from there.
    """
    from fedsparse.run.checkpoint import remove
    from fedsparse.run.loop import Training
    from fedsparse.scenario.advice import advice

    training = Training(scenario, task, folder, name, checkpoint)
    facts: dict[str, Any] = {
        "num_parameters": task.num_parameters,
        "started": environment.now(),
        "command": command,
        "machine": environment.machine(),
        "versions": environment.versions(),
    }

    def finish(status: str, error: BaseException | None = None) -> Summary:
        text = f"{type(error).__name__}: {error}" if error is not None else None
        summary = summarise(scenario, training.lines, status, error=text, wall_s=training.wall_s, **facts)
        with uninterrupted():
            folder.write_model(training.arrays)
            folder.write_json(SUMMARY, summary.to_json())
            if status == "completed":
                remove(folder.path)
        return summary

    def on_line(line: dict[str, Any]) -> None:
        if keep_model:
            folder.write_model(training.arrays)
        if on_event is not None:
            on_event(RoundDone(scenario, line))

    for text in advice(scenario, task.num_parameters):
        log.warning(text)
    try:
        with terminates():  # once more: Ray puts a handler of its own in place
            folder.write_json(PARTITION, task.division())
            facts["initial_accuracy"] = task.evaluate(task.arrays)[1]
            if on_event is not None:
                spent = sum(line["uplink_bytes"] for line in training.lines)
                on_event(Started(scenario, task.num_parameters, facts["initial_accuracy"], training.done, spent))
            checkpoints = scenario.engine.checkpoint and not keep_model
            if not checkpoints:
                remove(folder.path)  # memories move on: an older one would not fit them any more
            training.rounds(grid, on_line, checkpoints=checkpoints)
    except KeyboardInterrupt:
        finish("interrupted")
        raise
    except Exception as error:
        finish("failed", error)
        raise
    return finish("completed")
