"""Find out whether a folder holds a run that can go on."""

import logging
from pathlib import Path
from typing import Any

from fedsparse.errors import ConfigError, RunError
from fedsparse.run.checkpoint import Checkpoint
from fedsparse.run.folder import ROUNDS, SUMMARY, RunFolder
from fedsparse.run.summary import Summary
from fedsparse.scenario import Scenario, from_toml

log = logging.getLogger(__name__)

_FREE = ("engine.", "description", "seeds")  # what does not change a run's results


def find(out: Path, scenario: Scenario, *, replace: bool) -> Checkpoint | Summary | None:
    """Return where a run of this scenario can go on, its summary if it is complete, or None if it must begin anew.

    Raises
    ------
    ConfigError
        The folder holds a run of another scenario, and that is not to be replaced.
    RunError
        The checkpoint is damaged.
    """
    folder = RunFolder(out)
    try:
        _check_same(folder, scenario)
    except ConfigError:
        if replace:
            return None
        raise
    summary = folder.read_json(SUMMARY)
    if summary is not None and summary.get("status") == "completed":
        return Summary.from_json(summary)
    try:
        checkpoint = Checkpoint.load(out)
        if checkpoint is not None:
            _check_fit(checkpoint, scenario, folder)
        elif lost := len(folder.rounds()):
            log.warning("%s has no checkpoint: the run begins anew, its %d rounds are given up", out, lost)
        return checkpoint
    except RunError as error:
        if not replace:
            raise
        log.warning("%s", error)
        return None


def _check_same(folder: RunFolder, scenario: Scenario) -> None:
    before = folder.scenario()
    if before.variant or any(folder.path.glob("*/seed-*")):
        raise ConfigError(
            f"{folder.path} holds a comparison, not a run: `fedsparse compare` goes on with it; choose another --out."
        )
    if changed := differences(before, scenario):
        raise ConfigError(
            f"the run in {folder.path} cannot be resumed with other settings: {'; '.join(changed[:4])}. Resume it with "
            "its own, or start over with --overwrite."
        )


def _check_fit(checkpoint: Checkpoint, scenario: Scenario, folder: RunFolder) -> None:
    try:
        strange = bool(differences(from_toml(checkpoint.scenario, "the checkpoint"), scenario))
    except ConfigError:
        strange = True
    if strange:
        raise RunError(f"the checkpoint in {folder.path} is of another run: start over with --overwrite.")
    rounds = [line["round"] for line in folder.rounds() if line["round"] <= checkpoint.server_round]
    if rounds != list(range(1, checkpoint.server_round + 1)):
        raise RunError(f"{folder.path / ROUNDS} lacks rounds that were run: start over with --overwrite.")


def differences(before: Scenario, now: Scenario) -> list[str]:
    """Say in which keys two scenarios differ that a run's results depend on."""
    old, new = _flat(before), _flat(now)
    return [
        f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and not key.startswith(_FREE)
    ]


def _flat(scenario: Scenario) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in scenario.model_dump(exclude={"variant"}).items():
        flat |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat
