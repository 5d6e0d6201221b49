"""Powers of two, and bfloat16."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import Claim, Quantizer, Vector, register_quantizer

_LOWEST = -126  # the smallest exponent of a normal float32


@register_quantizer
@dataclass(frozen=True)
class Natural(Quantizer):
    """Round each value to one of the two powers of two around it, so that the mean is right.

    ``E||x - Q(x)||^2 <= (1/8) ||x||^2``, unbiased (Horvath et al. 2022, Theorem 1), for values of at least 2^-126 in
    magnitude; smaller ones become zero or 2^-126.
    """

    name = "natural"
    summary = "stochastic rounding to powers of two"
    source = "Horvath et al. 2022, Theorem 1"
    examples = ("natural",)
    num_scales = 0
    zero_code = 0

    @property
    def alphabet(self) -> int | None:
        return 512  # zero, then 255 exponents for each sign

    def quantize(self, values: Vector, rng: np.random.Generator) -> tuple[NDArray[np.generic], Vector]:
        magnitude = np.abs(values.astype(np.float64))
        exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**_LOWEST))).clip(_LOWEST, 127)
        below = np.ldexp(1.0, exponent.astype(np.int64))
        tiny = magnitude < 2.0**_LOWEST
        up = rng.random(values.size) < np.where(tiny, magnitude * 2.0**-_LOWEST, (magnitude - below) / below)
        # float32 ends below 2^128, so that the topmost interval rounds down.
        exponent = np.minimum(exponent + (up & ~tiny), 127)
        codes = 1 + (exponent - _LOWEST) + 255 * (values < 0)
        return np.where(tiny & ~up, 0, codes).astype(np.uint16), np.empty(0, dtype=np.float32)

    def dequantize(self, codes: NDArray[np.generic], scales: Vector, k: int) -> Vector:
        number = codes.astype(np.int64) - 1
        negative = number >= 255
        values = np.ldexp(1.0, (number - 255 * negative + _LOWEST).clip(_LOWEST, 127)) * np.where(negative, -1.0, 1.0)
        return np.where(number < 0, 0.0, values).astype(np.float32)

    def claim(self, k: int) -> Claim:
        return Claim(relative=0.125, unbiased=True, random=True)

    def formula_bits(self, k: int) -> float:
        return 9.0 * k


@register_quantizer
@dataclass(frozen=True)
class BFloat16(Quantizer):
    """float32 with its lower 16 bits rounded away, to nearest even: 8 significant bits, float32's range.

    ``||x - Q(x)||^2 <= 2^-16 ||x||^2`` for normal values; subnormal ones add an absolute error below 2^-134 each.
    """

    name = "bfloat16"
    summary = "the upper half of float32"
    source = "Kalamkar et al. 2019"
    examples = ("bfloat16",)
    num_scales = 0

    @property
    def alphabet(self) -> int | None:
        return 2**16

    def quantize(self, values: Vector, rng: np.random.Generator) -> tuple[NDArray[np.generic], Vector]:
        raw = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        half = np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))
        codes = (raw + half) >> np.uint32(16)
        # Rounding up beyond the largest number would give infinity.
        infinite = (codes & 0x7FFF) == 0x7F80
        return (codes - infinite).astype(np.uint16), np.empty(0, dtype=np.float32)

    def dequantize(self, codes: NDArray[np.generic], scales: Vector, k: int) -> Vector:
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def claim(self, k: int) -> Claim:
        return Claim(absolute=k * 2.0**-266, relative=2.0**-16)

    def formula_bits(self, k: int) -> float:
        return 16.0 * k
