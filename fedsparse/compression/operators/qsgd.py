"""QSGD: unbiased stochastic rounding to s levels of the norm."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import Claim, Quantizer, Vector, check_whole, register_quantizer
from fedsparse.errors import ConfigError, unknown_name


@register_quantizer
@dataclass(frozen=True)
class QSGD(Quantizer):
    """``Q_s(x)_i = ||x||_2 sign(x_i) xi_i`` with xi_i in {l/s, (l+1)/s}, unbiased.

    ``E||x - Q_s(x)||^2 <= beta ||x||^2`` with ``beta = min(k/s^2, sqrt(k)/s)`` (Alistarh et al. 2017, Lemma 3.1; Basu
    et al. 2019, Definition 1). The norm is that of the k values that were kept.

    Parameters
    ----------
    levels : int
        s, from 1 to 32767.
    norm : {"l2", "max"}
        What the levels are fractions of. The largest magnitude in place of the 2-norm makes each rounding error at most
        half a step wide on average: beta = k/(4 s^2), far less in practice, since large k no longer means coarse levels
        (Alistarh et al. 2017, Section 4, as they used it in their experiments).
    scaled : bool
        Divide by 1 + beta: biased, but a contraction with factor 1/(1 + beta) for every beta, where the unscaled one is
        a contraction for beta < 1 only (Basu et al. 2019, Lemma 2).
    """

    levels: int = 16
    norm: str = "l2"
    scaled: bool = False

    name = "qsgd"
    summary = "stochastic rounding to s levels of the norm"
    source = "Alistarh et al. 2017, Lemma 3.1"
    examples = (
        "qsgd(levels=16)",
        "qsgd(levels=1)",
        "qsgd(levels=1000)",
        "qsgd(levels=4, scaled=true)",
        'qsgd(levels=8, norm="max")',
    )

    def __post_init__(self) -> None:
        check_whole(self.name, "levels", self.levels, 1, 32_767)
        if self.norm not in ("l2", "max"):
            raise unknown_name("norm of qsgd(...):", self.norm, ("l2", "max"))
        if not isinstance(self.scaled, bool):
            raise ConfigError(f"qsgd: scaled must be true or false, got {self.scaled!r}.")

    @property
    def alphabet(self) -> int | None:
        return 2 * self.levels + 1

    @property
    def zero_code(self) -> int:  # type: ignore[override]
        return self.levels

    def quantize(self, values: Vector, rng: np.random.Generator) -> tuple[NDArray[np.generic], Vector]:
        norm = np.float32(two_norm(values) if self.norm == "l2" else np.abs(values).max(initial=0.0))
        position = np.abs(values.astype(np.float64)) * (self.levels / float(norm) if norm else 0.0)
        level = np.floor(position + rng.random(values.size)).clip(max=self.levels)
        codes = self.levels + np.copysign(level, values)
        # The receiver may see fewer codes (zeros are not sent), so the factor is put into the scale here.
        sent = norm / np.float32(1 + self._beta(values.size)) if self.scaled else norm
        return codes.astype(self.code_dtype), np.array([sent], dtype=np.float32)

    def dequantize(self, codes: NDArray[np.generic], scales: Vector, k: int) -> Vector:
        signed = codes.astype(np.float32) - np.float32(self.levels)
        return signed * np.float32(scales[0] / np.float32(self.levels))

    def _beta(self, k: int) -> float:
        return qsgd_beta(k, self.levels) if self.norm == "l2" else k / (4.0 * self.levels**2)

    def claim(self, k: int) -> Claim:
        beta = self._beta(k)
        if self.scaled:
            return Claim(relative=beta / (1 + beta), random=True)
        return Claim(relative=beta, unbiased=True, random=True)

    def formula_bits(self, k: int) -> float:
        return float(k * (1 + np.ceil(np.log2(self.levels + 1))) + 32)


def qsgd_beta(k: int, levels: int) -> float:
    """Return beta_{k,s} = min(k/s^2, sqrt(k)/s), the relative variance of QSGD."""
    return float(min(k / levels**2, np.sqrt(k) / levels))


def two_norm(values: Vector) -> float:
    """Return the Euclidean norm, accumulated in float64; refuse one that float32 cannot hold."""
    norm = float(np.linalg.norm(values.astype(np.float64)))
    if norm > float(np.finfo(np.float32).max):
        raise ValueError(f"the norm of the update, {norm:.3g}, is beyond float32: training has diverged.")
    return norm
