"""Hard threshold: every coordinate whose magnitude reaches lambda."""

from dataclasses import dataclass

import numpy as np

from fedsparse.compression.base import (
    BLOCK,
    Claim,
    Indices,
    Sparsifier,
    Vector,
    add_in_place,
    check_number,
    register_sparsifier,
)


@register_sparsifier
@dataclass(frozen=True)
class HardThreshold(Sparsifier):
    """Keep x_i where ``|x_i| >= lam``.

    ``||x - C(x)||^2 <= d lam^2`` (Sahu et al. 2021, Definition 3 and Remark 2). With error feedback and one constant
    lam it minimises the total error over the whole training at a given number of sent coordinates (Theorem 3).

    Parameters
    ----------
    lam : float
        Threshold, in units of the model update (Delta + e): after the learning rate and all local steps. The authors'
        network code thresholds gradients before the learning rate; their lam is ours divided by the step size.
    """

    lam: float

    name = "hard_threshold"
    summary = "every magnitude that reaches lam"
    source = "Sahu et al. 2021, Definition 3"
    examples = ("hard_threshold(lam=0.5)", "hard_threshold(lam=1e-06)", "hard_threshold(lam=1000.0)")

    def __post_init__(self) -> None:
        # Beyond these, lam is 0 or infinite in float32.
        check_number(self.name, "lam", self.lam, 1.2e-38, 3.4e38)

    def select(self, x: Vector, rng: np.random.Generator) -> Indices | None:
        return self._scan(x, None)

    def select_compensated(self, update: Vector, residual: Vector, rng: np.random.Generator) -> Indices | None:
        return self._scan(residual, update)

    def _scan(self, x: Vector, addend: Vector | None) -> Indices:
        """Add (if asked), take magnitudes, compare and collect, one cache-sized block at a time."""
        magnitude = np.empty(min(BLOCK, x.size), dtype=np.float32)
        reached = np.empty(magnitude.size, dtype=np.bool_)
        found: list[Indices] = []
        lam = np.float32(self.lam)
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
        return Claim(absolute=d * float(np.float32(self.lam)) ** 2)

    def max_kept(self, d: int) -> int:
        return d
