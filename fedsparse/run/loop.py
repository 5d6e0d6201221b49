"""The round loop: configure, send, aggregate, evaluate, write down."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedsparse.errors import AllClientsFailed
from fedsparse.protocol import JOB_KEY
from fedsparse.run.checkpoint import Checkpoint
from fedsparse.run.folder import RunFolder
from fedsparse.run.iterates import IterateAverage
from fedsparse.run.signals import uninterrupted
from fedsparse.run.task import Task
from fedsparse.scenario import Scenario, to_toml
from fedsparse.scenario.checks import build_inner
from fedsparse.scenario.fleet import make_conditions
from strategies import CompressedStrategy, RoundReport
from strategies.inner_state import capture, forgotten, restore

log = logging.getLogger(__name__)

SIMULATED_WAIT_S = 600.0  # for clients that another process starts; real devices come when they come
# Keys of every line that this loop may not know, or not in every round.
_UNKNOWN: dict[str, Any] = {"eval_loss": None, "eval_accuracy": None, "objective": None}


def make_strategy(scenario: Scenario, task: Task, run: str) -> CompressedStrategy:
    """Build the strategy of a scenario."""
    from clients.schedules import make_schedule

    schedule, steps = make_schedule(scenario.train.lr_schedule), task.mean_steps
    return CompressedStrategy(
        build_inner(scenario),
        scenario.compression.uplink,
        seed=scenario.seed,
        clients_per_round=scenario.train.clients_per_round,
        num_clients=scenario.data.num_clients,
        min_clients=scenario.engine.min_clients,
        weighting=scenario.strategy.weighting,
        error_memory=scenario.compression.error_memory,
        momentum_correction=scenario.compression.momentum_correction,
        memory_dtype=scenario.compression.memory_dtype,
        max_update_norm=scenario.strategy.max_update_norm,
        frozen=task.frozen,
        run=run,
        rounds=scenario.rounds,
        wait_timeout=math.inf if scenario.engine.name == "deployment" else SIMULATED_WAIT_S,
        conditions=make_conditions(scenario, task.flop_per_step, steps) if scenario.devices.mix else None,
        step_size=lambda server_round: schedule.multiplier(server_round, scenario.rounds, 0, steps),
    )


class Training:
    """One training from its first round to its last.

    `arrays` is the model after the last complete round, or the average of the models so far where the scenario asks
    for one.

    Parameters
    ----------
    scenario, task, folder
        What to run, on what, and where it is written down.
    run : str
        Names the clients' error memories.
    checkpoint : Checkpoint, optional
        Go on from there.
    """

    def __init__(
        self, scenario: Scenario, task: Task, folder: RunFolder, run: str, checkpoint: Checkpoint | None = None
    ) -> None:
        self.scenario, self.task, self.folder = scenario, task, folder
        self.strategy = make_strategy(scenario, task, run)
        self.average = IterateAverage(scenario.evaluation.iterate_average, scenario.train.local_steps or 1)
        self.arrays: dict[str, NDArray[Any]] = task.arrays
        self.lines: list[dict[str, Any]] = []
        self.done, self._earlier_s, self._began = 0, 0.0, time.monotonic()
        self._durable = scenario.engine.name == "deployment"  # hours of real devices: not lost with the server's power
        self._model, self._contexts = task.arrays, dict[int, bytes]()
        facts = {"input_shape": task.dataset.input_shape, "num_classes": task.dataset.num_classes}
        self._job, self._scenario_text = scenario.job(**facts), to_toml(scenario)
        if checkpoint is not None:
            self._go_on(checkpoint)

    @property
    def wall_s(self) -> float:
        """Seconds that the training has taken, before and after it was resumed."""
        return round(self._earlier_s + time.monotonic() - self._began, 3)

    def _go_on(self, checkpoint: Checkpoint) -> None:
        self.strategy.load_state_dict(checkpoint.strategy)
        restore(self.strategy.inner, checkpoint.inner, checkpoint.inner_arrays)
        self.average.load_state_dict(checkpoint.average, checkpoint.model)
        self.done, self._earlier_s = checkpoint.server_round, checkpoint.wall_s
        self._model, self._contexts = checkpoint.model, checkpoint.contexts
        self.arrays, self.lines = self.average.arrays(), self.folder.rounds()
        for name in forgotten(self.strategy.inner):
            log.warning("%s.%s is in no checkpoint: it begins anew", type(self.strategy.inner).__name__, name)

    def _checkpoint(self, model: dict[str, NDArray[Any]], grid: Grid) -> None:
        inner, arrays = capture(self.strategy.inner)
        Checkpoint(
            server_round=self.done,
            wall_s=self.wall_s,
            scenario=self._scenario_text,
            strategy=self.strategy.state_dict(),
            inner=inner,
            model=model,
            inner_arrays=arrays,
            average=self.average.state_dict(),
            contexts=getattr(grid, "states", {}),
        ).save(self.folder.path, durable=self._durable)

    def rounds(self, grid: Grid, on_line: Callable[[dict[str, Any]], None], *, checkpoints: bool = True) -> None:
        """Run all rounds that are left; after each, write what is needed to go on after it.

        Raises
        ------
        AllClientsFailed
            After the round has been written down.
        """
        record = ArrayRecord({name: Array(array) for name, array in self._model.items()})
        if self._contexts:
            grid.states.update(self._contexts)  # type: ignore[attr-defined]
        for server_round in range(self.done + 1, self.scenario.rounds + 1):
            began = time.monotonic()
            try:
                record = self._train(server_round, record, grid)
            except AllClientsFailed:
                if self.strategy.last_round is not None:
                    self._write(self.strategy.last_round, began)
                raise
            model = {name: array.numpy() for name, array in record.items()}
            self.average.add(model, server_round)
            arrays = self.average.arrays()
            figures = self._evaluate(server_round, arrays)
            assert self.strategy.last_round is not None
            with uninterrupted():
                line = self._write(self.strategy.last_round, began, **figures)
                self.arrays, self.done = arrays, server_round
                if checkpoints and server_round < self.scenario.rounds:
                    self._checkpoint(model, grid)
            on_line(line)

    def _evaluate(self, server_round: int, arrays: dict[str, NDArray[Any]]) -> dict[str, float]:
        wanted = self.scenario.evaluation
        if server_round % wanted.every and server_round != self.scenario.rounds:
            return {}
        loss, accuracy = self.task.evaluate(arrays)
        figures = {"eval_loss": loss, "eval_accuracy": accuracy}
        if wanted.objective:
            figures["objective"] = self.task.objective(arrays)
        return figures

    def _train(self, server_round: int, record: ArrayRecord, grid: Grid) -> ArrayRecord:
        config = ConfigRecord({JOB_KEY: self._job})
        messages = self.strategy.configure_train(server_round, record, config, grid)
        replies = grid.send_and_receive(messages, timeout=self.scenario.engine.timeout)
        aggregated, _ = self.strategy.aggregate_train(server_round, replies)
        return record if aggregated is None else aggregated

    def _write(self, report: RoundReport, began: float, **evaluation: float) -> dict[str, Any]:
        values = report.to_json()
        line = {"round": values.pop("round"), "wall_s": round(time.monotonic() - began, 6)}
        line |= _UNKNOWN | values | evaluation
        self.folder.add_round(line, durable=self._durable)
        self.lines.append(line)
        return line
