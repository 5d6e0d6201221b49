"""The plots of a report, as plain plotly.js figures.

Colours of text, grid and background come later, from the reader's light or dark theme.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, log10
from typing import Any

from fedsparse.compare.results import Comparison, Run, Variant

# Okabe and Ito: told apart by colour-blind readers; with the dashes, also in a grey print.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MOST_CLIENTS, MOST_POINTS = 200, 500

Figure = dict[str, Any]
Value = Callable[[dict[str, Any]], float | None]


def colour(number: int) -> str:
    """Return the colour of a variant, the same in every plot and in the table."""
    return PALETTE[number % len(PALETTE)]


def accuracy_by_bytes(comparison: Comparison) -> Figure:
    """Test accuracy against uplink bytes so far, on a logarithmic axis."""
    figure = curves(comparison, lambda line: _percent(line["eval_accuracy"]), x=spent_megabytes)
    figure["layout"] |= axes("uplink so far, MB (logarithmic)", "test accuracy, %")
    figure["layout"]["xaxis"] |= logarithmic(value for trace in figure["data"] for value in trace["x"])
    return _with_target(figure, comparison)


def accuracy_by_round(comparison: Comparison) -> Figure:
    """Test accuracy against rounds."""
    figure = curves(comparison, lambda line: _percent(line["eval_accuracy"]), x=round_numbers)
    figure["layout"] |= axes("round", "test accuracy, %")
    return _with_target(figure, comparison)


def accuracy_by_time(comparison: Comparison) -> Figure | None:
    """Test accuracy against the virtual clock of simulated devices."""
    if not comparison.has_clock:
        return None
    longest = max(variant.mean("virtual_s") or 0.0 for variant in comparison.variants)
    units = ((3600.0, "hours"), (60.0, "minutes"))
    unit, name = next(((unit, name) for unit, name in units if longest >= 2 * unit), (1.0, "seconds"))
    clocked = [variant for variant in comparison.variants if variant.mean("virtual_s") is not None]

    def clock(run: Run) -> list[float]:
        return [(line["virtual_s"] or 0.0) / unit for line in run.lines]

    figure = curves(comparison, lambda line: _percent(line["eval_accuracy"]), x=clock, only=clocked)
    figure["layout"] |= axes(f"virtual time, {name}", "test accuracy, %")
    return _with_target(figure, comparison)


def density_by_round(comparison: Comparison) -> Figure:
    """Mean fraction of the coordinates that a client sent."""
    figure = curves(comparison, lambda line: _percent(line["density"]), x=round_numbers)
    figure["layout"] |= axes("round", "coordinates sent, % (logarithmic)")
    figure["layout"]["yaxis"] |= logarithmic(value for trace in figure["data"] for value in trace["y"])
    figure["layout"]["showlegend"] = False
    return figure


def residual_by_round(comparison: Comparison) -> Figure | None:
    """Mean norm of the error memory, without variants that have none."""
    return _of_some(comparison, "residual_norm", "norm of the error memory, mean")


def total_error_by_round(comparison: Comparison) -> Figure | None:
    """Sum of the squared norms of the error memory so far, without variants that have none."""
    return _of_some(comparison, "total_error", "total error so far")


def threshold_by_round(comparison: Comparison) -> Figure | None:
    """The hard thresholds, where there are some."""
    return _of_some(comparison, "lam", "threshold lam")


def budget_by_round(comparison: Comparison) -> Figure | None:
    """What trainings under a byte budget are expected to take in the end."""
    return _of_some(comparison, "budget_predicted", "uplink expected in the end, MB", scale=1e-6)


def _of_some(comparison: Comparison, key: str, title: str, scale: float = 1.0) -> Figure | None:
    """Plot a key of rounds.jsonl for the variants where it is not zero or unknown throughout."""
    some = [
        variant
        for variant in comparison.variants
        if any(line.get(key) for run in variant.runs if run is not None for line in run.lines)
    ]
    if not some:
        return None

    def value(line: dict[str, Any]) -> float | None:
        return None if line.get(key) is None else scale * line[key]

    figure = curves(comparison, value, x=round_numbers, only=some)
    figure["layout"] |= axes("round", title)
    figure["layout"]["yaxis"] |= {"rangemode": "tozero"}
    figure["layout"]["showlegend"] = False
    return figure


def label_distribution(comparison: Comparison) -> Figure | None:
    """How many examples of each class each client has."""
    if comparison.division is None:
        return None
    counts = comparison.division["label_counts"][:MOST_CLIENTS]
    classes = list(range(comparison.division["num_classes"]))
    heat = {
        "type": "heatmap",
        "x": list(range(len(counts))),
        "y": classes,
        "z": [[row[label] for row in counts] for label in classes],
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"title": {"text": "examples"}, "thickness": 14, "outlinewidth": 0},
        "hovertemplate": "client %{x}, class %{y}: %{z} examples<extra></extra>",
    }
    layout = axes("client", "class")
    layout["yaxis"] |= {"dtick": 1 if len(classes) <= 20 else None, "showgrid": False}
    layout["xaxis"] |= {"showgrid": False}
    return {"data": [heat], "layout": layout | {"height": 360}}


def curves(
    comparison: Comparison, y: Value, *, x: Callable[[Run], list[float]], only: Sequence[Variant] | None = None
) -> Figure:
    """Plot a value of each round against `x` of a run: mean and range over the seeds, for all variants or for some."""
    traces: list[Figure] = []
    for number, variant in enumerate(comparison.variants):
        runs = [run for run in variant.runs if run is not None and run.lines]
        if runs and (only is None or variant in only):
            traces += _variant_traces(variant.name, number, runs, y, x)
    return {"data": traces, "layout": {"hovermode": "closest"}}


Column = list[float]


def _known(ys: list[float | None], xs: Column, rounds: Column) -> tuple[Column, Column, Column]:
    """Leave out rounds without a value, and most of very many."""
    points = [(y, x, number) for y, x, number in zip(ys, xs, rounds, strict=True) if y is not None]
    step = ceil(len(points) / MOST_POINTS) or 1
    kept = points[::-step][::-1]  # the last round stays
    return [p[0] for p in kept], [p[1] for p in kept], [p[2] for p in kept]


def _variant_traces(name: str, number: int, runs: list[Run], y: Value, x: Callable[[Run], list[float]]) -> list[Figure]:
    """Return thin lines for single runs, a band from the lowest to the highest, and the mean on top."""
    tint = colour(number)
    columns = [_known([y(line) for line in run.lines], x(run), round_numbers(run)) for run in runs]
    common = {"type": "scatter", "legendgroup": name, "mode": "lines"}
    thin = [
        common | {"x": xs, "y": ys, "showlegend": False, "hoverinfo": "skip", "opacity": 0.35}
        | {"line": {"color": tint, "width": 1}}
        for ys, xs, _ in columns
        if len(runs) > 1
    ]  # fmt: skip
    length = min(len(ys) for ys, _, _ in columns)
    points = []
    for index in range(length):
        values = [ys[index] for ys, _, _ in columns]
        mean_x = sum(xs[index] for _, xs, _ in columns) / len(columns)
        points.append((mean_x, sum(values) / len(values), min(values), max(values), columns[0][2][index]))
    band = []
    if len(runs) > 1 and points:
        edge_x = [p[0] for p in points] + [p[0] for p in reversed(points)]
        edge_y = [p[3] for p in points] + [p[2] for p in reversed(points)]
        band = [
            common | {"x": edge_x, "y": edge_y, "fill": "toself", "fillcolor": f"{tint}26", "line": {"width": 0}}
            | {"showlegend": False, "hoverinfo": "skip"}
        ]  # fmt: skip
    dash = DASHES[number // len(PALETTE) % len(DASHES)] if number >= len(PALETTE) else DASHES[number % 4]
    mean = common | {
        "name": name,
        "x": [p[0] for p in points],
        "y": [p[1] for p in points],
        "customdata": [p[4] for p in points],
        "line": {"color": tint, "width": 2.5, "dash": dash},
        "hovertemplate": f"{name}, round %{{customdata}}<br>%{{x:.4~g}} → %{{y:.4~g}}<extra></extra>",
    }
    return [*band, *thin, mean]


def spent_megabytes(run: Run) -> list[float]:
    """Return the uplink so far after each round."""
    total, spent = 0, []
    for line in run.lines:
        total += line["uplink_bytes"]
        spent.append(total / 1e6)
    return spent


def round_numbers(run: Run) -> list[float]:
    """Return the numbers of the rounds."""
    return [line["round"] for line in run.lines]


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def axes(x: str, y: str) -> Figure:
    """Return a layout with the titles of both axes."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}


def logarithmic(values: Iterable[float | None]) -> Figure:
    """Label powers of ten, and 2 and 5 between them where the values span less than two powers."""
    known = [value for value in values if value]
    low, high = (floor(log10(min(known))), ceil(log10(max(known)))) if known else (-1, 1)
    steps = (1, 2, 5) if high - low <= 2 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    minor = {"dtick": "D1", "showgrid": True}
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks], "minor": minor}


def _with_target(figure: Figure, comparison: Comparison) -> Figure:
    if comparison.shows_target and comparison.target is not None:
        level = 100 * comparison.target
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level, "y1": level}
        figure["layout"]["shapes"] = [line | {"line": {"width": 1, "dash": "dot"}}]
        note = {"text": f"target {level:.1f} %", "xref": "paper", "x": 0, "y": level, "showarrow": False}
        figure["layout"]["annotations"] = [note | {"xanchor": "left", "yanchor": "bottom"}]
    return figure
