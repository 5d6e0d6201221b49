"""Sign with one scale."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import Claim, Quantizer, Vector, check_whole, register_quantizer


@register_quantizer
@dataclass(frozen=True)
class Sign(Quantizer):
    """``Q(x) = (||x||_1 / k) sign(x)``: one bit a value, the scale is the mean magnitude of the kept values.

    ``||x - Q(x)||^2 = ||x||^2 - ||x||_1^2 / k <= (1 - 1/k) ||x||^2`` (Karimireddy et al. 2019, Lemma 8; SignComp_k with
    m = 1 of Basu et al. 2019, Definition 4). With another norm m the scale is ``||x||_m / k`` and the factor k^(2/m -
    2) in place of 1/k (Lemma 3 there). Zero counts as positive.

    Parameters
    ----------
    norm : int
        m, at least 1.
    """

    norm: int = 1

    name = "sign"
    summary = "one bit a value, scaled by the mean magnitude (or another norm)"
    source = "Basu et al. 2019, Definition 4"
    examples = ("sign", "sign(norm=2)")

    def __post_init__(self) -> None:
        check_whole(self.name, "norm", self.norm, 1, 64)

    @property
    def alphabet(self) -> int | None:
        return 2

    def quantize(self, values: Vector, rng: np.random.Generator) -> tuple[NDArray[np.generic], Vector]:
        scale = 0.0
        if values.size:
            magnitude = np.abs(values).astype(np.float64)
            largest = float(magnitude.max()) or 1.0  # divided out, so that no power overflows
            scale = largest * float(((magnitude / largest) ** self.norm).sum() ** (1 / self.norm)) / values.size
        return (values >= 0).astype(np.uint8), np.array([scale], dtype=np.float32)

    def dequantize(self, codes: NDArray[np.generic], scales: Vector, k: int) -> Vector:
        values: Vector = np.where(codes != 0, scales[0], -scales[0])
        return values

    def claim(self, k: int) -> Claim:
        return Claim(relative=1.0 - (1.0 / max(k, 1) if self.norm == 1 else max(k, 1) ** (2.0 / self.norm - 2.0)))

    def formula_bits(self, k: int) -> float:
        return float(k + 32)
