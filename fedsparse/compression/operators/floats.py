"""Values as IEEE floating-point numbers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import Claim, Quantizer, Vector, register_quantizer


@register_quantizer
@dataclass(frozen=True)
class Float32(Quantizer):
    """Values as they are."""

    name = "float32"
    summary = "values as they are"
    source = "IEEE 754"
    examples = ("float32",)
    num_scales = 0

    @property
    def alphabet(self) -> int | None:
        return None

    def quantize(self, values: Vector, rng: np.random.Generator) -> tuple[NDArray[np.generic], Vector]:
        return values, np.empty(0, dtype=np.float32)

    def dequantize(self, codes: NDArray[np.generic], scales: Vector, k: int) -> Vector:
        return codes.astype(np.float32, copy=False)

    def claim(self, k: int) -> Claim:
        return Claim(unbiased=True)

    def formula_bits(self, k: int) -> float:
        return 32.0 * k


@register_quantizer
@dataclass(frozen=True)
class Float16(Quantizer):
    """Values as half precision, scaled by a power of two so that nothing overflows or vanishes.

    The largest magnitude is brought to [2^14, 2^15); the scaling is exact, so each value keeps its 11 significant bits:
    ``||x - Q(x)||^2 <= (2^-22 + k 2^-78) ||x||^2``, the second term being half precision's underflow.
    """

    name = "float16"
    summary = "half precision with one exact scale"
    source = "IEEE 754"
    examples = ("float16",)

    @property
    def alphabet(self) -> int | None:
        return None

    @property
    def code_dtype(self) -> np.dtype[np.generic]:
        return np.dtype(np.float16)

    def quantize(self, values: Vector, rng: np.random.Generator) -> tuple[NDArray[np.generic], Vector]:
        largest = float(np.max(np.abs(values), initial=0.0))
        # Exponents are bounded so that the scale itself is a normal float32.
        exponent = int(np.clip(np.frexp(largest)[1] - 15, -126, 126)) if largest else 0
        codes = np.ldexp(values.astype(np.float64), -exponent).astype(np.float16)
        return codes, np.array([np.ldexp(1.0, exponent)], dtype=np.float32)

    def dequantize(self, codes: NDArray[np.generic], scales: Vector, k: int) -> Vector:
        values: Vector = np.multiply(codes, scales[0], dtype=np.float32)
        return values

    def claim(self, k: int) -> Claim:
        return Claim(relative=2.0**-22 + k * 2.0**-78)

    def formula_bits(self, k: int) -> float:
        return 16.0 * k + 32.0
