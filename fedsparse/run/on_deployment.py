"""Run a scenario on the real devices of a federation, and follow it from the server's machine."""

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsparse.deploy.attendance import Attendance
from fedsparse.deploy.control import Control
from fedsparse.deploy.federation import Federation
from fedsparse.deploy.status import remember
from fedsparse.deploy.submit import log_shown, log_tail, submit
from fedsparse.engine.flower import CLIENT_APP, SERVER_APP
from fedsparse.errors import ConfigError, FedsparseError, RunError, shell
from fedsparse.run.checkpoint import Checkpoint
from fedsparse.run.conduct import Listener
from fedsparse.run.folder import DEPLOYMENT, SUMMARY, RunFolder, is_ours
from fedsparse.run.iterates import IterateAverage
from fedsparse.run.lock import unconducted
from fedsparse.run.on_flower import Follower
from fedsparse.run.resume import find
from fedsparse.run.signals import uninterrupted
from fedsparse.run.summary import Summary
from fedsparse.run.task import Task
from fedsparse.scenario import Scenario, to_toml

log = logging.getLogger(__name__)

FOLLOW_EVERY_S, PATIENCE_S = 0.5, 15.0
MOST_LOST = 3
COMPLETED, FAILED, STOPPED = "completed", "failed", "stopped"  # Flower's words


def run_on_deployment(
    scenario: Scenario,
    out: Path,
    on_event: Listener | None,
    overwrite: bool,
    resume: bool,
    command: str,
    *,
    verbose: bool = False,
    apps: tuple[str, str] = (SERVER_APP, CLIENT_APP),
) -> Summary:
    """Submit a run to a federation's SuperLink, and follow it until it is finished.

    Parameters
    ----------
    scenario, out, on_event, overwrite, resume, command
        As in `run_scenario`; ``engine.federation`` names the federation's folder.
    verbose : bool
        Show the ServerApp's log.
    apps : (str, str)
        ServerApp and ClientApp, as ``"package.module:attribute"`` of modules that are installed on both sides.

    Raises
    ------
    ConfigError
        No federation.
    RunError
        The server does not answer, or the run failed.
    """
    federation = Federation.open(Path(str(scenario.engine.federation)))
    control = Control(federation.inner, federation.ca)
    if resume and is_ours(out) and isinstance(complete := find(out, scenario, replace=overwrite), Summary):
        return complete
    control.runs()  # fails where the server is away, before anything is written
    task = Task(scenario)
    earlier = _prepare(control, scenario, out, overwrite, resume)
    if isinstance(earlier, Summary):
        return earlier
    folder, checkpoint = RunFolder(out), earlier
    follower = Follower(scenario, task, folder, on_event, command, _round(checkpoint))
    lost = 0  # ServerApps since the last complete round
    while True:
        run_id = None
        try:
            with uninterrupted():  # a run that is submitted and not written down could not be stopped
                run_id = submit(federation, _run_config(scenario, folder, command, checkpoint), apps)
                remember(federation, folder.path)
                folder.write_json(DEPLOYMENT, {"federation": str(federation.path), "run_id": run_id})
            with log_shown(federation, run_id, verbose):
                first = checkpoint.strategy.get("online") if checkpoint else None
                attendance = Attendance(federation, scenario, first or scenario.data.num_clients)
                ended, details = _follow(control, run_id, follower, attendance)
        except KeyboardInterrupt:
            with uninterrupted():
                log.warning("stopping the run on the federation, which may take some seconds")
                if run_id is not None:
                    _stop(control, run_id, federation)
                _leave_a_model(scenario, task, folder)
                follower.conclude("interrupted")
            raise
        if ended == COMPLETED:
            return follower.result()
        if ended == STOPPED:
            _leave_a_model(scenario, task, folder)
            raise RunError(follower.conclude("interrupted", RunError("the run was stopped on the server.")).error)
        before, checkpoint = _round(checkpoint), Checkpoint.load(out)
        lost = 1 if _round(checkpoint) > before else lost + 1
        if lost > MOST_LOST or not _was_lost(folder, ended):
            _leave_a_model(scenario, task, folder)
            error = RunError(f"the run on the federation {ended}: {details}{log_tail(federation, run_id)}")
            raise RunError(follower.conclude("failed", error).error) from error
        (out / SUMMARY).unlink(missing_ok=True)
        log.warning("the ServerApp was lost (%s): it goes on after round %d", details, _round(checkpoint))
        follower.back_to(_round(checkpoint))


