"""Sign with one scale."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import Claim, Quantizer, Vector, register_quantizer


@register_quantizer
@dataclass(frozen=True)
class Sign(Quantizer):
    """``Q(x) = (||x||_1 / k) sign(x)``: one bit a value, the scale is the mean magnitude of the kept values.

    ``||x - Q(x)||^2 = ||x||^2 - ||x||_1^2 / k <= (1 - 1/k) ||x||^2`` (Karimireddy et al. 2019, Lemma 8; SignComp_k with
    m = 1 of Basu et al. 2019, Definition 4). Zero counts as positive.
    """

    name = "sign"
    summary = "one bit a value, scaled by the mean magnitude"
    source = "Basu et al. 2019, Definition 4 (m = 1)"
    examples = ("sign",)

    @property
    def alphabet(self) -> int | None:
        return 2

    def quantize(self, values: Vector, rng: np.random.Generator) -> tuple[NDArray[np.generic], Vector]:
        scale = np.abs(values).mean(dtype=np.float64) if values.size else 0.0
        return (values >= 0).astype(np.uint8), np.array([scale], dtype=np.float32)

    def dequantize(self, codes: NDArray[np.generic], scales: Vector, k: int) -> Vector:
        values: Vector = np.where(codes != 0, scales[0], -scales[0])
        return values

    def claim(self, k: int) -> Claim:
        return Claim(relative=1.0 - 1.0 / max(k, 1))

    def formula_bits(self, k: int) -> float:
        return float(k + 32)
