"""Operators that work on blocks of neighbouring coordinates."""

from dataclasses import dataclass

import numpy as np

from fedsparse.compression.base import (
    Claim,
    Indices,
    Sparsifier,
    Vector,
    check_number,
    check_whole,
    kept_count,
    register_sparsifier,
)
from fedsparse.compression.operators.randk import uniform_subset


@register_sparsifier
@dataclass(frozen=True)
class BlockRandK(Sparsifier):
    """Keep one contiguous run of ``round(density d)`` coordinates that starts anywhere, cyclically.

    Each coordinate is kept with probability k/d, so ``E||x - C(x)||^2 = (1 - k/d) ||x||^2`` as for Rand-k, while memory
    is read in order (block-random-k of Xu et al. 2021, GRACE). The position costs nothing on the wire.

    Parameters
    ----------
    density : float
        Kept fraction k/d.
    """

    density: float

    name = "block_randk"
    summary = "one random run of neighbouring coordinates"
    source = "Xu et al. 2021 (GRACE), block Random-k"
    examples = ("block_randk(density=0.1)", "block_randk(density=0.9)")
    seeded = True

    def __post_init__(self) -> None:
        check_number(self.name, "density", self.density, 0.0, 1.0, open_low=True)

    def select(self, x: Vector, rng: np.random.Generator) -> Indices | None:
        if x.size == 0:
            return np.empty(0, dtype=np.int64)
        start = int(uniform_subset(x.size, 1, rng)[0])
        return np.sort((start + np.arange(self.max_kept(x.size), dtype=np.int64)) % x.size)

    def claim(self, d: int) -> Claim:
        return Claim(relative=1.0 - self.max_kept(d) / max(d, 1), random=True)

    def max_kept(self, d: int) -> int:
        return kept_count(d, self.density)


@register_sparsifier
@dataclass(frozen=True)
class ChunkedTopK(Sparsifier):
    """Keep the `k` largest magnitudes of every chunk of `chunk` coordinates (SparseLoCo, Sarfi et al. 2025).

    Each chunk is a Top-k contraction with factor k/chunk, hence so is the whole; no chunk is ever left out, and chunks
    fit a cache or a GPU block. A last, shorter chunk keeps its share, rounded up.

    Parameters
    ----------
    chunk, k : int
        Length of a chunk and what is kept of it.
    """

    chunk: int = 4096
    k: int = 64

    name = "chunked_topk"
    summary = "the k largest magnitudes of each chunk"
    source = "Sarfi et al. 2025 (SparseLoCo)"
    examples = ("chunked_topk(chunk=16, k=2)", "chunked_topk(chunk=1, k=1)", "chunked_topk(chunk=1000, k=1)")

    def __post_init__(self) -> None:
        check_whole(self.name, "chunk", self.chunk, 1, 2**24)
        check_whole(self.name, "k", self.k, 1, self.chunk)

    def select(self, x: Vector, rng: np.random.Generator) -> Indices | None:
        whole = x.size - x.size % self.chunk
        magnitude = np.abs(x)
        found = []
        if whole:
            table = magnitude[:whole].reshape(-1, self.chunk)
            # Stable order on the negative: among equals the lower position wins, on every machine.
            best = np.argsort(-table, axis=1, kind="stable")[:, : self.k]
            found.append((np.sort(best, axis=1) + self.chunk * np.arange(len(table))[:, None]).reshape(-1))
        if whole < x.size:
            rest = np.argsort(-magnitude[whole:], kind="stable")[: self._share(x.size - whole)]
            found.append(np.sort(rest) + whole)
        kept = np.concatenate(found).astype(np.int64) if found else np.empty(0, dtype=np.int64)
        return kept[magnitude[kept] > 0]

    def _share(self, length: int) -> int:
        return -(-length * self.k // self.chunk)

    def claim(self, d: int) -> Claim:
        return Claim(relative=1.0 - self.k / self.chunk if d else 0.0)

    def max_kept(self, d: int) -> int:
        return d // self.chunk * self.k + self._share(d % self.chunk)
