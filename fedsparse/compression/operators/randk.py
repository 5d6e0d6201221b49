"""Rand-k: k coordinates chosen uniformly at random."""

from dataclasses import dataclass

import numpy as np

from fedsparse.compression.base import Claim, Indices, Vector, register_sparsifier
from fedsparse.compression.operators.topk import FixedCount


@register_sparsifier
@dataclass(frozen=True)
class RandK(FixedCount):
    """Keep k coordinates chosen uniformly without replacement, unscaled.

    ``E||x - C(x)||^2 = (1 - k/d) ||x||^2`` (Stich et al. 2018, Lemma A.1). The positions follow from a seed of 8 bytes,
    so that they cost nothing on the wire.
    """

    name = "randk"
    summary = "k coordinates at random"
    source = "Stich et al. 2018, eq. (4)"
    examples = ("randk(density=0.1)", "randk(k=1)", "randk(density=0.9)")
    seeded = True

    def select(self, x: Vector, rng: np.random.Generator) -> Indices | None:
        d, k = x.size, self.max_kept(x.size)
        if k > d // 2:
            left_out = uniform_subset(d, d - k, rng)
            return np.delete(np.arange(d, dtype=np.int64), left_out)
        return uniform_subset(d, k, rng)

    def claim(self, d: int) -> Claim:
        return Claim(relative=1.0 - self.max_kept(d) / max(d, 1), random=True)


def uniform_subset(d: int, k: int, rng: np.random.Generator) -> Indices:
    """Return k of 0 .. d-1, each subset equally likely, sorted.

    Built on the raw bit stream alone: NumPy promises that to stay the same in every version, unlike
    ``Generator.choice``, and sender and receiver may run different versions.
    """
    if k == 0:
        return np.empty(0, dtype=np.int64)
    draws = np.empty(0, dtype=np.uint64)
    limit = np.uint64(2**64 - 2**64 % d) if 2**64 % d else None  # beyond it the remainder would be biased
    while True:
        fresh = rng.bit_generator.random_raw(k + k // 4 + 8)
        if limit is not None:
            fresh = fresh[fresh < limit]
        draws = np.concatenate([draws, fresh % np.uint64(d)])
        distinct, first = np.unique(draws, return_index=True)
        if distinct.size >= k:
            # The first k distinct draws, in the order drawn: what remains is a uniform subset.
            order = np.argsort(first, kind="stable")[:k]
            return np.sort(distinct[order]).astype(np.int64)
