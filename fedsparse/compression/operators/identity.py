"""Send every coordinate."""

from dataclasses import dataclass

import numpy as np

from fedsparse.compression.base import Claim, Indices, Sparsifier, Vector, register_sparsifier


@register_sparsifier
@dataclass(frozen=True)
class Identity(Sparsifier):
    """Keep all coordinates: C(x) = x."""

    name = "none"
    summary = "send every coordinate"
    source = "McMahan et al. 2017 (FedAvg)"
    examples = ("none",)

    def select(self, x: Vector, rng: np.random.Generator) -> Indices | None:
        return None

    def claim(self, d: int) -> Claim:
        return Claim(unbiased=True)

    def max_kept(self, d: int) -> int:
        return d
