"""STC's ternary values: two after sparsification, since zeros are not sent."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import Claim, Quantizer, Vector, check_number, register_quantizer


@register_quantizer
@dataclass(frozen=True)
class Ternary(Quantizer):
    """Each value becomes -mu, 0 or mu: 0 below `cut` times the largest magnitude, mu the mean magnitude of the rest.

    After Top-k with ``cut=0`` this is Sparse Ternary Compression (Sattler et al. 2019, Algorithm 1), where all k values
    are -mu or mu. ``||x - Q(x)||^2 = ||x||^2 - n mu^2 <= (1 - 1/k) ||x||^2``, since the n kept values include the
    largest (n mu^2 = (sum of kept)^2 / n >= max^2 >= ||x||^2 / k, as each kept value is at least their mean's share).

    Parameters
    ----------
    cut : float
        From 0 to 1.
    """

    cut: float = 0.0

    name = "ternary"
    summary = "-mu, 0 or mu; after Top-k this is STC"
    source = "Sattler et al. 2019 (STC), Algorithm 1"
    examples = ("ternary", "ternary(cut=0.5)")

    def __post_init__(self) -> None:
        check_number(self.name, "cut", self.cut, 0.0, 1.0)

    @property
    def alphabet(self) -> int | None:
        return 3

    @property
    def zero_code(self) -> int:  # type: ignore[override]
        return 1

    def quantize(self, values: Vector, rng: np.random.Generator) -> tuple[NDArray[np.generic], Vector]:
        magnitude = np.abs(values)
        kept = (magnitude >= np.float32(self.cut) * magnitude.max(initial=0)) & (magnitude > 0)
        mu = magnitude[kept].mean(dtype=np.float64) if kept.any() else 0.0
        codes = 1 + np.where(kept, np.sign(values), 0)
        return codes.astype(np.uint8), np.array([mu], dtype=np.float32)

    def dequantize(self, codes: NDArray[np.generic], scales: Vector, k: int) -> Vector:
        values: Vector = (codes.astype(np.float32) - np.float32(1)) * scales[0]
        return values

    def claim(self, k: int) -> Claim:
        return Claim(relative=1.0 - 1.0 / max(k, 1))

    def formula_bits(self, k: int) -> float:
        return float(k + 32)
