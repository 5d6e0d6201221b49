"""Ultra-sparsification: less than one coordinate a round, on average."""

from dataclasses import dataclass

import numpy as np

from fedsparse.compression.base import Claim, Indices, Sparsifier, Vector, check_number, register_sparsifier


@register_sparsifier
@dataclass(frozen=True)
class Ultra(Sparsifier):
    """With probability k < 1 keep one uniformly random coordinate, else nothing.

    ``E||x - C(x)||^2 = (1 - k/d) ||x||^2`` (Stich et al. 2018, Remark 2.3 on k < 1).

    Parameters
    ----------
    k : float
        Expected number of coordinates, in (0, 1].
    """

    k: float

    name = "ultra"
    summary = "one random coordinate with probability k, else nothing"
    source = "Stich et al. 2018, Section 2.2"
    examples = ("ultra(k=0.5)", "ultra(k=1.0)")

    def __post_init__(self) -> None:
        check_number(self.name, "k", self.k, 0.0, 1.0, open_low=True)

    def select(self, x: Vector, rng: np.random.Generator) -> Indices | None:
        kept = x.size > 0 and rng.random() < self.k
        return np.array([rng.integers(x.size)] if kept else [], dtype=np.int64)

    def claim(self, d: int) -> Claim:
        return Claim(relative=1.0 - self.k / max(d, 1), random=True)

    def max_kept(self, d: int) -> int:
        return min(d, 1)
