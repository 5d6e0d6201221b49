"""What a comparison found, in a few plain sentences."""

from fedsparse.compare.results import Comparison, Run, Variant
from fedsparse.compare.statistics import CONFIDENCE, Interval
from fedsparse.compare.table import digits, megabytes, percent, times


def findings(comparison: Comparison) -> list[str]:
    """Return the sentences, the most important first."""
    done = [variant for variant in comparison.variants if variant.done]
    if not done:
        return ["No run is complete yet, so there is nothing to compare.", *_troubles(comparison)]
    if len(comparison.variants) == 1:
        return [_single(comparison, done[0]), *_troubles(comparison)]
    sentences = [_savings(comparison), _accuracies(comparison)]
    if len(comparison.seeds) == 1:
        sentences.append("One seed only: how far a difference is chance cannot be said.")
    return [sentence for sentence in sentences if sentence] + _troubles(comparison)


def _single(comparison: Comparison, variant: Variant) -> str:
    text = (
        f"After {_rounds(comparison)}, the model classified {percent(variant.accuracy)} % of the test set correctly, "
    )
    text += f"for {megabytes(variant.mean('uplink_bytes'))} MB of uplink"
    ratio = variant.compression_ratio
    if ratio is not None and ratio > 1.01:
        text += f", {times(ratio)} less than the same updates uncompressed"
    return text + "."


def _savings(comparison: Comparison) -> str:
    """Say who needed the fewest uplink bytes to the target."""
    first, target = comparison.first, comparison.target
    if target is None:
        return ""
    goal = f"{100 * target:.1f} % test accuracy"
    known = {variant.name: comparison.savings(variant) for variant in comparison.variants}
    best = max((v for v in comparison.variants if known[v.name]), key=lambda v: known[v.name] or 0.0, default=None)
    if best is None:
        whole = [v for v in comparison.variants if len(v.done) == len(comparison.seeds)]
        reached = [v.name for v in whole if all(v.reaching(target))]
        if not reached:
            return f"No variant reached {goal} with every seed."
        others = [v.name for v in comparison.variants if v.name not in reached]
        return f"{_list(reached)} reached {goal} with every seed" + (f", {_list(others)} did not." if others else ".")
    factor = known[best.name] or 1.0
    spent = [_mean_bytes(variant, target) for variant in (best, first)]
    seeds = f"geometric mean over {len(comparison.seeds)} paired seeds" if len(comparison.seeds) > 1 else "one seed"
    if factor < 1:
        return f"To {goal}, {first.name} needed the fewest uplink bytes: {megabytes(spent[1])} MB."
    return (
        f"To reach {goal}, {best.name} needed {digits(factor, 2)} times fewer uplink bytes than {first.name}: "
        f"{megabytes(spent[0])} MB instead of {megabytes(spent[1])} MB ({seeds})."
    )


def _accuracies(comparison: Comparison) -> str:
    """Say whose final accuracy differs from the first variant's by more than chance."""
    first = comparison.first
    worse: list[str] = []
    better: list[str] = []
    same: list[Variant] = []
    for variant in comparison.variants[1:]:
        difference = comparison.difference(variant)
        if difference is None or not variant.done:
            continue
        if not difference.excludes_zero:
            same.append(variant)
        elif difference.mean < 0:
            worse.append(f"{variant.name} {_range(difference)} points below")
        else:
            better.append(f"{variant.name} {_range(difference)} points above")
    parts = []
    if worse or better:
        parts.append(f"{_list([*better, *worse])} {first.name}")
    if same and len(comparison.seeds) > 1:
        parts.append(_no_difference(comparison, same))
    if not parts:
        return ""
    return f"After {_rounds(comparison)}: {'; '.join(parts)}."


def _no_difference(comparison: Comparison, same: list[Variant]) -> str:
    known = [comparison.difference(variant) for variant in same]
    largest = max(abs(difference.mean) for difference in known if difference is not None)
    names, verb = _list([variant.name for variant in same]), "ends" if len(same) == 1 else "end"
    return (
        f"{names} {verb} within {100 * largest:.1f} points of {comparison.first.name} on average, which "
        f"{len(comparison.seeds)} seeds cannot tell from chance"
    )


def _range(value: Interval) -> str:
    low, high = sorted(
        (100 * abs(abs(value.mean) - (value.half or 0.0)), 100 * (abs(value.mean) + (value.half or 0.0)))
    )
    return f"{100 * abs(value.mean):.1f} ({CONFIDENCE:.0%} interval {low:.1f} to {high:.1f})"


def _troubles(comparison: Comparison) -> list[str]:
    """Name runs that failed, and what was lost in runs that went on."""
    runs = [(variant, run) for variant in comparison.variants for run in variant.runs if run is not None]
    sentences = []
    for variant, run in runs:
        if run.summary.status == "failed":
            sentences.append(f"{variant.name}, seed {run.seed} failed: {run.summary.error}")
        elif run.summary.status == "interrupted":
            sentences.append(
                f"{variant.name}, seed {run.seed} was interrupted after {run.summary.rounds_completed} rounds."
            )
    lost = sum(run.summary.client_failures for _, run in runs)
    if lost:
        asked = sum(len(line["cohort"]) for _, run in runs for line in run.lines)
        what = "did not count (late, dropped out or failed)" if comparison.has_clock else "failed"
        first = _first(runs)
        sentences.append(f"{lost} of {asked} client-rounds {what}; rounds.jsonl names each with its reason.{first}")
    if resets := sum(run.summary.memory_resets for _, run in runs):
        sentences.append(
            f"Error memories that restarted from zero, since their files were damaged or gone: {resets}. What those "
            "clients had held back is lost."
        )
    return sentences


def _first(runs: list[tuple[Variant, Run]]) -> str:
    """Quote the first failure that has nothing to do with simulated time: somebody can act on it."""
    for variant, run in runs:
        for line in run.lines:
            for client, reason in line["failed"].items():
                if line.get("causes", {}).get(client) not in ("late", "dropped"):
                    where = f"{variant.name}, seed {run.seed}, round {line['round']}, client {client}"
                    return f" The first that failed: {where}: {reason}"
    return ""


def _mean_bytes(variant: Variant, target: float | None) -> float | None:
    reached = [entry[1] for entry in variant.reaching(target) if entry is not None]
    return sum(reached) / len(reached) if reached else None


def _rounds(comparison: Comparison) -> str:
    rounds = sorted({variant.scenario.rounds for variant in comparison.variants})
    return f"{rounds[0]} rounds" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds"


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
