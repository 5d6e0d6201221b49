"""Stochastic rounding to levels between the smallest and the largest value."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import Claim, Quantizer, Vector, check_whole, register_quantizer


@register_quantizer
@dataclass(frozen=True)
class Levels(Quantizer):
    """Round x_i to one of s + 1 equidistant levels from min(x) to max(x), up or down so that the mean is right.

    Unbiased; each error is at most one level's width: ``E||x - Q(x)||^2 <= k (max - min)^2 / (4 s^2) <= k/(2 s^2)
    ||x||^2`` (the stochastic s-level quantizer of Suresh et al. 2017, Section 2.2; Basu et al. 2019, Section 2.1).
    Three levels make it 2-bit, fifteen 4-bit.

    Parameters
    ----------
    levels : int
        s, the number of steps: 3 for 2 bits, 15 for 4 bits, 255 for 8 bits.
    """

    levels: int = 15

    name = "levels"
    summary = "stochastic rounding between minimum and maximum; levels=3 is 2-bit, 15 is 4-bit"
    source = "Suresh et al. 2017, Section 2.2; Basu et al. 2019, Section 2.1"
    examples = ("levels(levels=3)", "levels(levels=15)", "levels(levels=1)")
    num_scales = 2

    def __post_init__(self) -> None:
        check_whole(self.name, "levels", self.levels, 1, 65_535)

    @property
    def alphabet(self) -> int | None:
        return self.levels + 1

    def quantize(self, values: Vector, rng: np.random.Generator) -> tuple[NDArray[np.generic], Vector]:
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
        width = (high - low) / self.levels
        position = (values.astype(np.float64) - low) / width if width > 0 else np.zeros(values.size)
        codes = np.floor(position + rng.random(values.size)).clip(0, self.levels)
        return codes.astype(self.code_dtype), np.array([low, high], dtype=np.float32)

    def dequantize(self, codes: NDArray[np.generic], scales: Vector, k: int) -> Vector:
        low, high = np.float64(scales[0]), np.float64(scales[1])
        return (low + codes.astype(np.float64) * ((high - low) / self.levels)).astype(np.float32)

    def claim(self, k: int) -> Claim:
        # (max - min)^2 <= 2 (max^2 + min^2) <= 2 ||x||^2; the variance of one rounding is at most a quarter step
        # squared.
        return Claim(relative=k / (2.0 * self.levels**2) if k > 1 else 0.0, unbiased=True, random=True)

    def formula_bits(self, k: int) -> float:
        return float(k * int(self.levels).bit_length() + 64)
