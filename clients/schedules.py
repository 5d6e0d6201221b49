"""Learning rates over the rounds, or the local steps, of a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import cos, pi
from typing import ClassVar

from fedsparse.compression.base import check_number, check_whole
from fedsparse.errors import unknown_name
from fedsparse.spec import build, parse_stage


@dataclass(frozen=True)
class Schedule(ABC):
    """The factor by which the scenario's lr is multiplied.

    Parameters
    ----------
    per : {"round", "step"}
        What the time t counts, from 0: rounds, or the client's local steps. Step h of H in round r is at
        ``t = (r - 1) H + h``, as if the client had taken part in every round (the clock of Qsparse-local-SGD,
        Basu et al. 2019).
    """

    per: str = field(default="round", kw_only=True)

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if self.per not in ("round", "step"):
            raise unknown_name(f"value of per in {self.name}(...):", self.per, ["round", "step"])

    @abstractmethod
    def at(self, t: int, total: int) -> float:
        """Return the factor at time t of `total`."""

    def multiplier(self, server_round: int, rounds: int, step: int, steps: int) -> float:
        """Return the factor in local step `step` of 0 .. `steps` - 1 of a round counted from 1."""
        if self.per == "step":
            return self.at((server_round - 1) * steps + step, rounds * steps)
        return self.at(server_round - 1, rounds)


@dataclass(frozen=True)
class Constant(Schedule):
    """eta_t = eta."""

    name: ClassVar[str] = "constant"

    def at(self, t: int, total: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Cosine(Schedule):
    """eta_t = eta (1 + cos(pi t / T)) / 2."""

    name: ClassVar[str] = "cosine"

    def at(self, t: int, total: int) -> float:
        """Return a factor that falls from 1 towards 0."""
        return 0.5 * (1.0 + cos(pi * min(t, total) / max(total, 1)))


@dataclass(frozen=True)
class Step(Schedule):
    """eta_t = eta factor^floor(t / every)."""

    every: int
    factor: float = 0.1

    name: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self.name, "every", self.every, 1)
        check_number(self.name, "factor", self.factor, 0.0, 1.0, open_low=True)

    def at(self, t: int, total: int) -> float:
        """Return factor^(number of drops so far)."""
        return float(self.factor ** (t // self.every))


@dataclass(frozen=True)
class Inverse(Schedule):
    """eta_t = eta a / (a + t): the schedule of the papers' theorems, c / (mu (a + t))."""

    a: float

    name: ClassVar[str] = "inverse"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "a", self.a, 0.0, 1e18, open_low=True)

    def at(self, t: int, total: int) -> float:
        """Return a / (a + t)."""
        return float(self.a / (self.a + t))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "step": Step,
    "inverse": Inverse,
}


def make_schedule(spec: str) -> Schedule:
    """Build the schedule that a spec names, e.g. ``"inverse(a=100)"`` or ``"cosine(per='step')"``."""
    return build(parse_stage(spec), SCHEDULES, "lr_schedule")
