"""The page of a reproduction: each claim with the paper's words, our figures, the verdict and the plots."""

from html import escape
from pathlib import Path

from fedsparse.report.figures import Figure
from fedsparse.report.page import details, document, plot, provenance
from fedsparse.reproduce.claims import Outcome, Part
from fedsparse.reproduce.conduct import Finding, Reproduction
from fedsparse.run.folder import REPORT, save_text

MOST_PAIRS = 12
STYLE = """
.verdict { display: inline-block; padding: .05rem .55rem; border-radius: 3px; font-size: .85rem; font-weight: 600;
  color: #fff; background: #5b6470; white-space: nowrap; }
.holds { background: #00734f; } .fails { background: #b34700; }
.claim { border-top: 1px solid var(--line); margin-top: 1.8rem; padding-top: .6rem; }
.claim h3 { font-size: 1.02rem; margin: .2rem 0 .5rem; } .claim dl { margin: .4rem 0 .8rem; }
td.words { text-align: left; white-space: normal; }
ul { margin: .3rem 0; padding-left: 1.2rem; max-width: 75ch; }
"""
_CLASSES = {Outcome.HOLDS: "holds", Outcome.FAILS: "fails"}


def write_page(result: Reproduction, folder: Path) -> Path:
    """Write report.html into the reproduction's folder, and return its path."""
    plots: dict[str, Figure] = {}
    sections = [_heading(result), _overview(result)]
    for part in result.paper.parts:
        if any(finding.part is part for finding in result.findings):
            sections += _part(result, part, plots)
    sections += [_out_of_reach(result), _how_judged(), provenance(result.facts)]
    target = folder / REPORT
    save_text(target, document(f"{result.paper.key}: {result.paper.title}", sections, plots, STYLE))
    return target


def counts(result: Reproduction) -> str:
    """Say how many claims have which verdict."""
    outcomes = [finding.verdict.outcome for finding in result.findings]
    parts = [f"{outcomes.count(outcome)} {outcome.value}" for outcome in Outcome if outcome in outcomes]
    return f"{len(outcomes)} claims: {', '.join(parts)}."


def _heading(result: Reproduction) -> str:
    paper, changed = result.paper, f"<p>{escape(result.changed)}</p>" if result.changed else ""
    return (
        f"<h1>{escape(paper.title)}</h1><p class='soft'>{escape(paper.reference)}</p>\n"
        f"<div class='findings'><p>{escape(counts(result))}</p><p>{escape(paper.about)}</p>"
        f"{changed}</div>\n"
    )


def _overview(result: Reproduction) -> str:
    rows = "".join(
        f"<tr><td>{escape(finding.part.title)}</td><td class='words'>{escape(finding.claim.title)}</td>"
        f"<td>{_badge(finding.verdict.outcome)}</td></tr>"
        for finding in result.findings
    )
    head = "<tr><th>experiment</th><th class='words' style='text-align:left'>claim</th><th>verdict</th></tr>"
    return f"<h2>Verdicts</h2><div class='scroll'><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>\n"


def _badge(outcome: Outcome) -> str:
    return f"<span class='verdict {_CLASSES.get(outcome, '')}'>{escape(outcome.value)}</span>"


def _part(result: Reproduction, part: Part, plots: dict[str, Figure]) -> list[str]:
    comparison = result.comparisons.get(part.key)
    changes = "".join(f"<li>{escape(change)}</li>" for change in part.changes)
    sections = [f"<h2>{escape(part.title)}</h2>\n"]
    if comparison is not None:
        data, seeds = comparison.scenario.data, ", ".join(map(str, comparison.seeds))
        what = f"{data.dataset}, {comparison.scenario.model.name}, {data.num_clients} workers, seeds {seeds}"
        link = f"<a href='{escape(part.key)}/'>{escape(part.key)}/</a>"
        sections.append(f"<p class='soft'>{escape(what)}; all runs are in {link}</p>\n")
    sections.append(f"<p class='soft'>What is not as in the paper:</p><ul class='soft'>{changes}</ul>\n")
    for finding in result.findings:
        if finding.part is part:
            sections += _claim(result, finding, plots)
    if comparison is not None:
        sections.append(details(comparison.scenario))
    return sections


def _claim(result: Reproduction, finding: Finding, plots: dict[str, Figure]) -> list[str]:
    part, claim, verdict = finding.part, finding.claim, finding.verdict
    entries = {"paper": claim.paper, "ours": verdict.ours, "why": verdict.reason}
    listed = "".join(f"<dt>{key}</dt><dd>{escape(value)}</dd>" for key, value in entries.items())
    sections = [
        f"<div class='claim'><h3>{_badge(verdict.outcome)} {escape(claim.title)}</h3><dl>{listed}</dl></div>\n",
        _losing(finding),
    ]
    comparison = result.comparisons.get(part.key)
    for number, (draw, caption) in enumerate(claim.plots):
        figure = draw(comparison) if comparison is not None else None
        if figure is not None:
            name = f"{part.key}-{claim.key}-{number}"
            plots[name] = figure
            sections.append(plot(name, caption, low=True))
    return sections


def _losing(finding: Finding) -> str:
    pairs = finding.verdict.losing
    if not pairs:
        return ""
    rows = "".join(
        f"<tr><td>{escape(pair.setting)}</td><td>{pair.seed}</td><td>{pair.better:.5g}</td><td>{pair.worse:.5g}</td></tr>"
        for pair in pairs[:MOST_PAIRS]
    )
    more = (
        f"<p class='soft'>and {len(pairs) - MOST_PAIRS} more, in the result file</p>" if len(pairs) > MOST_PAIRS else ""
    )
    head = "<tr><th>pair</th><th>seed</th><th>should be lower</th><th>than</th></tr>"
    return (
        f"<details open><summary>Losing pairs: {len(pairs)}</summary><div class='scroll'><table><thead>{head}</thead>"
        f"<tbody>{rows}</tbody></table></div>{more}</details>\n"
    )


def _out_of_reach(result: Reproduction) -> str:
    items = "".join(f"<li>{escape(claim)}: {escape(why)}</li>" for claim, why in result.paper.out_of_reach)
    return f"<h2>Not tried</h2><ul>{items}</ul>\n" if items else ""


def _how_judged() -> str:
    return (
        "<h2>How it was judged</h2><p>"
        "A verdict rests on differences between runs with the same seed (the same data split, initial model and "
        "order of examples), their mean, and its 95 % confidence interval (Student's t), never on one run. "
        "“Holds” needs the whole interval on the claim's side. “Does not hold” covers both a claim that is wrong "
        "here and one that this many seeds do not show; the reason says which. Losses are the regularised loss "
        "over all training examples, the mean over the last tenth of a run. Bytes are the lengths of frames that "
        "were really encoded and decoded, or, where it says so, what the papers' formulas count for the same "
        "updates.</p>\n"
    )
