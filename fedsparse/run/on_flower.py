"""Run a scenario on Flower's own engine and follow it from outside."""

from pathlib import Path
from typing import Any

from fedsparse.errors import RunError
from fedsparse.run import environment
from fedsparse.run.conduct import Listener, RoundDone, Started
from fedsparse.run.folder import SUMMARY, RunFolder
from fedsparse.run.lock import unconducted
from fedsparse.run.summary import Summary, summarise
from fedsparse.run.task import Task
from fedsparse.scenario import Scenario, to_toml


class Follower:
    """Follows a run that a ServerApp conducts in another process, by the files that it writes.

    Parameters
    ----------
    scenario, task, folder, on_event, command
        As in `conduct`.
    rounds : int
        Rounds that were done before.
    """

    def __init__(
        self,
        scenario: Scenario,
        task: Task,
        folder: RunFolder,
        on_event: Listener | None,
        command: str,
        rounds: int = 0,
    ) -> None:
        self._scenario, self._folder, self._on_event = scenario, folder, on_event
        self.told = rounds  # how many have been told of
        accuracy = task.evaluate(task.arrays)[1]
        self._facts: dict[str, Any] = {"num_parameters": task.num_parameters, "initial_accuracy": accuracy}
        self._facts |= {"started": environment.now(), "command": command}
        if on_event is not None:
            spent = sum(line["uplink_bytes"] for line in folder.rounds()[:rounds])
            on_event(Started(scenario, task.num_parameters, accuracy, rounds, spent))

    def look(self) -> None:
        """Tell of the rounds that are done since."""
        for line in self._folder.rounds()[self.told :]:
            self.told += 1
            if line["accepted"] and self._on_event is not None:
                self._on_event(RoundDone(self._scenario, line))

    def back_to(self, rounds: int) -> None:
        """Expect the rounds after that one anew."""
        self.told = min(self.told, rounds)

    def result(self) -> Summary:
        """Return what the ServerApp wrote down in the end."""
        self.look()
        return Summary.from_json(self._folder.read_json(SUMMARY))

    def conclude(self, status: str, error: RunError | None = None) -> Summary:
        """Write the summary that the ServerApp could not write; its own word on an error is the clearer one."""
        said = self._folder.read_json(SUMMARY)
        if said is not None and said["status"] == status:
            return Summary.from_json(said)
        facts = self._facts | {"machine": environment.machine(), "versions": environment.versions()}
        text = str(error) if error is not None else None
        summary = summarise(self._scenario, self._folder.rounds(), status, error=text, **facts)
        self._folder.write_json(SUMMARY, summary.to_json())
        return summary


def run_on_flower(
    scenario: Scenario, out: Path, on_event: Listener | None, verbose: bool, overwrite: bool, command: str
) -> Summary:
    """Let `flwr run` do what `conduct` does; the ServerApp writes the folder."""
    from fedsparse.engine import run_with_flower

    task = Task(scenario)  # the user's own data and model fail here, with a clear message
    with unconducted(out):
        folder = RunFolder.create(out, scenario, overwrite=overwrite)
    follower = Follower(scenario, task, folder, on_event, command)

    def on_line(text: str) -> None:
        if verbose:
            print(text)
        follower.look()

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
        follower.conclude("interrupted")
        raise
    except RunError as error:
        raise RunError(follower.conclude("failed", error).error) from error
    return follower.result()
