"""DRIVE: one bit a coordinate after a random rotation."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import Claim, Quantizer, Vector, register_quantizer


@register_quantizer
@dataclass(frozen=True)
class Drive(Quantizer):
    """Rotate by a randomized Hadamard transform, send signs and one scale, rotate back.

    ``Q(x) = S R^-1 sign(R x)`` with ``S = ||R x||_1 / n``, which minimises the error for these signs (Vargaftik et al.
    2021, Theorem 2): about ``(1 - 2/pi) ||x||^2`` for long vectors whatever their distribution, where plain sign can
    lose nearly all. The vector is padded with zeros to a power of two n; for every rotation the error is at most ``(1 -
    1/n) ||x||^2``.

    The rotation's signs follow from a fixed seed and n: they must be independent of x, and sender and receiver share
    them.
    """

    name = "drive"
    summary = "one bit a coordinate after a random rotation; for dense updates"
    source = "Vargaftik et al. 2021 (DRIVE), Section 4"
    examples = ("drive",)

    @property
    def alphabet(self) -> int | None:
        return 2

    def num_codes(self, k: int) -> int:
        return 1 << max(0, k - 1).bit_length() if k else 0

    def quantize(self, values: Vector, rng: np.random.Generator) -> tuple[NDArray[np.generic], Vector]:
        if not values.size:
            return np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.float32)
        n = self.num_codes(values.size)
        padded = np.zeros(n, dtype=np.float64)
        padded[: values.size] = values
        rotated = hadamard(padded * rotation_signs(n))
        scale = np.abs(rotated).mean()
        return (rotated >= 0).astype(np.uint8), np.array([scale], dtype=np.float32)

    def dequantize(self, codes: NDArray[np.generic], scales: Vector, k: int) -> Vector:
        if not k:
            return np.empty(0, dtype=np.float32)
        signs = 2.0 * codes.astype(np.float64) - 1.0
        # Sums of +-1 are exact in float64 before the one scaling, so every machine gets the same bits.
        back = hadamard(signs, normalize=False) * rotation_signs(codes.size)
        factor = float(scales[0]) / np.sqrt(codes.size)
        values: Vector = (back[:k] * factor).astype(np.float32)
        return values

    def claim(self, k: int) -> Claim:
        return Claim(relative=1.0 - 1.0 / max(self.num_codes(k), 1))

    def formula_bits(self, k: int) -> float:
        return float(self.num_codes(k) + 32)


def rotation_signs(n: int) -> NDArray[np.float64]:
    """Return n random signs that are the same for everyone."""
    raw = np.random.PCG64(0x0D21_5E00 + n).random_raw(-(-n // 64))
    bits = np.unpackbits(np.atleast_1d(raw).astype("<u8").view(np.uint8))[:n]
    return 2.0 * bits.astype(np.float64) - 1.0


def hadamard(x: NDArray[np.float64], *, normalize: bool = True) -> NDArray[np.float64]:
    """Return the (orthonormal) Walsh-Hadamard transform of a vector whose length is a power of two, in O(n log n)."""
    x = x.copy()
    n, half = x.size, 1
    while half < n:
        pairs = x.reshape(-1, 2, half)
        total = pairs[:, 0] + pairs[:, 1]
        pairs[:, 1] = pairs[:, 0] - pairs[:, 1]
        pairs[:, 0] = total
        half *= 2
    return x / np.sqrt(n) if normalize else x
