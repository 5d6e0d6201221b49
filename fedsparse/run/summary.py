"""What a run comes to: numbers that follow from its rounds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from fedsparse.scenario import Scenario

Rounds = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Summary:
    """The result of one run; None means not known.

    Parameters
    ----------
    name, seed, engine : str, int, str
        Which run.
    status : str
        ``"completed"``, ``"interrupted"`` or ``"failed"``; `error` says why it failed.
    rounds, rounds_completed : int
        Asked for, and done.
    num_parameters : int
        Numbers in the model, buffers included.
    initial_accuracy, final_accuracy, best_accuracy, final_loss : float
        On the test set, before the first round, after the last one, and at best (in `best_round`).
    final_objective : float
        The regularised loss over all training examples, where the scenario asks for it.
    total_error : float
        Sum over the rounds of the mean squared norm of the error memories.
    uplink_bytes, downlink_bytes : int
        Payload bytes of all rounds, counted on what was really sent.
    dense_bytes : int
        What the accepted updates would have taken uncompressed; `compression_ratio` is that over `uplink_bytes`.
    formula_bytes : float
        What the papers' formulas would count for the same updates.
    target_accuracy : float
        Of the scenario; `rounds_to_target` and `uplink_bytes_to_target` up to the first round that reached it.
    virtual_s, virtual_s_to_target : float
        With simulated devices: the virtual clock at the end, and when the target was first reached.
    client_failures : int
        Failed client-rounds, late ones and those that dropped out included.
    memory_resets : int
        Error memories that were damaged or gone, and restarted from zero.
    """

    name: str
    seed: int
    engine: str
    status: str
    rounds: int
    rounds_completed: int
    error: str | None = None
    num_parameters: int | None = None
    initial_accuracy: float | None = None
    final_accuracy: float | None = None
    final_loss: float | None = None
    best_accuracy: float | None = None
    best_round: int | None = None
    final_objective: float | None = None
    train_loss: float | None = None
    total_error: float | None = None
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    dense_bytes: int = 0
    formula_bytes: float = 0.0
    compression_ratio: float | None = None
    target_accuracy: float | None = None
    rounds_to_target: int | None = None
    uplink_bytes_to_target: int | None = None
    virtual_s: float | None = None
    virtual_s_to_target: float | None = None
    client_failures: int = 0
    memory_resets: int = 0
    wall_s: float | None = None
    started: str | None = None
    command: str | None = None
    machine: str | None = None
    versions: dict[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read what `to_json` wrote; unknown keys are left out."""
        known = {entry.name for entry in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


def summarise(scenario: Scenario, lines: Rounds, status: str, **facts: Any) -> Summary:
    """Add up the rounds of a run.

    Parameters
    ----------
    scenario : Scenario
        What was run.
    lines : sequence of dict
        The lines of rounds.jsonl.
    status : str
        How it ended.
    **facts
        More fields of `Summary`.
    """
    evaluated = [line for line in lines if line.get("eval_accuracy") is not None]
    best = max(evaluated, key=lambda line: line["eval_accuracy"], default=None)
    last = evaluated[-1] if evaluated else None
    uplink, dense = _total(lines, "uplink_bytes"), _total(lines, "dense_bytes")
    reached = first_reaching(lines, scenario.target_accuracy)
    return Summary(
        name=scenario.name,
        seed=scenario.seed,
        engine=scenario.engine.name,
        status=status,
        rounds=scenario.rounds,
        rounds_completed=sum(bool(line["accepted"]) for line in lines),
        final_accuracy=last["eval_accuracy"] if last else None,
        final_loss=last["eval_loss"] if last else None,
        final_objective=last.get("objective") if last else None,
        best_accuracy=best["eval_accuracy"] if best else None,
        best_round=best["round"] if best else None,
        train_loss=lines[-1]["train_loss"] if lines else None,
        total_error=lines[-1].get("total_error") if lines else None,
        uplink_bytes=int(uplink),
        downlink_bytes=int(_total(lines, "downlink_bytes")),
        dense_bytes=int(dense),
        formula_bytes=_total(lines, "uplink_frame_bits_formula") / 8,
        compression_ratio=dense / uplink if uplink else None,
        target_accuracy=scenario.target_accuracy,
        rounds_to_target=reached[0] if reached else None,
        uplink_bytes_to_target=reached[1] if reached else None,
        virtual_s=lines[-1].get("virtual_s") if lines else None,
        virtual_s_to_target=virtual_time_to(lines, scenario.target_accuracy),
        client_failures=sum(len(line["failed"]) for line in lines),
        memory_resets=sum(line.get("memory_resets", 0) for line in lines),
        **facts,
    )


def first_reaching(lines: Rounds, accuracy: float | None) -> tuple[int, int] | None:
    """Return the first round whose test accuracy is at least `accuracy`, and all uplink bytes up to it."""
    spent = 0
    for line in lines:
        spent += line["uplink_bytes"]
        reached = line.get("eval_accuracy")
        if accuracy is not None and reached is not None and reached >= accuracy:
            return line["round"], spent
    return None


def virtual_time_to(lines: Rounds, accuracy: float | None) -> float | None:
    """Return the virtual clock after the first round whose test accuracy is at least `accuracy`."""
    reached = first_reaching(lines, accuracy)
    line = next((line for line in lines if reached and line["round"] == reached[0]), None)
    return None if line is None else line.get("virtual_s")


def _total(lines: Rounds, key: str) -> float:
    return sum(line[key] or 0 for line in lines)
