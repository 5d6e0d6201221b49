"""What an update of k coordinates takes on the wire: the law of the codec times what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression import Compressor, encode
from fedsparse.compression.operators.floats import Float32
from strategies.aggregation import Update

Floats = NDArray[np.float64]

INDEX_BITS = 1.5  # beyond log2(d/k): the entropy of a random set, log2(e), and what the codec misses of it
MEMORY = 0.7  # weight of the past against a new round


@dataclass
class Costs:
    """Bytes of an update: ``fixed + ratio k (log2(d/k) + 1.5 + b) / 8`` with b bits a value.

    Positions cost their entropy. How many bits a value takes depends on the quantizer and on the values themselves
    (exponents of floats are alike), so `ratio` is measured, and so are exact arrays that travel along.

    Parameters
    ----------
    base : Compressor
        Of which the quantizer counts.
    """

    base: Compressor
    ratio: float = 1.0
    exact: float = 0.0
    rounds: int = 0

    def __post_init__(self) -> None:
        quantizer = self.base.quantizer
        alphabet = quantizer.alphabet
        self._raw_bits = 8.0 * quantizer.code_dtype.itemsize if alphabet is None else log2(max(alphabet, 2))
        if alphabet is None and self.rounds == 0:
            self.ratio = 0.88  # until measured: pcodec writes the exponents of float32 once

    def fixed(self, compressor: Compressor, d: int) -> float:
        """Return the bytes of an update that sends nothing: the frame's header, and exact arrays."""
        empty = compressor.compress(np.zeros(1, dtype=np.float32), 0)
        return len(encode(replace(empty, d=d), compressor)) + self.exact

    def law(self, k: float | Floats, d: int) -> Floats:
        """Return the bytes of k positions and values at their entropy."""
        index_bits = np.log2(np.maximum(d / np.maximum(k, 1e-12), 1.0)) + INDEX_BITS
        return np.asarray(k * (index_bits + self._raw_bits) / 8.0)

    def variable(self, k: float | Floats, d: int) -> Floats:
        """Return the bytes that k coordinates add to an empty update."""
        return np.asarray(self.ratio * self.law(k, d))

    def most(self, available: float, d: int, *, cautious: bool = False) -> int:
        """Return the largest k with ``variable(k) <= available``; `cautious`: even if nothing of it can be packed."""
        ratio = max(1.0, self.ratio) if cautious else self.ratio
        low, high = 0, d
        while low < high:
            middle = (low + high + 1) // 2
            if ratio * self.law(middle, d) <= available:
                low = middle
            else:
                high = middle - 1
        return low

    def learn(self, updates: Sequence[Update], compressors: Sequence[Compressor], d: int) -> None:
        """Measure the ratio on received updates."""
        taken = law = 0.0
        for update, compressor in zip(updates, compressors, strict=True):
            taken += update.payload_bytes - self.fixed(compressor, d)
            law += float(self.law(update.compressed.nnz, d))
        if law > 0.0 and taken > 0.0:
            self.ratio = taken / law if self.rounds == 0 else MEMORY * self.ratio + (1.0 - MEMORY) * taken / law
            self.rounds += 1

    @property
    def exact_values(self) -> bool:
        """Whether values travel as they are, so that the smallest one shows the threshold."""
        return isinstance(self.base.quantizer, Float32)

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured."""
        return {"ratio": self.ratio, "exact": self.exact, "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self.ratio, self.exact, self.rounds = float(state["ratio"]), float(state["exact"]), int(state["rounds"])
