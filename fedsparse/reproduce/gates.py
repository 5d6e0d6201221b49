"""How a verdict is reached: on means over paired seeds and their confidence intervals, never on one run.

Each gate can say that a claim does not hold. Where runs are missing it says "not comparable".
"""

from collections.abc import Sequence
from math import exp, isfinite, log

from fedsparse.compare.results import Comparison
from fedsparse.compare.statistics import CONFIDENCE, Interval, interval, paired
from fedsparse.compare.table import digits
from fedsparse.reproduce.claims import Outcome, Pair, Verdict

Values = Sequence[float | None]
LEAST_SEEDS = 2


def lower(comparison: Comparison, what: str, names: tuple[str, str], values: tuple[Values, Values]) -> Verdict:
    """Judge "the first is lower than the second": holds where the interval of the paired difference is below zero."""
    first, second = values
    if (missing := incomplete(names, values)) is not None:
        return missing
    if (diverged := _diverged(names, values)) is not None:
        return diverged
    difference, base = paired(first, second), interval(_numbers(second))
    assert difference is not None
    assert base is not None
    pairs = list(zip(comparison.seeds, _numbers(first), _numbers(second), strict=True))
    losing = tuple(Pair(f"{names[0]} against {names[1]}", seed, a, b) for seed, a, b in pairs if a >= b)
    won = len(pairs) - len(losing)
    ours = (
        f"{what}: {names[0]} {show(interval(_numbers(first)))}, {names[1]} {show(base)}; paired difference "
        f"{show(difference, sign=True)}; lower in {won} of {len(pairs)} pairs"
    )
    if difference.excludes_zero and difference.mean < 0:
        outcome, reason = Outcome.HOLDS, f"the {CONFIDENCE:.0%} interval of the paired difference lies below zero."
    elif difference.excludes_zero:
        outcome, reason = Outcome.FAILS, f"{names[0]} is higher: the interval of the difference lies above zero."
    else:
        outcome = Outcome.FAILS
        reason = f"the interval of the paired difference contains zero: {len(pairs)} seeds do not show it."
    return Verdict(outcome, ours, reason, losing, {"difference": _json(difference), "won": won, "pairs": len(pairs)})


def matches(
    comparison: Comparison, what: str, names: tuple[str, str], values: tuple[Values, Values], margin: float
) -> Verdict:
    """Judge "the first ends no higher than the second by more than `margin`" (a fraction of the second).

    Holds where the whole interval of the paired relative difference lies below the margin.
    """
    first, second = values
    if (missing := incomplete(names, values)) is not None:
        return missing
    if (diverged := _diverged(names, values)) is not None:
        return diverged
    relative = [a / b - 1 for a, b in zip(_numbers(first), _numbers(second), strict=True)]
    found = interval(relative)
    assert found is not None
    ours = (
        f"{what}: {names[0]} {show(interval(_numbers(first)))}, {names[1]} {show(interval(_numbers(second)))}; "
        f"{percent(found)} apart"
    )
    bound = found.mean + (found.half or 0.0)
    pairs = zip(comparison.seeds, _numbers(first), _numbers(second), relative, strict=True)
    losing = tuple(Pair(f"{names[0]} against {names[1]}", seed, a, b) for seed, a, b, r in pairs if r > margin)
    holds = bound <= margin
    reason = f"the upper end of the interval is {100 * bound:+.2f} %, the margin {100 * margin:g} %."
    return Verdict(Outcome.HOLDS if holds else Outcome.FAILS, ours, reason, losing, {"relative": _json(found)})


def stays_above(
    comparison: Comparison, what: str, names: tuple[str, str], values: tuple[Values, Values], margin: float
) -> Verdict:
    """Judge "the first ends above the second by more than `margin`": the opposite of `matches`.

    Holds where the whole interval of the paired relative difference lies above the margin; where the first diverges in
    every run, too.
    """
    first, second = values
    if (missing := incomplete(names, values)) is not None:
        return missing
    if (diverged := _diverged((names[1], names[0]), (second, first))) is not None:
        return diverged
    relative = [a / b - 1 for a, b in zip(_numbers(first), _numbers(second), strict=True)]
    found = interval(relative)
    assert found is not None
    ours = (
        f"{what}: {names[0]} {show(interval(_numbers(first)))}, {names[1]} {show(interval(_numbers(second)))}; "
        f"{percent(found)} apart"
    )
    bound = found.mean - (found.half or 0.0)
    pairs = zip(comparison.seeds, _numbers(first), _numbers(second), relative, strict=True)
    losing = tuple(Pair(f"{names[0]} above {names[1]}", seed, a, b) for seed, a, b, r in pairs if r <= margin)
    reason = f"the lower end of the interval is {100 * bound:+.2f} %, the margin {100 * margin:g} %."
    holds = bound > margin
    return Verdict(Outcome.HOLDS if holds else Outcome.FAILS, ours, reason, losing, {"relative": _json(found)})


