"""The plots of a reproduction, as plain plotly.js figures in the style of the reports."""

from collections.abc import Callable, Sequence
from math import log10
from typing import Any

from fedsparse.compare.results import Comparison, Run, Variant
from fedsparse.report.figures import (
    axes,
    colour,
    curves,
    logarithmic,
    round_numbers,
    spent_megabytes,
)
from fedsparse.reproduce.claims import Figure, Plot
from fedsparse.reproduce.measures import final_loss, memory_squares, total_error

LOSS = "training loss, regularised"
MOST = 3.0  # times the loss that the best variant starts from: what has diverged must not hide the rest


def loss_by_bytes(*names: str) -> Plot:
    """Plot the training loss against uplink bytes."""

    def plot(comparison: Comparison) -> Figure | None:
        figure = _loss(comparison, names, spent_megabytes, "uplink so far, MB (logarithmic)")
        figure["layout"]["xaxis"] |= logarithmic(value for trace in figure["data"] for value in trace["x"])
        return figure if figure["data"] else None

    return plot


def loss_by_round(*names: str) -> Plot:
    """Plot the training loss against rounds."""

    def plot(comparison: Comparison) -> Figure | None:
        figure = _loss(comparison, names, round_numbers, "round")
        return figure if figure["data"] else None

    return plot


def _loss(comparison: Comparison, names: Sequence[str], x: Callable[[Run], list[float]], title: str) -> Figure:
    figure = curves(comparison, lambda line: line.get("objective"), x=x, only=_some(comparison, names))
    figure["layout"] |= axes(title, f"{LOSS} (logarithmic)")
    means = [value for trace in figure["data"] if "name" in trace for value in trace["y"] if value > 0]
    figure["layout"]["yaxis"] |= logarithmic(means)
    if means and max(means) > MOST * (first := _start(figure)):
        # Cut off above: a variant that diverges would press all others into one line.
        figure["layout"]["yaxis"] |= {"range": [log10(min(means)) - 0.03, log10(MOST * first)], "autorange": False}
    return figure


def _start(figure: Figure) -> float:
    return float(min(trace["y"][0] for trace in figure["data"] if "name" in trace and trace["y"]))


def total_error_by_round(*names: str) -> Plot:
    """Plot the total error, the sum of the memories' squared norms so far."""

    def plot(comparison: Comparison) -> Figure | None:
        figure = curves(comparison, _total, x=round_numbers, only=_some(comparison, names))
        figure["layout"] |= axes("round", "total error so far (logarithmic)")
        figure["layout"]["yaxis"] |= logarithmic(value for trace in figure["data"] for value in trace["y"])
        return figure if figure["data"] else None

    return plot


def _total(line: dict[str, Any]) -> float | None:
    return line.get("total_error") or None


def error_and_loss(*names: str) -> Plot:
    """Plot each run as a point: its total error, and the loss that it ended with."""

    def plot(comparison: Comparison) -> Figure | None:
        chosen, traces = _some(comparison, names), []
        for number, variant in enumerate(comparison.variants):
            points = [(total_error(run), final_loss(run), run.seed) for run in variant.done]
            shown = [(error, loss, seed) for error, loss, seed in points if error and loss]
            if variant in chosen and shown:
                traces.append(_points(variant.name, number, shown))
        layout = axes("total error of the run (logarithmic)", f"final {LOSS}")
        layout["xaxis"] |= logarithmic(value for trace in traces for value in trace["x"])
        return {"data": traces, "layout": layout | {"hovermode": "closest"}} if traces else None

    return plot


def _points(name: str, number: int, points: list[tuple[float, float, int]]) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [error for error, _, _ in points],
        "y": [loss for _, loss, _ in points],
        "customdata": [seed for _, _, seed in points],
        "marker": {"color": colour(number), "size": 9, "symbol": number % 6},
        "hovertemplate": f"{name}, seed %{{customdata}}<br>total error %{{x:.4~g}}, loss %{{y:.5~g}}<extra></extra>",
    }


def memory_by_step_size(step_size: Callable[[Variant, int], float], *names: str) -> Plot:
    """Plot the memory's mean squared norm against the step size, both logarithmic: eta^2 is a slope of two."""

    def plot(comparison: Comparison) -> Figure | None:
        traces, chosen = [], _some(comparison, names)
        for number, variant in enumerate(comparison.variants):
            if variant in chosen and variant.done:
                rows = [memory_squares(run) for run in variant.done]
                length = min(len(row) for row in rows)
                step = max(1, length // 200)
                shown = range(step - 1, length, step)
                means = [sum(row[i][1] for row in rows) / len(rows) for i in shown]
                rates = [step_size(variant, rows[0][i][0]) for i in shown]
                traces.append(_line(variant.name, number, rates, means))
        layout = axes("step size η (logarithmic; time runs to the left)", "memory, mean of ‖m‖² (logarithmic)")
        layout["xaxis"] |= logarithmic(value for trace in traces for value in trace["x"])
        layout["yaxis"] |= logarithmic(value for trace in traces for value in trace["y"])
        if not traces:
            return None
        return {"data": [*traces, _slope_two(traces)], "layout": layout | {"hovermode": "closest"}}

    return plot


def _line(name: str, number: int, x: list[float], y: list[float]) -> Figure:
    line = {"color": colour(number), "width": 2}
    hover = f"{name}<br>η %{{x:.3~g}}, ‖m‖² %{{y:.3~g}}<extra></extra>"
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": line, "hovertemplate": hover}


def _slope_two(traces: list[Figure]) -> Figure:
    """A line ``c eta^2`` through the end of the first trace."""
    x, y = traces[0]["x"], traces[0]["y"]
    ends = [x[len(x) // 4], x[-1]]
    line = {"color": "#8C8C8C", "width": 1.5, "dash": "dot"}
    common = {"type": "scatter", "mode": "lines", "name": "slope 2 (η²)", "hoverinfo": "skip"}
    return common | {"x": ends, "y": [y[-1] * (end / x[-1]) ** 2 for end in ends], "line": line}


def _some(comparison: Comparison, names: Sequence[str]) -> list[Variant]:
    return [variant for variant in comparison.variants if not names or variant.name in names]
