"""Hard threshold: every coordinate whose magnitude reaches lambda."""

from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType

import numpy as np

from fedsparse.compression.base import (
    BLOCK,
    Claim,
    Indices,
    Sparsifier,
    Vector,
    add_in_place,
    check_number,
    check_whole,
    kept_count,
    largest,
    register_sparsifier,
)
from fedsparse.errors import ConfigError

RULE = "1/(2*sqrt(k))"


@register_sparsifier
@dataclass(frozen=True)
class HardThreshold(Sparsifier):
    """Keep x_i where ``|x_i| >= lam``.

    ``||x - C(x)||^2 <= d lam^2`` (Sahu et al. 2021, Definition 3 and Remark 2). With error feedback and one constant
    lam it minimises the total error over the whole training at a given number of sent coordinates (Theorem 3).

    Parameters
    ----------
    lam : float or "1/(2*sqrt(k))"
        Threshold, in units of the model update (Delta + e): after the learning rate and all local steps. The authors'
        network code thresholds gradients before the learning rate; their lam is ours divided by the step size. The text
        is their rule for a wanted count k of each round (Section 5.1), and needs `density` or `k`.
    density, k : float, int
        Of the rule: the wanted kept fraction k/d, or count. The count that really is kept depends on the update.
    at_most : int, optional
        Keep no more than this many, the largest: for a budget that must not be overdrawn.
    """

    lam: float | str
    density: float | None = None
    k: int | None = None
    at_most: int | None = None

    name = "hard_threshold"
    summary = "every magnitude that reaches lam"
    source = "Sahu et al. 2021, Definition 3"
    unsent = MappingProxyType({"lam": 1.0, "density": None, "k": None, "at_most": None})
    examples = (
        "hard_threshold(lam=0.5)",
        "hard_threshold(lam=1e-06)",
        "hard_threshold(lam=1000.0)",
        "hard_threshold(lam=0.01, at_most=3)",
        'hard_threshold(lam="1/(2*sqrt(k))", density=0.01)',
    )

    def __post_init__(self) -> None:
        if isinstance(self.lam, str):
            self._check_rule(self.lam)
        else:
            # Beyond these, lam is 0 or infinite in float32.
            check_number(self.name, "lam", self.lam, 1.2e-38, 3.4e38)
            if self.density is not None or self.k is not None:
                raise ConfigError(f'{self.name}: density and k belong to the rule lam="{RULE}", not to a number.')
        if self.at_most is not None:
            check_whole(self.name, "at_most", self.at_most, 0)

    def _check_rule(self, text: str) -> None:
        if "".join(text.split()) != RULE:
            raise ConfigError(f'{self.name}: lam must be a number above 0 or the rule "{RULE}", got {text!r}.')
        if (self.density is None) == (self.k is None):
            raise ConfigError(f'{self.name}: the rule lam="{RULE}" needs exactly one of density and k.')
        if self.density is not None:
            check_number(self.name, "density", self.density, 0.0, 1.0, open_low=True)
        else:
            check_whole(self.name, "k", self.k, 1)

    def threshold(self, d: int) -> float:
        """Return lam for vectors of length `d`."""
        if isinstance(self.lam, str):
            return 0.5 / sqrt(kept_count(d, self.density, self.k) or 1)
        return self.lam

    def select(self, x: Vector, rng: np.random.Generator) -> Indices | None:
        return self._capped(x, self._scan(x, None))

    def select_compensated(self, update: Vector, residual: Vector, rng: np.random.Generator) -> Indices | None:
        return self._capped(residual, self._scan(residual, update))

    def _capped(self, x: Vector, kept: Indices) -> Indices:
        if self.at_most is None or kept.size <= self.at_most:
            return kept
        return np.sort(kept[largest(np.abs(x[kept]), self.at_most)])

    def _scan(self, x: Vector, addend: Vector | None) -> Indices:
        """Add (if asked), take magnitudes, compare and collect, one cache-sized block at a time."""
        magnitude = np.empty(min(BLOCK, x.size), dtype=np.float32)
        reached = np.empty(magnitude.size, dtype=np.bool_)
        found: list[Indices] = []
        lam = np.float32(self.threshold(x.size))
        for start in range(0, x.size, BLOCK):
            block = x[start : start + BLOCK]
            if addend is not None:
                add_in_place(block, addend[start : start + BLOCK])
            np.abs(block, out=magnitude[: block.size])
            np.greater_equal(magnitude[: block.size], lam, out=reached[: block.size])
            kept = np.flatnonzero(reached[: block.size])
            if kept.size:
                kept += start
                found.append(kept)
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def claim(self, d: int) -> Claim:
        missed = 0.0 if self.at_most is None else max(0.0, 1.0 - self.at_most / max(d, 1))
        return Claim(absolute=d * float(np.float32(self.threshold(d))) ** 2, relative=missed)

    def max_kept(self, d: int) -> int:
        return d if self.at_most is None else min(d, self.at_most)
