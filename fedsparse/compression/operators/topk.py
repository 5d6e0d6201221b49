"""Top-k: the k coordinates of largest magnitude."""

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from fedsparse.compression.base import (
    Claim,
    Indices,
    Sparsifier,
    Vector,
    check_number,
    check_whole,
    kept_count,
    largest,
    register_sparsifier,
)
from fedsparse.errors import ConfigError


@dataclass(frozen=True)
class FixedCount(Sparsifier):
    """What Top-k and Rand-k share: a count k, given as such or as a density k/d."""

    density: float | None = None
    k: int | None = None

    def __post_init__(self) -> None:
        if (self.density is None) == (self.k is None):
            raise ConfigError(f"{self.name} needs exactly one of density (kept fraction) and k (kept count).")
        if self.density is not None:
            check_number(self.name, "density", self.density, 0.0, 1.0, open_low=True)
        else:
            check_whole(self.name, "k", self.k, 1)

    def max_kept(self, d: int) -> int:
        """Return k: at least one coordinate of a non-empty vector, at most all."""
        return kept_count(d, self.density, self.k)

    def claim(self, d: int) -> Claim:
        return Claim(relative=1.0 - self.max_kept(d) / max(d, 1))


@register_sparsifier
@dataclass(frozen=True)
class TopK(FixedCount):
    """Keep the k largest magnitudes; ties go to the lower position, zeros are never sent.

    ``||x - C(x)||^2 <= (1 - k/d) ||x||^2`` for every x (Stich et al. 2018, Lemma A.1).
    """

    name = "topk"
    summary = "the k largest magnitudes"
    source = "Stich et al. 2018, eq. (4)"
    examples = ("topk(density=0.01)", "topk(k=1)", "topk(density=1.0)")
    unsent = MappingProxyType({"density": 1.0, "k": None})

    def select(self, x: Vector, rng: np.random.Generator) -> Indices | None:
        return largest(np.abs(x), self.max_kept(x.size))
