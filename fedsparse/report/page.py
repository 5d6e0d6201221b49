"""Put a report together: one HTML file that needs nothing else."""

import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from fedsparse.compare.results import Comparison, Run, Variant, read
from fedsparse.compare.table import header, interval_note, megabytes, rows
from fedsparse.report import figures
from fedsparse.report.assets import SCRIPT, STYLE
from fedsparse.report.findings import findings
from fedsparse.run.folder import REPORT, finite, save_text
from fedsparse.scenario import Scenario, to_toml

BYTES_NOTE = (
    "Uplink is the length of the frames that clients really sent (positions, values, scales, checksum, header) plus "
    "arrays that travel exactly, such as running statistics; frames that the server rejected count too. Downlink is "
    "the serialized model as it was sent to each client of a round. Flower adds some hundred bytes of envelope to a "
    "message; they are not counted, for any variant. Compression is the size of the same updates as dense arrays over "
    "the uplink. 1 MB is 10<sup>6</sup> bytes."
)


# Plots of what compression does, in pairs; each is there only where a variant has it.
_INSIDE = {
    "density": "Coordinates that a client sent, mean over the cohort; colours as above.",
    "residual": "What clients hold back: mean L2 norm of p − C(p). If it keeps growing, too little is sent.",
    "total-error": "Sum over the rounds so far of the mean squared norm of what clients hold back: what a constant "
    "threshold minimises (Sahu et al. 2021).",
    "lam": "Hard threshold lam, in units of the model update.",
    "budget": "Uplink that the whole training is expected to take, as foreseen in each round.",
}


def build(path: str | Path) -> Path:
    """Write report.html into the folder of a run or a comparison, from what lies there.

    Returns
    -------
    Path
        Of the page.

    Raises
    ------
    ConfigError
        Where the folder holds neither.
    """
    folder = Path(path)
    target = folder / REPORT
    save_text(target, render(read(folder)))
    return target


def render(comparison: Comparison) -> str:
    """Return the page."""
    plots = {name: figure for name, figure in _figures(comparison).items() if figure is not None}
    return document(comparison.scenario.name, _sections(comparison, set(plots)), plots)


def document(title: str, sections: Iterable[str], plots: Mapping[str, figures.Figure], style: str = "") -> str:
    """Return a whole HTML page that needs nothing else: style, plotly.js and the figures are in it."""
    from plotly.offline import get_plotlyjs

    data = json.dumps(finite(dict(plots)), separators=(",", ":")).replace("<", "\\u003c")
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f"<title>{escape(title)} · fedsparse</title>\n",
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<style>{STYLE}{style}</style>\n</head>\n<body>\n<main>\n",
            *sections,
            f'</main>\n<script type="application/json" id="figures">{data}</script>\n',
            f"<script>{get_plotlyjs()}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )


def _figures(comparison: Comparison) -> dict[str, figures.Figure | None]:
    if not any(run is not None and run.lines for variant in comparison.variants for run in variant.runs):
        return {"labels": figures.label_distribution(comparison)}
    return {
        "accuracy-bytes": figures.accuracy_by_bytes(comparison),
        "accuracy-rounds": figures.accuracy_by_round(comparison),
        "accuracy-time": figures.accuracy_by_time(comparison),
        "density": figures.density_by_round(comparison),
        "residual": figures.residual_by_round(comparison),
        "total-error": figures.total_error_by_round(comparison),
        "lam": figures.threshold_by_round(comparison),
        "budget": figures.budget_by_round(comparison),
        "labels": figures.label_distribution(comparison),
    }


def _sections(comparison: Comparison, plots: set[str]) -> list[str]:
    seeds = len(comparison.seeds)
    means = (
        "Line: mean over the seeds. Band: lowest to highest. Thin lines: single seeds." if seeds > 1 else "One seed."
    )
    parts = [_heading(comparison), _table(comparison)]
    if "accuracy-bytes" in plots:
        parts += [
            "<h2>Accuracy against bytes</h2>",
            plot("accuracy-bytes", f"Farther left is cheaper, higher is better. {means}"),
            "<h2>Accuracy against rounds</h2>",
            plot("accuracy-rounds", "What compression costs in rounds, bytes left aside."),
            *(_time() if "accuracy-time" in plots else ()),
            "<h2>Inside the compression</h2>",
            '<div class="pair">',
            *[plot(name, caption, low=True) for name, caption in _INSIDE.items() if name in plots],
            "</div>",
        ]
    if "labels" in plots:
        parts += ["<h2>Who has which classes</h2>", plot("labels", _division_caption(comparison), low=True)]
    return [*parts, _how_counted(comparison), _runs(comparison), _provenance(comparison)]


def _time() -> list[str]:
    caption = (
        "What the scenario's devices would have needed: computing at their speed, messages at their real length over "
        "their bandwidth."
    )
    return ["<h2>Accuracy against time on the devices</h2>", plot("accuracy-time", caption)]


