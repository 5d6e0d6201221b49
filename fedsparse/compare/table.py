"""The table of a comparison, as texts: for the terminal, the report, and CSV."""

from collections.abc import Sequence
from math import floor, log10

from fedsparse.compare.results import Comparison, Variant
from fedsparse.compare.statistics import Interval

MB = 1e6


def header(comparison: Comparison) -> list[str]:
    """Return the column titles."""
    columns = ["variant", "accuracy %"]
    if len(comparison.variants) > 1:
        columns.append(f"difference to {comparison.first.name}")
    columns += ["uplink MB", "downlink MB", "compression"]
    if comparison.shows_target and comparison.target is not None:
        columns += [f"uplink MB to {100 * comparison.target:.1f} %", "rounds to it"]
    if comparison.has_clock:
        columns += ["virtual time"] + (["time to it"] if comparison.shows_target else [])
    return columns


def rows(comparison: Comparison) -> list[list[str]]:
    """Return one row of texts for each variant."""
    return [_row(comparison, variant) for variant in comparison.variants]


def _row(comparison: Comparison, variant: Variant) -> list[str]:
    cells = [variant.name, percent(variant.accuracy)]
    if len(comparison.variants) > 1:
        cells.append("" if variant is comparison.first else points(comparison.difference(variant)))
    cells += [megabytes(variant.mean("uplink_bytes")), megabytes(variant.mean("downlink_bytes"))]
    cells.append(times(variant.compression_ratio))
    if comparison.shows_target:
        cells += to_target(comparison, variant)
    if comparison.has_clock:
        cells.append(duration(variant.mean("virtual_s")))
        if comparison.shows_target:
            cells.append(duration(variant.virtual_time_to(comparison.target)))
    missing = len(comparison.seeds) - len(variant.done)
    if missing:
        cells[0] += f" ({missing} of {len(comparison.seeds)} runs missing or failed)"
    return cells


def to_target(comparison: Comparison, variant: Variant) -> list[str]:
    """Return uplink bytes and rounds to the target: means only where every run reached it."""
    reached = variant.reaching(comparison.target)
    found = [entry for entry in reached if entry is not None]
    if not reached:
        return ["-", "-"]
    if not found:
        return ["not reached", f"not in {comparison.scenario.rounds}"]
    if len(found) < len(reached):
        return [f"reached by {len(found)} of {len(reached)}"] * 2
    text = megabytes(sum(entry[1] for entry in found) / len(found))
    savings = comparison.savings(variant)
    if savings is not None:
        text += f" ({times(savings)} less)" if savings >= 1 else f" ({times(1 / savings)} more)"
    return [text, f"{sum(entry[0] for entry in found) / len(found):.0f}"]


def interval_note(comparison: Comparison) -> str:
    """Say what ± means, where there is one."""
    seeds = len(comparison.seeds)
    return f"± is the 95 % confidence interval of the mean over {seeds} seeds (Student's t)." if seeds > 1 else ""


def percent(value: Interval | None) -> str:
    """Write an accuracy."""
    if value is None:
        return "-"
    return f"{100 * value.mean:.1f}" + (f" ± {100 * value.half:.1f}" if value.half is not None else "")


def points(value: Interval | None) -> str:
    """Write a difference between accuracies, in points of a percent."""
    if value is None:
        return "-"
    return f"{100 * value.mean:+.1f}" + (f" ± {100 * value.half:.1f}" if value.half is not None else "")


def megabytes(value: float | None) -> str:
    """Write bytes in MB (10^6 bytes), three digits."""
    return "-" if value is None else digits(value / MB)


def duration(seconds: float | None) -> str:
    """Write virtual seconds in the unit that fits."""
    if seconds is None:
        return "-"
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{digits(seconds / unit)} {name}"
    return f"{digits(seconds)} s"


def times(value: float | None) -> str:
    """Write a factor."""
    return "-" if value is None else f"{digits(value, 2)}x"


def digits(value: float, count: int = 3) -> str:
    """Write a number with at least `count` significant digits, without an exponent."""
    if value == 0:
        return "0"
    places = max(0, count - 1 - floor(log10(abs(value))))
    return f"{value:.{places}f}"


def csv_text(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Write CSV; None is empty."""
    import csv
    import io

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(["" if cell is None else cell for cell in line] for line in lines)
    return stream.getvalue()
