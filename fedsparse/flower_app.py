"""The ServerApp for Flower's own commands: `flwr run .`, the Simulation Engine, a SuperLink with SuperNodes."""

import os
import shlex
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsparse.engine.deployed_grid import DeployedGrid
from fedsparse.errors import ConfigError
from fedsparse.run import RoundDone, RunFolder, Started
from fedsparse.run.checkpoint import Checkpoint
from fedsparse.run.conduct import conduct, run_name
from fedsparse.run.folder import ROUNDS, SCENARIO
from fedsparse.run.lock import unconducted
from fedsparse.run.resume import find
from fedsparse.run.task import Task
from fedsparse.scenario import Scenario, apply_overrides, from_toml, load, shipped, validate_deep

PATIENCE_S = 60.0

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the scenario of the run config.

    Its keys: ``scenario`` (a file, the name of one that comes with fedsparse, or its text), ``overrides`` (like
    ``"rounds=3 train.lr=0.1"``), ``out`` (the folder of the run; default ``runs/NAME-RUN_ID`` where this process runs),
    ``command`` (for the record), ``deployment`` and ``resume`` (set by `fedsparse run --engine deployment`).
    """
    config, deployed = context.run_config, bool(context.run_config.get("deployment"))
    scenario = apply_overrides(_scenario(str(config["scenario"])), shlex.split(str(config.get("overrides", ""))))
    engine = "deployment" if deployed else "flower"
    scenario = apply_overrides(scenario.model_copy(update={"variant": ()}), [f"engine.name={engine}"])
    validate_deep(scenario)
    out = Path(str(config.get("out", "")) or f"runs/{scenario.name}-{context.run_id}").absolute()
    if deployed:
        _check_reached(out)
    with unconducted(out, PATIENCE_S):
        checkpoint = find(out, scenario, replace=False) if config.get("resume") else None
        if isinstance(checkpoint, Checkpoint):
            folder = RunFolder(out)
            folder.reopen(scenario, checkpoint.server_round)
            name = str(checkpoint.strategy["run"])
        else:
            folder, checkpoint = _folder(out, scenario), None
            name = run_name(scenario, out) if config.get("memory-dir") else f"{scenario.name}-{context.run_id}"
        print(f"the run folder is {out}", flush=True)
        conduct(
            scenario,
            Task(scenario),
            folder,
            DeployedGrid(grid) if deployed else grid,
            name,
            str(config.get("command") or f"flwr run . --run-config 'scenario=\"{scenario.name}\"'"),
            _tell,
            keep_model=not deployed,
            checkpoint=checkpoint,
        )


def _scenario(source: str) -> Scenario:
    if "\n" in source:
        return from_toml(source, "the run config's scenario")
    path = Path(source)
    # Inside Flower's app bundle the working directory is not the app's.
    beside = Path(__file__).parents[1] / path
    if not path.is_file() and path.stem in shipped() and not beside.is_file():
        return load(path.stem)
    return load(beside if beside.is_file() else path)


def _check_reached(out: Path) -> None:
    """Refuse to work where `fedsparse run` would never see it."""
    if not (os.path.isfile(out / SCENARIO) and os.access(out, os.W_OK)):
        raise ConfigError(
            f"the server cannot write into {out}, which `fedsparse run` has prepared: it runs as another user, in a "
            "container, or as a service with a /tmp and a /home of its own. Name a folder that both can write: --out."
        )


def _folder(out: Path, scenario: Scenario) -> RunFolder:
    """Go on in the folder that `fedsparse run` has prepared, or make one for `flwr run`."""
    if (out / SCENARIO).is_file() and (out / ROUNDS).is_file() and (out / ROUNDS).stat().st_size == 0:
        folder = RunFolder(out)
        if folder.scenario() != scenario:
            raise ConfigError(f"the output folder {out} was made for another scenario: choose another.")
        return folder
    return RunFolder.create(out, scenario)


def _tell(event: Started | RoundDone) -> None:
    """Say how it goes, where Flower's log shows it."""
    if isinstance(event, RoundDone):
        line = event.line
        accuracy = "" if line["eval_accuracy"] is None else f"accuracy {line['eval_accuracy']:.4f}, "
        text = f"round {line['round']} of {event.scenario.rounds}: {accuracy}uplink {line['uplink_bytes']} bytes"
        print(text, flush=True)