def _heading(comparison: Comparison) -> str:
    scenario = comparison.scenario
    about = f'<p class="soft">{escape(scenario.description)}</p>' if scenario.description else ""
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in findings(comparison))
    data = scenario.data
    cohort = f", {scenario.train.clients_per_round} a round" if scenario.train.clients_per_round else ""
    seeds = f"{'seeds' if len(comparison.seeds) > 1 else 'seed'} {', '.join(map(str, comparison.seeds))}"
    where = f"{data.dataset}, {scenario.model.name}, {data.num_clients} clients{cohort}, {data.partition}, {seeds}"
    return (
        f'<h1>{escape(scenario.name)}</h1>{about}<p class="soft">{escape(where)}</p>\n'
        f'<div class="findings">{said}</div>\n'
    )


def _table(comparison: Comparison) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in header(comparison))
    lines = []
    for number, (variant, cells) in enumerate(zip(comparison.variants, rows(comparison), strict=True)):
        name = f'<td><span class="swatch" style="background:{figures.colour(number)}"></span>{escape(cells[0])}'
        name += f"<br><code>{escape(_setting(variant))}</code></td>"
        lines.append(f"<tr>{name}" + "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:]) + "</tr>")
    return (
        f'<h2>Results</h2>\n<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody>'
        f'</table></div>\n<p class="soft">{_table_note(comparison)}</p>\n'
    )


def _setting(variant: Variant) -> str:
    strategy, uplink = variant.scenario.strategy.name, variant.scenario.compression.uplink
    memory = "" if variant.scenario.compression.error_memory or uplink == "none" else ", no error memory"
    return f"{strategy}, {uplink}{memory}"


def _table_note(comparison: Comparison) -> str:
    notes = ["Accuracy on the test set after the last round."]
    if note := interval_note(comparison):
        same = (
            "The same seed means the same data split, initial model and cohorts, so differences are taken seed by seed."
        )
        notes += [note, same]
    if comparison.shows_target and comparison.target is not None:
        source = (
            "set in the scenario" if comparison.target_is_given else "the first variant's mean accuracy minus one point"
        )
        notes.append(
            f"Target: {100 * comparison.target:.1f} %, {source}; counted up to the first round that reached it."
        )
    return " ".join(notes)


def plot(name: str, caption: str, *, low: bool = False) -> str:
    """Return the place where a figure of that name is drawn."""
    size = "plot low" if low else "plot"
    return f'<figure><div id="{name}" class="{size}"></div><figcaption>{escape(caption)}</figcaption></figure>\n'


def _division_caption(comparison: Comparison) -> str:
    division = comparison.division or {"label_counts": []}
    sizes = [sum(row) for row in division["label_counts"]]
    text = f"{comparison.scenario.data.partition}, seed {comparison.seeds[0]}: "
    text += f"clients have {min(sizes)} to {max(sizes)} examples"
    empty = sizes.count(0)
    text += f", {empty} have none." if empty else "."
    if len(sizes) > figures.MOST_CLIENTS:
        text += f" The first {figures.MOST_CLIENTS} of {len(sizes)} clients are shown."
    return text


def _how_counted(comparison: Comparison) -> str:
    return f"<h2>How bytes were counted</h2>\n<p>{BYTES_NOTE}</p>\n"


def _runs(comparison: Comparison) -> str:
    head = (
        "variant",
        "seed",
        "status",
        "accuracy %",
        "best %",
        "uplink MB",
        "by the papers' formula, MB",
        "failed",
        "seconds",
    )
    lines = [_run_row(variant, run) for variant in comparison.variants for run in variant.runs if run is not None]
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return (
        f"<details><summary>All runs</summary><div class='scroll'><table><thead><tr>{titles}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div></details>\n"
    )


def _run_row(variant: Variant, run: Run) -> str:
    summary = run.summary
    cells: list[Any] = [variant.name, run.seed, summary.status]
    cells += [
        "-" if value is None else f"{100 * value:.2f}" for value in (summary.final_accuracy, summary.best_accuracy)
    ]
    cells += [megabytes(summary.uplink_bytes), megabytes(summary.formula_bytes), summary.client_failures]
    cells.append("-" if summary.wall_s is None else f"{summary.wall_s:.1f}")
    return "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"


def _provenance(comparison: Comparison) -> str:
    return provenance(comparison.facts) + details(comparison.scenario)


def provenance(facts: Mapping[str, Any]) -> str:
    """Say how, when and where the figures were made; what is not known is left out."""
    versions = ", ".join(f"{name} {version}" for name, version in (facts.get("versions") or {}).items())
    entries = {
        "command": f"<code>{escape(str(facts.get('command')))}</code>",
        "started": escape(str(facts.get("started") or facts.get("date"))),
        "engine": escape(str(facts["engine"])) if facts.get("engine") else "",
        "duration": escape(f"{facts['wall_s']:.0f} s" if facts.get("wall_s") is not None else "-"),
        "status": escape(str(facts["status"])) if facts.get("status") else "",
        "machine": escape(str(facts.get("machine"))),
        "versions": escape(versions),
    }
    listed = "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in entries.items() if value)
    return f"<h2>To repeat it</h2>\n<dl>{listed}</dl>\n"


def details(scenario: Scenario) -> str:
    """Show a scenario as a file, folded."""
    return (
        "<details><summary>The scenario, every default spelled out</summary>"
        f"<pre>{escape(to_toml(scenario))}</pre></details>\n"
    )