def fewer(
    what: str, names: tuple[str, str], values: tuple[Values, Values], at_least: float, limits: Values | None = None
) -> Verdict:
    """Judge "the first needs `at_least` times fewer than the second", by the geometric mean over paired seeds.

    Parameters
    ----------
    limits : sequence, optional
        What the second had spent in the end, for seeds where it did not get there: it needs more than that.
    """
    first, second = values
    if all(value is None for value in first):
        return Verdict(Outcome.FAILS, f"{what}: {names[0]} does not get there", "the target was not reached in time.")
    open_end = limits is not None and any(value is None for value in second)
    base = [limit if value is None else value for value, limit in zip(second, limits or second, strict=True)]
    if (missing := incomplete(names, (first, base))) is not None:
        return missing
    logs = [log(b / a) for a, b in zip(_numbers(first), _numbers(base), strict=True)]
    found = interval(logs)
    assert found is not None
    low, high = (exp(found.mean + sign * (found.half or 0.0)) for sign in (-1, 1))
    factor = f"{'more than ' if open_end else ''}{digits(exp(found.mean), 2)}"
    span = f"(interval {digits(low, 2)} to {digits(high, 2)})"
    ours = f"{what}: {names[0]} needs {factor} times fewer than {names[1]} {span}"
    holds = low >= at_least
    reason = f"the lower end of the interval is {digits(low, 2)}, wanted {at_least:g} or more."
    if open_end:
        reason += f" {names[1]} did not get there, so its bytes are those of the whole run, a lower bound."
        if not holds:
            return Verdict(Outcome.NOT_COMPARABLE, ours, reason, (), {"factor": exp(found.mean)})
    figures = {"factor": exp(found.mean), "low": low, "high": high, "lower_bound": open_end}
    return Verdict(Outcome.HOLDS if holds else Outcome.FAILS, ours, reason, (), figures)


def both(*verdicts: Verdict) -> Verdict:
    """Judge "all of these": the worst outcome counts, and every figure is shown."""
    order = [Outcome.HOLDS, Outcome.NOT_COMPARABLE, Outcome.FAILS]
    worst = max(verdicts, key=lambda verdict: order.index(verdict.outcome))
    reasons = [verdict.reason for verdict in verdicts if verdict.outcome is worst.outcome]
    return Verdict(
        worst.outcome,
        ". ".join(verdict.ours for verdict in verdicts),
        " ".join(reason[0].upper() + reason[1:] for reason in dict.fromkeys(reasons)),
        tuple(pair for verdict in verdicts for pair in verdict.losing),
        {str(number): verdict.figures for number, verdict in enumerate(verdicts)},
    )


def incomplete(names: tuple[str, ...], values: tuple[Values, ...]) -> Verdict | None:
    """Return the verdict where there are too few complete pairs to judge."""
    for name, column in zip(names, values, strict=True):
        lacking = sum(value is None for value in column)
        if lacking:
            text = f"{name}: {lacking} of {len(column)} runs have no such figure"
            return Verdict(Outcome.NOT_COMPARABLE, text, "not every seed has both values.")
        if len(column) < LEAST_SEEDS:
            return Verdict(Outcome.NOT_COMPARABLE, "one seed only", f"an interval needs {LEAST_SEEDS} seeds or more.")
    return None


def _diverged(names: tuple[str, str], values: tuple[Values, Values]) -> Verdict | None:
    """Where a run has diverged there is no mean: the first diverging fails the claim, the second alone proves it."""
    count = [sum(not isfinite(value) for value in _numbers(column)) for column in values]
    if not any(count):
        return None
    if count[0]:
        text = f"{names[0]} diverges in {count[0]} of {len(values[0])} runs"
        return Verdict(Outcome.FAILS, text, "a loss that is not finite has no mean.")
    text = f"{names[1]} diverges in {count[1]} of {len(values[1])} runs, {names[0]} in none"
    outcome = Outcome.HOLDS if count[1] == len(values[1]) else Outcome.NOT_COMPARABLE
    return Verdict(outcome, text, "the one diverges, the other does not.")


def _numbers(values: Values) -> list[float]:
    return [value for value in values if value is not None]


def show(value: Interval | None, *, sign: bool = False) -> str:
    """Write a mean with its interval."""
    if value is None:
        return "-"
    text = f"{value.mean:+.4g}" if sign else f"{value.mean:.4g}"
    return text if value.half is None else f"{text} ± {value.half:.2g}"


def percent(value: Interval) -> str:
    """Write a relative difference with its interval."""
    text = f"{100 * value.mean:+.2f}"
    return f"{text} %" if value.half is None else f"{text} ± {100 * value.half:.2f} %"


def _json(value: Interval) -> dict[str, float | int | None]:
    return {"mean": value.mean, "half": value.half, "n": value.n}
