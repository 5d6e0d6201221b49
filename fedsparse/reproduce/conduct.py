"""Run a paper's scenarios, and judge its claims."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsparse.compare import Comparison, compare_scenario, read
from fedsparse.compare.conduct import Listener
from fedsparse.errors import ConfigError, DataError, unknown_name
from fedsparse.reproduce.claims import Claim, Outcome, Paper, Part, Verdict
from fedsparse.run import environment
from fedsparse.run.folder import REPORT, RunFolder, is_ours
from fedsparse.scenario import Scenario, apply_overrides, expand, load, validate_deep

RESULT = "reproduction.json"


@dataclass(frozen=True)
class Finding:
    """A claim and our verdict."""

    part: Part
    claim: Claim
    verdict: Verdict


@dataclass(frozen=True)
class Reproduction:
    """What became of a paper's claims.

    Parameters
    ----------
    paper : Paper
        Which paper.
    findings : tuple of Finding
        In the order of the paper's parts and claims.
    comparisons : dict
        Part -> its comparison, where it was run.
    facts : dict
        Command, machine, versions, date, duration.
    """

    paper: Paper
    findings: tuple[Finding, ...]
    comparisons: dict[str, Comparison]
    facts: dict[str, Any]

    @property
    def changed(self) -> str:
        """What the caller has changed, in one line; empty where nothing was."""
        changed = self.facts.get("changed")
        return f"Changed by the caller: {', '.join(changed)}. Verdicts are about these settings." if changed else ""

    def to_json(self) -> dict[str, Any]:
        """Return claims, figures and verdicts as plain JSON values."""
        return {
            "paper": self.paper.key,
            "reference": self.paper.reference,
            **self.facts,
            "parts": [self._part_json(part) for part in self.paper.parts if self._of(part)],
            "out_of_reach": [{"claim": claim, "reason": reason} for claim, reason in self.paper.out_of_reach],
        }

    def _of(self, part: Part) -> list[Finding]:
        return [finding for finding in self.findings if finding.part is part]

    def _part_json(self, part: Part) -> dict[str, Any]:
        comparison = self.comparisons.get(part.key)
        return {
            "part": part.key,
            "scenario": part.scenario,
            "dataset": comparison.scenario.data.dataset if comparison else None,
            "rounds": comparison.scenario.rounds if comparison else None,
            "seeds": list(comparison.seeds) if comparison else [],
            "run_s": _run_seconds(comparison) if comparison else None,
            "changes": list(part.changes),
            "claims": [_claim_json(finding) for finding in self._of(part)],
        }


def _run_seconds(comparison: Comparison) -> float:
    """Add up what the runs took, whenever they ran."""
    runs = [run for variant in comparison.variants for run in variant.done]
    return round(sum(run.summary.wall_s or 0.0 for run in runs), 1)


def _claim_json(finding: Finding) -> dict[str, Any]:
    claim, verdict = finding.claim, finding.verdict
    return {
        "claim": claim.key,
        "title": claim.title,
        "paper": claim.paper,
        "verdict": verdict.outcome.value,
        "ours": verdict.ours,
        "reason": verdict.reason,
        "losing_pairs": [vars(pair) for pair in verdict.losing],
        "figures": verdict.figures,
    }


def choose_parts(paper: Paper, only: Sequence[str] | None) -> list[Part]:
    """Return the parts to run.

    Raises
    ------
    ConfigError
        An unknown part.
    """
    keys = [part.key for part in paper.parts]
    for name in only or ():
        if name not in keys:
            raise unknown_name(f"part of {paper.key}", name, keys)
    return [part for part in paper.parts if not only or part.key in only]


def prepare(part: Part, overrides: Sequence[str] = ()) -> Scenario | Verdict:
    """Return what a part runs, or the verdict "not run" where its data are not on this machine."""
    scenario = apply_overrides(load(part.scenario), overrides)
    missing = None
    for name in (scenario.data.dataset, *part.instead):
        chosen = apply_overrides(scenario, [f'data.dataset="{name}"'])
        try:
            for variant in expand(chosen).values():
                validate_deep(variant)
        except DataError as error:
            missing = missing or str(error)
            continue
        return chosen
    assert missing is not None
    return Verdict(Outcome.NOT_RUN, "-", missing)


def _check_folder(folder: Path, paper: Paper, overwrite: bool) -> None:
    """Refuse a folder with anything else in it than this paper's reproduction."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"the output {folder} is a file: choose a folder with --out.")
    inside = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    known = {RESULT, REPORT, *(part.key for part in paper.parts)}
    if foreign := sorted(inside - known):
        raise ConfigError(f"the output folder {folder} holds other things ({', '.join(foreign[:3])}): choose another.")
    for name in {RESULT, REPORT} & inside:
        written = RunFolder(folder).read_json(RESULT) if RESULT in inside else None
        if not overwrite and (not isinstance(written, dict) or written.get("paper") != paper.key):
            raise ConfigError(
                f"{folder / name} is not of a reproduction of {paper.key}: choose another folder with --out."
            )


