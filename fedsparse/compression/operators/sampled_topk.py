"""Top-k with a threshold estimated from a sample, as in Deep Gradient Compression."""

from dataclasses import dataclass

import numpy as np

from fedsparse.compression.base import (
    Claim,
    Indices,
    Sparsifier,
    Vector,
    check_number,
    kept_count,
    largest,
    register_sparsifier,
)
from fedsparse.compression.operators.randk import uniform_subset


@register_sparsifier
@dataclass(frozen=True)
class SampledTopK(Sparsifier):
    """Keep what reaches the (1 - density) quantile of a random sample of the magnitudes.

    Where the sample's threshold lets through more than twice the wanted count, the largest of those are kept (the
    hierarchical selection of Lin et al. 2018, Section 3). No bound is claimed: a sample can miss the largest values.

    Parameters
    ----------
    density : float
        Wanted kept fraction k/d.
    sample : float
        Fraction of the coordinates that is looked at to find the threshold.
    """

    density: float
    sample: float = 0.01

    name = "sampled_topk"
    summary = "Top-k by a threshold from a random sample"
    source = "Lin et al. 2018 (DGC), Section 3"
    examples = ("sampled_topk(density=0.1, sample=0.5)", "sampled_topk(density=0.01)")

    def __post_init__(self) -> None:
        check_number(self.name, "density", self.density, 0.0, 1.0, open_low=True)
        check_number(self.name, "sample", self.sample, 0.0, 1.0, open_low=True)

    def select(self, x: Vector, rng: np.random.Generator) -> Indices | None:
        wanted = self._wanted(x.size)
        if wanted == 0:
            return np.empty(0, dtype=np.int64)
        magnitude = np.abs(x)
        # At least a few survivors must be expected in the sample for its quantile to mean anything.
        size = min(x.size, max(round(self.sample * x.size), round(10 / self.density)))
        seen = magnitude[uniform_subset(x.size, size, rng)]
        inside = max(1, round(self.density * size))
        threshold = np.partition(seen, size - inside)[size - inside]
        kept = np.flatnonzero((magnitude >= threshold) & (magnitude > 0))
        if kept.size > 2 * wanted:
            kept = kept[largest(magnitude[kept], wanted)]
        return kept

    def _wanted(self, d: int) -> int:
        return kept_count(d, self.density)

    def claim(self, d: int) -> Claim:
        return Claim(relative=1.0)

    def max_kept(self, d: int) -> int:
        return min(d, 2 * self._wanted(d))
