"""Run a scenario on the real devices of a federation, and follow it from the server's machine."""

import json
import logging
import re
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsparse.deploy.control import Control
from fedsparse.deploy.federation import Federation
from fedsparse.deploy.server import CONNECTION, server_environment
from fedsparse.deploy.status import remember
from fedsparse.engine.flower import CLIENT_APP, SERVER_APP, write_app
from fedsparse.errors import ConfigError, RunError
from fedsparse.run.checkpoint import Checkpoint
from fedsparse.run.conduct import Listener
from fedsparse.run.folder import DEPLOYMENT, SUMMARY, RunFolder, is_ours
from fedsparse.run.on_flower import Follower
from fedsparse.run.resume import find
from fedsparse.run.signals import uninterrupted
from fedsparse.run.summary import Summary
from fedsparse.run.task import Task
from fedsparse.scenario import Scenario, to_toml

log = logging.getLogger(__name__)

FOLLOW_EVERY_S, SUBMIT_S = 0.5, 300.0
COMPLETED, FAILED = "completed", "failed"  # Flower's words
_RUN_ID = re.compile(r"\b(\d{6,20})\b")


def run_on_deployment(
    scenario: Scenario,
    out: Path,
    on_event: Listener | None,
    overwrite: bool,
    resume: bool,
    command: str,
    apps: tuple[str, str] = (SERVER_APP, CLIENT_APP),
) -> Summary:
    """Submit a run to a federation's SuperLink, and follow it until it is finished.

    Parameters
    ----------
    scenario, out, on_event, overwrite, resume, command
        As in `run_scenario`; ``engine.federation`` names the federation's folder.
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
    control.runs()  # fails where the server is away, before anything is written
    task = Task(scenario)
    folder, checkpoint = RunFolder(out), None
    if resume and is_ours(out):
        earlier = find(out, scenario, replace=overwrite)
        if stop_earlier(control, folder):
            earlier = find(out, scenario, replace=overwrite)
        if isinstance(earlier, Summary):
            return earlier
        checkpoint, overwrite = earlier, True
    elif overwrite and is_ours(out):
        stop_earlier(control, folder)
    if checkpoint is None:
        folder = RunFolder.create(out, scenario, overwrite=overwrite)
    follower = Follower(scenario, task, folder, on_event, command, checkpoint.server_round if checkpoint else 0)
    while True:
        run_id = None
        try:
            with uninterrupted():  # a run that is submitted and not written down could not be stopped
                run_id = _submit(federation, scenario, folder, command, checkpoint, apps)
                remember(federation, folder.path)
                folder.write_json(DEPLOYMENT, {"federation": str(federation.path), "run_id": run_id})
            ended, details = _follow(control, run_id, follower)
        except KeyboardInterrupt:
            if run_id is not None:
                with suppress(RunError):
                    control.stop(run_id)
            follower.conclude("interrupted")
            raise
        if ended == COMPLETED:
            return follower.result()
        checkpoint = _goes_on(out, folder, ended, checkpoint)
        if checkpoint is None:
            error = RunError(f"the run on the federation {ended}: {details}{_log_tail(federation, run_id)}")
            raise RunError(follower.conclude("failed", error).error) from error
        log.warning("the ServerApp was lost (%s): it goes on after round %d", details, checkpoint.server_round)
        follower.back_to(checkpoint.server_round)


def _goes_on(out: Path, folder: RunFolder, ended: str, before: Checkpoint | None) -> Checkpoint | None:
    """Return where a run can go on whose ServerApp was killed, or given up by Flower on a machine under heavy load.

    Not one that failed by itself, or that somebody stopped, nor one that has got no further since the last time.
    """
    said = folder.read_json(SUMMARY)
    if ended != FAILED or (said is not None and said["status"] == "failed"):
        return None
    checkpoint = Checkpoint.load(out)
    if checkpoint is None or (before is not None and checkpoint.server_round <= before.server_round):
        return None
    (out / SUMMARY).unlink(missing_ok=True)
    return checkpoint


def stop_earlier(control: Control, folder: RunFolder) -> bool:
    """Stop a run that still writes into the folder, whose follower was killed; return whether there was one."""
    said: dict[str, Any] | None = folder.read_json(DEPLOYMENT)
    run = control.runs().get(int(said["run_id"])) if said is not None else None
    if said is None or run is None or run.status.status == "finished":
        return False
    log.warning("run %s still goes on in this folder: it is stopped", said["run_id"])
    control.stop(int(said["run_id"]))
    time.sleep(3)  # its ServerApp notices with its next request
    return True


def _submit(
    federation: Federation,
    scenario: Scenario,
    folder: RunFolder,
    command: str,
    checkpoint: Checkpoint | None,
    apps: tuple[str, str],
) -> int:
    config = {
        "scenario": to_toml(scenario),
        "out": str(folder.path.absolute()),
        "memory-dir": "",
        "command": command,
        "deployment": True,
        "resume": checkpoint is not None,
    }
    with tempfile.TemporaryDirectory(prefix="fedsparse-app-") as app:
        write_app(Path(app), config, *apps)
        try:
            process = _flwr(
                federation, "run", app, CONNECTION, "--format", "json",
                cwd=app, stderr=subprocess.STDOUT, timeout=SUBMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:  # meanwhile nobody can interrupt us
            raise RunError(f"the SuperLink did not take the run within {SUBMIT_S:.0f} s: see its log.") from None
    text = process.stdout
    with suppress(ValueError, KeyError):
        return int(json.loads(text[text.index("{") : text.rindex("}") + 1])["run-id"])
    if process.returncode == 0 and (found := _RUN_ID.search(text)):
        return int(found[1])
    raise RunError(f"the SuperLink did not take the run:\n{text.strip()[-2000:]}")


def _follow(control: Control, run_id: int, follower: Follower) -> tuple[str, str]:
    """Wait for the end; return how it ended in Flower's words, and the details."""
    away = False
    while True:
        follower.look()
        try:
            run = control.runs()[run_id]
            if away:
                log.warning("the SuperLink is back")
            away = False
        except RunError as error:
            if not away:
                log.warning("%s; the run goes on when it is back", error)
            away = True
            time.sleep(2 * FOLLOW_EVERY_S)
            continue
        except KeyError:
            return "vanished", "the SuperLink does not know it any more (was its database deleted?)"
        if run.status.status == "finished":
            return run.status.sub_status, run.status.details
        time.sleep(FOLLOW_EVERY_S)


def _flwr(federation: Federation, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command of Flower's against the federation's SuperLink; it is none of the server's own processes."""
    environment = server_environment(federation) | {"FEDSPARSE_FEDERATION": ""}
    command = ["flwr", *arguments]
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        start_new_session=True,  # a Ctrl-C on the terminal is for us
        **options,
    )


def _log_tail(federation: Federation, run_id: int) -> str:
    try:
        process = _flwr(federation, "log", str(run_id), CONNECTION, "--show", stderr=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line for line in process.stdout.splitlines() if line.strip()]
    return ("\nits log ends:\n" + "\n".join(lines[-15:])) if lines else ""


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
            f"nodes: set data.num_clients, or add nodes with `fedsparse deploy add {federation.path}`."
        )
