"""Learning rates over the rounds, or the local steps, of a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import cos, pi, sqrt
from typing import ClassVar

from fedsparse.compression.base import check_number, check_whole
from fedsparse.errors import ConfigError, unknown_name
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
    """eta_t = eta a / (a + t): as strongly_convex, given by its first step size eta."""

    a: float

    name: ClassVar[str] = "inverse"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "a", self.a, 0.0, 1e18, open_low=True)

    def at(self, t: int, total: int) -> float:
        """Return a / (a + t)."""
        return float(self.a / (self.a + t))


@dataclass(frozen=True)
class StronglyConvex(Schedule):
    """eta_t = eta c / (mu (a + t)): the step sizes of the theorems for a mu-strongly convex f; eta is 1 in the papers.

    Theorems: c = 8, a > 1 and a = O(d/k) (Stich et al. 2018, Theorem 2.4); c = 8, a > max(4H/gamma, 32 L/mu, H) for a
    contraction gamma (Basu et al. 2019, for strongly convex f). Experiments: c = 2, mu = lambda, a = tau in {1, d/k, d}
    (Stich et al. 2018); mu = lambda, a = dH/k (Basu et al. 2019).

    Parameters
    ----------
    c, mu : float
        The constant, and the modulus of strong convexity: the weight lambda of the l2 regulariser.
    a : float
        The shift. A coordinate waits about d/k steps in the error memory; with a smaller shift what is sent then dates
        from step sizes far larger than the present one.
    per : {"step", "round"}
        As in `Schedule`; the papers' t counts steps of SGD.
    """

    c: float
    mu: float
    a: float
    per: str = field(default="step", kw_only=True)

    name: ClassVar[str] = "strongly_convex"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, why in _CONDITIONS.items():
            try:
                check_number(self.name, key, getattr(self, key), 0.0, 1e18, open_low=True)
            except ConfigError as error:
                raise ConfigError(f"{error} eta_t = c / (mu (a + t)): {why}") from None

    def at(self, t: int, total: int) -> float:
        """Return c / (mu (a + t))."""
        return float(self.c / (self.mu * (self.a + t)))


_CONDITIONS = {
    "c": "the theorems have c = 8 (Stich et al. 2018, Theorem 2.4), the experiments c = 2.",
    "mu": "f must be mu-strongly convex (Stich et al. 2018, Theorem 2.4), as weight_decay = mu makes a convex loss; "
    "where it is not, use inverse_sqrt or constant.",
    "a": "the theorem needs a shift a > 1 of the order of d/k (Stich et al. 2018, Theorem 2.4), with H local steps of "
    "dH/k (Basu et al. 2019).",
}


@dataclass(frozen=True)
class InverseSqrt(Schedule):
    """eta_t = eta sqrt(a / (a + t)): for convex f without strong convexity (Nemirovski et al. 2009, Section 2.2).

    Parameters
    ----------
    a : float
        The step size has halved at t = 3a.
    """

    a: float = 1.0

    name: ClassVar[str] = "inverse_sqrt"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "a", self.a, 0.0, 1e18, open_low=True)

    def at(self, t: int, total: int) -> float:
        """Return sqrt(a / (a + t))."""
        return sqrt(self.a / (self.a + t))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "step": Step,
    "inverse": Inverse,
    "inverse_sqrt": InverseSqrt,
    "strongly_convex": StronglyConvex,
}


def make_schedule(spec: str) -> Schedule:
    """Build the schedule that a spec names, e.g. ``"inverse(a=100)"`` or ``"cosine(per='step')"``."""
    return build(parse_stage(spec), SCHEDULES, "lr_schedule")