def _prepare(
    control: Control, scenario: Scenario, out: Path, overwrite: bool, resume: bool
) -> Checkpoint | Summary | None:
    """Return where a run goes on, its summary if it is complete, or None where it begins in a new folder."""
    resume = resume and is_ours(out)
    if is_ours(out) and (resume or overwrite):
        stop_earlier(control, RunFolder(out))
    with unconducted(out, PATIENCE_S):
        # Once more: what was stopped may have got further.
        if resume and (earlier := find(out, scenario, replace=overwrite)) is not None:
            if isinstance(earlier, Checkpoint):
                RunFolder(out).reopen(scenario, earlier.server_round)
            return earlier
        RunFolder.create(out, scenario, overwrite=overwrite or resume)
    return None


def _round(checkpoint: Checkpoint | None) -> int:
    return checkpoint.server_round if checkpoint is not None else 0


def _was_lost(folder: RunFolder, ended: str) -> bool:
    """Whether a ServerApp was killed, or given up by Flower on a machine under heavy load; not if it failed itself."""
    said = folder.read_json(SUMMARY)
    return ended == FAILED and (said is None or said["status"] != "failed")


def _stop(control: Control, run_id: int, federation: Federation) -> None:
    try:
        control.stop(run_id)
    except RunError:
        stop = f"fedsparse deploy stop {shell(federation.path)}"
        log.warning("the server does not answer: the run may go on when it is back; then `%s` stops it", stop)


def stop_earlier(control: Control, folder: RunFolder) -> None:
    """Stop a run that still writes into the folder, whose follower was killed."""
    said: dict[str, Any] | None = folder.read_json(DEPLOYMENT)
    if said is not None and int(said["run_id"]) in control.going():
        log.warning("run %s still goes on in this folder: it is stopped", said["run_id"])
        control.stop(int(said["run_id"]))


def _leave_a_model(scenario: Scenario, task: Task, folder: RunFolder) -> None:
    """Write the model after the last complete round, which a stopped ServerApp has left in its checkpoint alone."""
    with suppress(FedsparseError), unconducted(folder.path, PATIENCE_S):
        pass  # it ends: then there is no later checkpoint; or it does not, as with a server that is away
    with suppress(FedsparseError):
        checkpoint = Checkpoint.load(folder.path)
        average = IterateAverage(scenario.evaluation.iterate_average, scenario.train.local_steps or 1)
        if checkpoint is not None:
            average.load_state_dict(checkpoint.average, checkpoint.model)
        folder.write_model(average.arrays() if checkpoint is not None else task.arrays)


def _run_config(
    scenario: Scenario, folder: RunFolder, command: str, checkpoint: Checkpoint | None
) -> dict[str, str | bool]:
    return {
        "scenario": to_toml(scenario),
        "out": str(folder.path.absolute()),
        "memory-dir": "",
        "command": command,
        "deployment": True,
        "resume": checkpoint is not None,
    }


def _follow(control: Control, run_id: int, follower: Follower, attendance: Attendance) -> tuple[str, str]:
    """Wait for the end; return how it ended in Flower's words, and the details."""
    away, done = False, follower.told
    while True:
        follower.look()
        try:
            run = control.runs()[run_id]
            if away:
                log.warning("the SuperLink is back")
            away = False
            attendance.look(control, follower.told > done)
        except RunError as error:
            if not away:
                log.warning("%s; the run goes on when it is back", str(error).rstrip("."))
            away = True
            time.sleep(2 * FOLLOW_EVERY_S)
            continue
        except KeyError:
            return "vanished", "the SuperLink does not know it any more (was its database deleted?)"
        if run.status.status == "finished":
            return run.status.sub_status, run.status.details
        time.sleep(FOLLOW_EVERY_S)


def check_federation(scenario: Scenario) -> None:
    """Check what a run on a federation needs, without touching the network.

    Raises
    ------
    ConfigError
        No federation named, one that is not there, or one with too few nodes.
    """
    if scenario.engine.federation is None:
        raise ConfigError(
            "engine.name = 'deployment' needs the folder of a federation: say --federation DIR (made by `fedsparse "
            "deploy init DIR --host NAME`)."
        )
    federation = Federation.open(Path(scenario.engine.federation))
    if (there := len(federation.file.nodes)) < scenario.data.num_clients:
        raise ConfigError(
            f"data.num_clients = {scenario.data.num_clients}, but the federation {federation.file.name!r} has {there} "
            f"nodes: set data.num_clients, or add nodes with `fedsparse deploy add {shell(federation.path)}`."
        )