def reproduce(
    paper: Paper,
    out: str | os.PathLike[str],
    *,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    on_part: Callable[[Part, Scenario], Listener | None] | None = None,
    overwrite: bool = False,
    verbose: bool = False,
    command: str | None = None,
) -> Reproduction:
    """Run the scenarios of a paper, judge its claims, and write the result file into `out`.

    What an earlier call has completed is not run again.

    Parameters
    ----------
    paper : Paper
        From `PAPERS`.
    out : path
        Folder; each part's comparison goes to a folder of its own in it.
    seeds : sequence of int, optional
        In place of the scenarios' own.
    only : sequence of str, optional
        Keys of the parts to run; default: all.
    overrides : sequence of str
        ``key=value``, for every scenario.
    jobs : int
        Runs at a time.
    on_part : callable, optional
        Told before a part runs; returns the listener of its comparison.
    overwrite, verbose, command
        As in `fedsparse.compare.compare_scenario`.

    Raises
    ------
    ConfigError
        An unknown part; wrong overrides; a folder that holds something else.
    """
    parts, folder = choose_parts(paper, only), Path(out)
    _check_folder(folder, paper, overwrite)
    prepared = {part.key: prepare(part, overrides) for part in parts}
    began = time.monotonic()
    facts: dict[str, Any] = {
        "command": command or environment.command(),
        "machine": environment.machine(),
        "versions": environment.versions(),
        "date": environment.now(),
        "changed": [*overrides, *([f"seeds={list(seeds)}"] if seeds else [])],
    }
    findings: list[Finding] = []
    comparisons: dict[str, Comparison] = {}
    for part in paper.parts:
        if part.key not in prepared:
            if is_ours(folder / part.key):  # an earlier call ran it
                comparisons[part.key] = read(folder / part.key)
                findings += [Finding(part, claim, claim.judge(comparisons[part.key])) for claim in part.claims]
            continue
        scenario = prepared[part.key]
        if isinstance(scenario, Verdict):
            findings += [Finding(part, claim, scenario) for claim in part.claims]
            continue
        comparison = comparisons[part.key] = compare_scenario(
            scenario,
            folder / part.key,
            seeds=seeds,
            on_event=on_part(part, scenario) if on_part else None,
            overwrite=overwrite,
            verbose=verbose,
            command=facts["command"],
            jobs=jobs,
        )
        findings += [Finding(part, claim, claim.judge(comparison)) for claim in part.claims]
    facts["wall_s"] = round(time.monotonic() - began, 1)
    result = Reproduction(paper, tuple(findings), comparisons, facts)
    folder.mkdir(parents=True, exist_ok=True)
    RunFolder(folder).write_json(RESULT, result.to_json())
    return result
