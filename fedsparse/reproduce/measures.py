"""What is measured of a run, read from its rounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import Any

import numpy as np

from fedsparse.compare.results import Comparison, Run, Variant

Measure = Callable[[Run], float | None]
Lines = Sequence[dict[str, Any]]

TAIL = 0.1


@dataclass(frozen=True)
class Point:
    """The training loss after a round, and what had been sent until then."""

    round: int
    bytes: float
    formula_bytes: float
    loss: float


def curve(run: Run) -> list[Point]:
    """Return the points of a run whose loss (the regularised one over all training examples) was measured.

    A loss that is not finite counts as infinite: training has diverged.
    """
    points, sent, formula = [], 0.0, 0.0
    for line in run.lines:
        sent += line["uplink_bytes"]
        formula += line["uplink_frame_bits_formula"] / 8
        if line.get("eval_accuracy") is not None:
            loss = line.get("objective")
            points.append(Point(line["round"], sent, formula, float("inf") if loss is None else loss))
    return points


def final_loss(run: Run) -> float | None:
    """Return the mean of the loss over the last tenth of the rounds: single stochastic iterates are noisy."""
    points = curve(run)
    last = [point.loss for point in points if point.round > (1 - TAIL) * run.summary.rounds]
    return float(np.mean(last)) if last else None


def loss_at(run: Run, spent: float, *, formula: bool = False) -> float | None:
    """Return the loss at `spent` uplink bytes, the mean over the last tenth of them; None before the first point.

    A mean, because single stochastic iterates are noisy. Between two measurements the loss is taken as a straight line;
    what was measured beyond `spent` is not used otherwise.
    """
    points = [(point.formula_bytes if formula else point.bytes, point.loss) for point in curve(run)]
    if not points or spent < points[0][0]:
        return None
    bytes_, losses = zip(*points, strict=True)
    last = [loss for sent, loss in points if (1 - TAIL) * spent < sent < spent]
    return float(np.mean([*last, np.interp(spent, bytes_, losses)]))


def loss_after(run: Run, rounds: int) -> float | None:
    """Return the loss after a number of rounds, None where it was not measured then."""
    return next((point.loss for point in curve(run) if point.round == rounds), None)


def total_bytes(run: Run, *, formula: bool = False) -> float:
    """Return all uplink bytes, of real frames or by the papers' formula."""
    if formula:
        return float(sum(line["uplink_frame_bits_formula"] for line in run.lines)) / 8
    return float(sum(line["uplink_bytes"] for line in run.lines))


def total_error(run: Run) -> float | None:
    """Return the sum over the rounds of the mean squared norm of the error memories."""
    return run.lines[-1].get("total_error") if run.lines else None


def bytes_to(run: Run, loss: float, *, formula: bool = False) -> float | None:
    """Return uplink bytes up to the first measurement at or below `loss`; None where none is."""
    reached = next((point for point in curve(run) if point.loss <= loss), None)
    if reached is None:
        return None
    return reached.formula_bytes if formula else reached.bytes


def memory_squares(run: Run) -> list[tuple[int, float]]:
    """Return (round, mean squared norm of the error memories) of each round."""
    squares, before = [], 0.0
    for line in run.lines:
        total = line.get("total_error")
        if total is not None:
            squares.append((line["round"], total - before))
            before = total
    return squares


def exponent(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the slope of log y over log x, by least squares: p of ``y ~ x^p``."""
    pairs = [(log(a), log(b)) for a, b in zip(x, y, strict=True) if a > 0 and b > 0]
    if len(pairs) < 2:
        return None
    return float(np.polyfit([a for a, _ in pairs], [b for _, b in pairs], 1)[0])


def variant(comparison: Comparison, name: str) -> Variant:
    """Return the variant of that name.

    Raises
    ------
    KeyError
        A scenario and a claim that do not fit together.
    """
    return next((found for found in comparison.variants if found.name == name), None) or _no(comparison, name)


def _no(comparison: Comparison, name: str) -> Variant:
    raise KeyError(f"{comparison.scenario.name} has no variant {name!r}")


def each(comparison: Comparison, name: str, measure: Measure) -> list[float | None]:
    """Return a measure for each seed, None where the run is missing or not complete."""
    runs = variant(comparison, name).runs
    return [measure(run) if run is not None and run.completed else None for run in runs]


def known(values: Sequence[float | None]) -> list[float]:
    """Return the values that are there and finite."""
    return [value for value in values if value is not None and isfinite(value)]


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values."""
    return exp(sum(log(value) for value in values) / len(values))


def settled_memory(run: Run, part: tuple[float, float] = (1 - TAIL, 1.0)) -> float:
    """Return the mean squared norm of the error memories over a part of the rounds, the last tenth by default."""
    low, high = (share * run.summary.rounds for share in part)
    return float(np.mean([square for number, square in memory_squares(run) if low < number <= high]))
