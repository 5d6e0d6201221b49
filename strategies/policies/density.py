"""Policies that change how many coordinates are kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedsparse.compression import Compressor
from fedsparse.compression.base import check_number, check_whole
from fedsparse.errors import ConfigError
from strategies.aggregation import Update
from strategies.policies.base import Plan, Policy, register_policy
from strategies.report import RoundReport


def density_of(base: Compressor, owner: str) -> float:
    """Return the density of a compressor that is given by one; refuse others."""
    density = getattr(base.sparsifier, "density", None)
    if density is None:
        raise ConfigError(f"{owner} changes the density of a compressor such as topk(density=0.01); {base} has none.")
    return float(density)


def with_density(base: Compressor, density: float) -> Compressor:
    """Return the compressor with another density."""
    return replace(base, sparsifier=replace(base.sparsifier, density=density))  # type: ignore[type-var]


@register_policy
@dataclass
class Warmup(Policy):
    """The density falls geometrically to its final value: in the first rounds gradients are large and diverse.

    ``density_t = start (density / start)^((t - 1) / rounds)`` for ``t <= rounds``, then density. For 0.1 % with a start
    of 25 % and 4 rounds: 25, 6.3, 1.6, 0.4, 0.1 %, the numbers of the paper.

    Parameters
    ----------
    base : Compressor
        Given by a density.
    rounds : int
        Length of the warm-up.
    start : float
        Density of the first round.
    """

    base: Compressor
    rounds: int = 4
    start: float = 0.25
    _now: Compressor = field(init=False, repr=False)

    name = "warmup"
    summary = "density that falls geometrically over the first rounds"
    source = "Lin et al. 2018 (DGC), Section 3.3"
    examples = ("warmup(sampled_topk(density=0.001), rounds=4)", "warmup(topk(density=0.01)|sign, start=0.1)")

    def __post_init__(self) -> None:
        check_whole(self.name, "rounds", self.rounds, 1)
        check_number(self.name, "start", self.start, 0.0, 1.0, open_low=True)
        if (final := density_of(self.base, self.name)) > self.start:
            raise ConfigError(f"{self.name}: start = {self.start:g} is below the final density {final:g}.")
        self._now = self.base

    @property
    def spec(self) -> str:
        return f"{self.name}({self.base}, rounds={self.rounds}, start={self.start!r})"

    def begin(self, plan: Plan) -> None:
        """Move one step down."""
        final, gone = density_of(self.base, self.name), (plan.server_round - 1) / self.rounds
        self._now = (
            with_density(self.base, self.start * (final / self.start) ** min(1.0, gone)) if gone < 1 else self.base
        )

    def compressor(self, client: str) -> Compressor:
        """Return the compressor with the round's density."""
        return self._now


@register_policy
@dataclass
class Accordion(Policy):
    """Switch between two densities: the high one while the updates' norm changes quickly, else the low one.

    Every `every` rounds, and whenever the step size halves, ``|N_old - N_new| / N_old >= threshold`` decides for the
    high density, where N is the mean norm of the clients' updates over the last `every` rounds (Agarwal et al. 2021,
    Algorithm 1, with update norms in place of gradient norms). Training begins with the high density.

    Parameters
    ----------
    base : Compressor
        Given by the low density.
    high : float
        The high density.
    threshold : float
        The paper's eta, 0.5 there.
    every : int
        Rounds between decisions.
    """

    base: Compressor
    high: float
    threshold: float = 0.5
    every: int = 10
    _now: Compressor = field(init=False, repr=False)
    _state: dict[str, Any] = field(init=False, repr=False)

    name = "accordion"
    summary = "high density while updates change quickly, else low"
    source = "Agarwal et al. 2021 (Accordion), Algorithm 1"
    examples = ("accordion(topk(density=0.01), high=0.1)", "accordion(topk(density=0.01)|sign, high=0.1, every=5)")

    def __post_init__(self) -> None:
        check_number(self.name, "high", self.high, 0.0, 1.0, open_low=True)
        check_number(self.name, "threshold", self.threshold, 0.0, 1e9, open_low=True)
        check_whole(self.name, "every", self.every, 1)
        if (low := density_of(self.base, self.name)) > self.high:
            raise ConfigError(f"{self.name}: high = {self.high:g} is below the low density {low:g}.")
        self._state = {"critical": True, "before": None, "norms": [], "step_size": 1.0}
        self._now = with_density(self.base, self.high)

    @property
    def spec(self) -> str:
        options = f"high={self.high!r}, threshold={self.threshold!r}, every={self.every}"
        return f"{self.name}({self.base}, {options})"

    def begin(self, plan: Plan) -> None:
        """Decide, where it is time to."""
        state, eta = self._state, plan.step_size(plan.server_round)
        if eta < 0.5 * state["step_size"]:  # a drop of the schedule is a new critical regime
            state.update(critical=True, before=None, norms=[])
        state["step_size"] = eta
        if len(state["norms"]) >= self.every:
            mean = sum(state["norms"]) / len(state["norms"])
            before = state["before"]
            if before is not None:
                state["critical"] = abs(before - mean) >= self.threshold * before
            state.update(before=mean, norms=[])
        self._now = with_density(self.base, self.high) if state["critical"] else self.base

    def compressor(self, client: str) -> Compressor:
        """Return the compressor with the regime's density."""
        return self._now

    def observe(self, report: RoundReport, updates: Sequence[Update]) -> None:
        """Remember the norm of the updates."""
        if report.update_norm is not None:
            self._state["norms"].append(report.update_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the norms and the regime."""
        return {**self._state, "norms": list(self._state["norms"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self._state = {**state, "norms": list(state["norms"])}
