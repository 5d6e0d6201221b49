"""What a paper claims, and what we say to it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fedsparse.compare.results import Comparison

Figure = dict[str, Any]


class Outcome(StrEnum):
    """What became of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    NOT_COMPARABLE = "not comparable"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Pair:
    """One seed's pair of values where the claim says that `ours` is the better one, and it is not.

    Parameters
    ----------
    setting : str
        Which variants.
    seed : int
        The seed that both share.
    better, worse : float
        What the claim calls the better, and what beat it.
    """

    setting: str
    seed: int
    better: float
    worse: float


@dataclass(frozen=True)
class Verdict:
    """What our runs say to a claim.

    Parameters
    ----------
    outcome : Outcome
        The verdict.
    ours : str
        Our figures, with confidence intervals, in one line.
    reason : str
        Why the verdict is what it is.
    losing : tuple of Pair
        Single pairs that go against the claim, whatever the verdict.
    figures : dict
        The numbers behind it, for the result file.
    """

    outcome: Outcome
    ours: str
    reason: str
    losing: tuple[Pair, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)


Judge = Callable[[Comparison], Verdict]
Plot = Callable[[Comparison], Figure | None]


@dataclass(frozen=True)
class Claim:
    """One claim of a paper, and how our comparison answers it.

    Parameters
    ----------
    key : str
        Names it in files.
    title : str
        The claim in a few words.
    paper : str
        What the paper says, with its figures.
    judge : callable
        Comparison -> Verdict; looks at nothing but the runs.
    plots : tuple of (callable, str)
        Comparison -> figure, with its caption.
    """

    key: str
    title: str
    paper: str
    judge: Judge
    plots: tuple[tuple[Plot, str], ...] = ()


@dataclass(frozen=True)
class Part:
    """One experiment of a paper: a scenario, and the claims that it answers.

    Parameters
    ----------
    key : str
        What `--only` calls it.
    title : str
        Its heading.
    scenario : str
        The name of the scenario that comes with fedsparse.
    changes : tuple of str
        What is not as in the paper.
    claims : tuple of Claim
        In the order of the page.
    instead : tuple of str
        Data sets that may take the place of the scenario's where that is not on the machine.
    """

    key: str
    title: str
    scenario: str
    changes: tuple[str, ...]
    claims: tuple[Claim, ...]
    instead: tuple[str, ...] = ()


@dataclass(frozen=True)
class Paper:
    """A paper, and the part of it that is reproduced.

    Parameters
    ----------
    key : str
        What the command line calls it.
    title, reference : str
        Its title; authors, venue, and where to find it.
    about : str
        What it is about, in a sentence or two.
    parts : tuple of Part
        The experiments.
    out_of_reach : tuple of (str, str)
        Claims that are not tried, with the reason.
    """

    key: str
    title: str
    reference: str
    about: str
    parts: tuple[Part, ...]
    out_of_reach: tuple[tuple[str, str], ...] = ()
