"""Densities that let all devices finish together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression import Compressor
from fedsparse.compression.base import check_number
from fedsparse.errors import ConfigError
from strategies.aggregation import Update
from strategies.policies.base import Plan, Policy, register_policy
from strategies.policies.density import density_of, with_density
from strategies.report import RoundReport

FIRST_GUESS = 6.0  # bytes a coordinate, until some were measured


@register_policy
@dataclass
class Balanced(Policy):
    """Each client of a round gets the density with which all finish at the same time T.

    A client that can send r bytes a second, and needs f seconds before it sends, has room for ``(T - f) r`` bytes. T is
    where the mean density of the cohort is that of the compressor::

        density_c = clip((T - f_c) r_c / (b d), least, most),    mean of density_c = density

    with b the bytes a coordinate takes, measured on earlier rounds. Slow devices send less of their update now, and
    the rest, which stays in their error memory, later. That pays where sending is what takes the time; where the
    model's way down or computing takes longer, slow devices only get the least density.

    Parameters
    ----------
    base : Compressor
        Given by a density.
    least, most : float
        Bounds of a client's density, as multiples of the compressor's.
    """

    base: Compressor
    least: float = 0.1
    most: float = 10.0
    _densities: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _bytes: float = field(default=FIRST_GUESS, init=False, repr=False)

    name = "balanced"
    summary = "a density for each client so that all devices finish together"
    source = "this project"
    examples = ("balanced(topk(density=0.01))", "balanced(topk(density=0.01)|sign, least=0.2, most=5)")
    needs_devices = True

    def __post_init__(self) -> None:
        density_of(self.base, self.name)
        check_number(self.name, "least", self.least, 0.0, 1.0, open_low=True)
        check_number(self.name, "most", self.most, 1.0, 1e6)

    @property
    def spec(self) -> str:
        return f"{self.name}({self.base}, least={self.least!r}, most={self.most!r})"

    def begin(self, plan: Plan) -> None:
        """Divide the round's bytes."""
        if plan.pace is None:
            raise ConfigError(f"{self.name} needs simulated devices: their bandwidths decide. Set devices.mix.")
        if not plan.cohort:
            return
        density = density_of(self.base, self.name)
        before, rate = np.array([plan.pace(client) for client in plan.cohort]).T
        rate = rate / (self._bytes * max(plan.d, 1))  # in densities a second
        low, high = density * self.least, min(1.0, density * self.most)
        shares = finishing_together(before, rate, density, low, high)
        self._densities = dict(zip(plan.cohort, shares.tolist(), strict=True))

    def compressor(self, client: str) -> Compressor:
        """Return the compressor with the client's density."""
        return with_density(self.base, self._densities[client])

    def observe(self, report: RoundReport, updates: Sequence[Update]) -> None:
        """Measure what a coordinate takes on the wire."""
        sent = sum(update.compressed.nnz for update in updates)
        if sent:
            self._bytes = sum(update.payload_bytes for update in updates) / sent

    def state_dict(self) -> dict[str, float]:
        """Return the measured bytes."""
        return {"bytes": self._bytes}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Undo `state_dict`."""
        self._bytes = float(state["bytes"])


def finishing_together(
    before: NDArray[np.float64], rate: NDArray[np.float64], mean: float, low: float, high: float
) -> NDArray[np.float64]:
    """Return ``clip((T - before) rate, low, high)`` for the T at which its mean is `mean`; by bisection."""

    def shares(end: float) -> NDArray[np.float64]:
        return np.clip((end - before) * rate, low, high)

    start, end = 0.0, float(np.max(before + high / rate))
    for _ in range(100):
        middle = 0.5 * (start + end)
        if shares(middle).mean() < mean:
            start = middle
        else:
            end = middle
    return shares(end)
