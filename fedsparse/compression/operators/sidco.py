"""SIDCo: a threshold from a distribution fitted to the magnitudes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import (
    Claim,
    Indices,
    Sparsifier,
    Vector,
    check_number,
    check_whole,
    register_sparsifier,
)
from fedsparse.errors import unknown_name

FITS = ("exponential", "gamma", "pareto")


@register_sparsifier
@dataclass(frozen=True)
class SIDCo(Sparsifier):
    """Keep ``|x_i| >= eta`` where eta is the wanted quantile of a sparsity-inducing distribution fitted to |x|.

    With more than one stage the tail beyond the previous threshold is fitted again, so that the last fit describes the
    far tail (Abdelmoniem et al. 2021, Algorithm 1; equations 6 (exponential), 12 (gamma) and 17 (generalised Pareto)).
    The number of coordinates is near the wanted one but not fixed; no bound is claimed.

    Parameters
    ----------
    density : float
        Wanted kept fraction k/d.
    fit : {"exponential", "gamma", "pareto"}
        Distribution of the first stage; later stages fit an exponential to the excess (Pareto: a generalised Pareto).
    stages : int
        Number of fits; each of the first ones keeps a quarter.
    """

    density: float
    fit: str = "exponential"
    stages: int = 2

    name = "sidco"
    summary = "threshold from a fitted distribution, in stages"
    source = "Abdelmoniem et al. 2021 (SIDCo), Algorithm 1"
    examples = (
        "sidco(density=0.1)",
        'sidco(density=0.05, fit="gamma", stages=1)',
        'sidco(density=0.01, fit="pareto", stages=3)',
    )

    def __post_init__(self) -> None:
        check_number(self.name, "density", self.density, 0.0, 1.0, open_low=True)
        check_whole(self.name, "stages", self.stages, 1, 10)
        if self.fit not in FITS:
            raise unknown_name("fit of sidco(...):", self.fit, FITS)

    def select(self, x: Vector, rng: np.random.Generator) -> Indices | None:
        magnitude = np.abs(x)
        return np.flatnonzero((magnitude >= self.threshold(magnitude)) & (magnitude > 0))

    def threshold(self, magnitude: Vector) -> float:
        """Return eta for the magnitudes |x|, shape (d,)."""
        # Each early stage keeps a quarter of what it sees; the last one makes up the rest.
        early = min(self.stages - 1, int(np.log(1 / self.density) / np.log(4)))
        tail, eta = magnitude[magnitude > 0].astype(np.float64), 0.0
        for stage in range(early + 1):
            share = 0.25 if stage < early else self.density * 4.0**early
            if tail.size < 2 or share >= 1.0:
                break
            step = self._excess(tail - eta, share, first=stage == 0)
            if not np.isfinite(step) or step < 0:
                break
            eta += step
            tail = tail[tail >= eta]
        return float(eta)

    def _excess(self, values: NDArray[np.float64], share: float, *, first: bool) -> float:
        """Return the value beyond which the fitted distribution has the fraction `share` of its mass."""
        mean, variance = float(values.mean()), float(values.var())
        if mean <= 0.0:
            return 0.0
        if self.fit == "pareto" and variance > 0:
            shape = 0.5 * (1.0 - mean**2 / variance)
            scale = 0.5 * mean * (mean**2 / variance + 1.0)
            if abs(shape) > 1e-6:
                return float(scale / shape * (np.exp(-shape * np.log(share)) - 1.0))
        if self.fit == "gamma" and first:
            from math import lgamma

            s = float(np.log(mean) - np.log(np.maximum(values, 1e-300)).mean())
            if s > 0:
                alpha = (3.0 - s + np.sqrt((s - 3.0) ** 2 + 24.0 * s)) / (12.0 * s)
                return float(max(0.0, -mean / alpha * (np.log(share) + lgamma(alpha))))
        return float(mean * np.log(1.0 / share))

    def claim(self, d: int) -> Claim:
        return Claim(relative=1.0)

    def max_kept(self, d: int) -> int:
        return d
