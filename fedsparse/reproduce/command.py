"""What `fedsparse reproduce` shows while it runs, and in the end."""

import os
from collections.abc import Sequence
from pathlib import Path

from fedsparse.compare.conduct import Listener
from fedsparse.console import Watch, show_listing
from fedsparse.reproduce.claims import Outcome, Part
from fedsparse.reproduce.conduct import Reproduction, reproduce
from fedsparse.reproduce.page import counts, write_page
from fedsparse.reproduce.papers import PAPERS, find_paper
from fedsparse.scenario import Scenario, expand
from fedsparse.terminal import out

_COLOURS = {Outcome.HOLDS: "green", Outcome.FAILS: "red"}


def list_papers() -> None:
    """Show the papers and their parts."""
    rows = [[key, paper.reference, ", ".join(part.key for part in paper.parts)] for key, paper in PAPERS.items()]
    show_listing("papers", ["name", "reference", "parts (--only)"], rows)


def reproduce_paper(
    name: str,
    folder: Path,
    only: Sequence[str],
    seeds: Sequence[int] | None,
    overrides: Sequence[str],
    jobs: int,
    *,
    overwrite: bool,
    verbose: bool,
) -> None:
    """Reproduce a paper, and print the verdicts."""
    paper = find_paper(name)
    out.print(f"{paper.title}\n{paper.reference}", markup=False)
    watches: list[Watch] = []

    def on_part(part: Part, scenario: Scenario) -> Listener:
        _close(watches)
        variants, chosen = expand(scenario), seeds or scenario.seeds or (scenario.seed,)
        runs = f"{len(variants)} variants x {len(chosen)} seeds"
        out.print(f"\n{part.key}: {part.title}; {scenario.data.dataset}, {runs}", markup=False)
        watches.append(Watch(len(chosen) * sum(each.rounds for each in variants.values()), jobs or 2))
        return watches[-1].__enter__()

    try:
        result = reproduce(
            paper,
            folder,
            seeds=seeds,
            only=only,
            overrides=overrides,
            jobs=jobs or os.cpu_count() or 1,
            on_part=on_part,
            overwrite=overwrite,
            verbose=verbose,
        )
    except KeyboardInterrupt:
        _close(watches)
        out.print(f"stopped; what is complete stays in {folder}. The same command goes on from there.", markup=False)
        raise
    finally:
        _close(watches)
    _show(result)
    out.print(f"\n{counts(result)}", markup=False)
    if result.changed:
        out.print(result.changed, markup=False)
    out.print(f"results  {folder}", markup=False)
    out.print(f"report   {write_page(result, folder)}", markup=False)


def _close(watches: list[Watch]) -> None:
    while watches:
        watches.pop().__exit__()


def _show(result: Reproduction) -> None:
    for part in result.paper.parts:
        found = [finding for finding in result.findings if finding.part is part]
        if found:
            out.print(f"\n{part.title}", style="bold", markup=False)
        for finding in found:
            outcome = finding.verdict.outcome
            out.print(f"  {outcome.value:<15}", style=_COLOURS.get(outcome, "yellow"), end="")
            out.print(finding.claim.title, markup=False)
            if outcome is Outcome.NOT_RUN:
                out.print(f"{'':17}{finding.verdict.reason}", markup=False, style="dim")
            else:
                out.print(f"{'':17}{finding.verdict.ours}", markup=False, style="dim")
