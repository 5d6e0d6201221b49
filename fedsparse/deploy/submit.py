"""Flower's own commands against a federation's SuperLink: submit a run, show its log."""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedsparse.deploy.federation import Federation
from fedsparse.deploy.server import CONNECTION, server_environment
from fedsparse.engine.flower import write_app
from fedsparse.errors import RunError
from fedsparse.flower_programs import without_colours

SUBMIT_S = 300.0
_RUN_ID = re.compile(r"\b(\d{6,20})\b")


def submit(federation: Federation, config: dict[str, str | bool], apps: tuple[str, str]) -> int:
    """Submit a run of two installed apps, and return its id.

    Raises
    ------
    RunError
        The SuperLink did not take it.
    """
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


@contextmanager
def log_shown(federation: Federation, run_id: int, wanted: bool) -> Iterator[None]:
    """Show a run's log as it grows, if it is wanted."""
    if not wanted:
        yield
        return
    command = ["flwr", "log", str(run_id), CONNECTION, "--stream"]
    process = subprocess.Popen(command, env=_environment(federation), stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _flwr(federation: Federation, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command of Flower's against the federation's SuperLink; it is none of the server's own processes."""
    return subprocess.run(
        ["flwr", *arguments],
        env=_environment(federation),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        start_new_session=True,  # a Ctrl-C on the terminal is for us
        **options,
    )


def _environment(federation: Federation) -> dict[str, str]:
    return server_environment(federation) | {"FEDSPARSE_FEDERATION": ""}


def log_tail(federation: Federation, run_id: int) -> str:
    """Return the end of a run's log, with a heading, or nothing where there is none to be had."""
    try:
        process = _flwr(federation, "log", str(run_id), CONNECTION, "--show", stderr=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line for line in without_colours(process.stdout).splitlines() if line.strip()]
    return ("\nits log ends:\n" + "\n".join(lines[-15:])) if lines else ""
