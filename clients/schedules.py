"""Learning rates over the rounds of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi
from typing import ClassVar, Protocol

from fedsparse.compression.base import check_number, check_whole
from fedsparse.spec import build, parse_stage


class Schedule(Protocol):
    """Gives the factor by which the scenario's lr is multiplied."""

    def factor(self, server_round: int, rounds: int) -> float:
        """Return the factor of a round, counted from 1."""
        ...


@dataclass(frozen=True)
class Constant:
    """eta_t = eta."""

    name: ClassVar[str] = "constant"

    def factor(self, server_round: int, rounds: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Cosine:
    """eta_t = eta (1 + cos(pi (t - 1) / T)) / 2."""

    name: ClassVar[str] = "cosine"

    def factor(self, server_round: int, rounds: int) -> float:
        """Return a factor that falls from 1 towards 0."""
        return 0.5 * (1.0 + cos(pi * (server_round - 1) / max(rounds, 1)))


@dataclass(frozen=True)
class Step:
    """Multiply by `factor` after `every` rounds."""

    every: int
    by: float = 0.1

    name: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        check_whole(self.name, "every", self.every, 1)
        check_number(self.name, "by", self.by, 0.0, 1.0, open_low=True)

    def factor(self, server_round: int, rounds: int) -> float:
        """Return by^(number of steps so far)."""
        return float(self.by ** ((server_round - 1) // self.every))


@dataclass(frozen=True)
class Inverse:
    """eta_t = eta a / (a + t - 1): the schedule of the papers' theorems, c/(lambda (a + t))."""

    a: float

    name: ClassVar[str] = "inverse"

    def __post_init__(self) -> None:
        check_number(self.name, "a", self.a, 0.0, 1e18, open_low=True)

    def factor(self, server_round: int, rounds: int) -> float:
        """Return a / (a + t - 1)."""
        return self.a / (self.a + server_round - 1)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "step": Step,
    "inverse": Inverse,
}


def make_schedule(spec: str) -> Schedule:
    """Build the schedule that a spec names, e.g. ``"inverse(a=100)"``."""
    return build(parse_stage(spec), SCHEDULES, "lr_schedule")
