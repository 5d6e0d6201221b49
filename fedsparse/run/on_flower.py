"""Run a scenario on Flower's own engine and follow it from outside."""

from pathlib import Path
from typing import Any

from fedsparse.errors import RunError
from fedsparse.run import environment
from fedsparse.run.conduct import Listener, RoundDone, Started
from fedsparse.run.folder import SUMMARY, RunFolder
from fedsparse.run.summary import Summary, summarise
from fedsparse.run.task import Task
from fedsparse.scenario import Scenario, to_toml


def run_on_flower(
    scenario: Scenario, out: Path, on_event: Listener | None, verbose: bool, overwrite: bool, command: str
) -> Summary:
    """Let `flwr run` do what `conduct` does; the ServerApp writes the folder."""
    from fedsparse.engine import run_with_flower

    task = Task(scenario)  # the user's own data and model fail here, with a clear message
    folder = RunFolder.create(out, scenario, overwrite=overwrite)
    told: list[dict[str, Any]] = []
    facts: dict[str, Any] = {"num_parameters": task.num_parameters, "started": environment.now(), "command": command}
    facts["initial_accuracy"] = task.evaluate(task.arrays)[1]
    if on_event is not None:
        on_event(Started(scenario, task.num_parameters, facts["initial_accuracy"]))

    def on_line(text: str) -> None:
        if verbose:
            print(text)
        if on_event is None:
            return
        for line in folder.rounds()[len(told) :]:
            told.append(line)
            if line["accepted"]:
                on_event(RoundDone(scenario, line))

    engine = scenario.engine
    try:
        run_with_flower(
            to_toml(scenario),
            out=folder.path,
            num_clients=scenario.data.num_clients,
            client_cpus=engine.num_cpus,
            client_gpus=engine.num_gpus,
            num_cpus=int(engine.max_workers * engine.num_cpus) if engine.max_workers is not None else None,
            memory_dir=folder.memory,
            run_config={"command": command},
            on_line=on_line,
        )
    except KeyboardInterrupt:
        _conclude(scenario, folder, "interrupted", None, facts)
        raise
    except RunError as error:
        summary = _conclude(scenario, folder, "failed", error, facts)
        raise RunError(summary.error) from error
    on_line("")
    return Summary.from_json(folder.read_json(SUMMARY))


def _conclude(
    scenario: Scenario, folder: RunFolder, status: str, error: RunError | None, facts: dict[str, Any]
) -> Summary:
    """Write the summary that the ServerApp could not write; its own word on an error is the clearer one."""
    said = folder.read_json(SUMMARY)
    if said is not None and said["status"] == status:
        return Summary.from_json(said)
    facts = facts | {"machine": environment.machine(), "versions": environment.versions()}
    text = str(error) if error is not None else None
    summary = summarise(scenario, folder.rounds(), status, error=text, **facts)
    folder.write_json(SUMMARY, summary.to_json())
    return summary
