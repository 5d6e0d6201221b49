"""The two halves of a compressor, and what each may claim about its error.

As in Qsparse (Basu et al., 2019) a compressor is a `Sparsifier`, which chooses coordinates, followed by a
`Quantizer`, which writes the chosen values with few bits. An operator is one frozen dataclass whose fields are its
hyper-parameters; registering it is all it takes to be parsed, listed, sent and contract-tested.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsparse.errors import ConfigError

Vector = NDArray[np.float32]
Indices = NDArray[np.int64]

BLOCK = 65_536  # elements: a float32 block and its scratch stay inside a core's second-level cache


@dataclass(frozen=True)
class Claim:
    """A bound on the error of an operator C.

    ``E||x - C(x)||^2 <= absolute + relative * ||x||^2`` for every x, where the expectation is over the operator's
    own randomness. A contraction with factor delta has ``absolute = 0`` and ``relative = 1 - delta < 1``.

    Parameters
    ----------
    absolute, relative : float
        The two terms of the bound; `relative` may be infinite, which claims nothing.
    unbiased : bool
        Whether ``E[C(x)] = x``.
    random : bool
        Whether the bound holds in expectation only; if False it holds for each single call.
    """

    absolute: float = 0.0
    relative: float = 0.0
    unbiased: bool = False
    random: bool = False

    @property
    def delta(self) -> float | None:
        """The contraction factor, or None where the operator is no contraction."""
        return 1.0 - self.relative if self.absolute == 0.0 and self.relative < 1.0 else None

    def __str__(self) -> str:
        kind = "unbiased, " if self.unbiased else ""
        if self.absolute:
            tail = f" + {self.relative:.3g}|x|^2" if self.relative else ""
            return f"{kind}error <= {self.absolute:.3g}{tail}"
        if self.delta is None:
            return f"{kind}error <= {self.relative:.3g}|x|^2, no contraction"
        return f"{kind}contraction delta = {self.delta:.3g}"


class Sparsifier(ABC):
    """Chooses the coordinates of a vector that are sent."""

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    # Options that a receiver does not need, with what stands in for them: a frame does not carry them.
    unsent: ClassVar[Mapping[str, int | float | None]] = {}
    # True where the choice depends on the vector's length and the seed alone: the receiver repeats it, and the
    # positions cost nothing on the wire.
    seeded: ClassVar[bool] = False

    @abstractmethod
    def select(self, x: Vector, rng: np.random.Generator) -> Indices | None:
        """Return the kept positions of `x`, strictly increasing; None means all of them."""

    def select_compensated(self, update: Vector, residual: Vector, rng: np.random.Generator) -> Indices | None:
        """Form p = Delta + e in place of `residual` and select from it; block-wise operators fuse the two."""
        add_in_place(residual, update)
        return self.select(residual, rng)

    @abstractmethod
    def claim(self, d: int) -> Claim:
        """Return the bound that holds for every vector of length `d`."""

    @abstractmethod
    def max_kept(self, d: int) -> int:
        """Return the largest number of coordinates that can be kept out of `d`."""


class Quantizer(ABC):
    """Writes values as small codes and a few scales."""

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    num_scales: ClassVar[int] = 1
    zero_code: int | None = None  # the code that decodes to 0.0, whose coordinates need not be sent

    @property
    @abstractmethod
    def alphabet(self) -> int | None:
        """Number of distinct codes 0 .. alphabet - 1, or None where codes are floating-point numbers."""

    @property
    def code_dtype(self) -> np.dtype[np.generic]:
        """The smallest dtype that holds every code; float32 where codes are floating-point numbers."""
        return np.dtype(np.float32) if self.alphabet is None else np.min_scalar_type(self.alphabet - 1)

    def num_codes(self, k: int) -> int:
        """Return how many codes `k` values take."""
        return k

    @abstractmethod
    def quantize(self, values: Vector, rng: np.random.Generator) -> tuple[NDArray[np.generic], Vector]:
        """Return codes (``num_codes(k)`` of them) and scales (``num_scales`` of them) of `values`, shape (k,)."""

    @abstractmethod
    def dequantize(self, codes: NDArray[np.generic], scales: Vector, k: int) -> Vector:
        """Return the `k` values that these codes stand for: the same bits on every machine."""

    @abstractmethod
    def claim(self, k: int) -> Claim:
        """Return the bound that holds for every vector of `k` values; monotone in `k`."""

    @abstractmethod
    def formula_bits(self, k: int) -> float:
        """Return the bits that the papers would count for `k` values, scales included."""


SPARSIFIERS: dict[str, type[Sparsifier]] = {}
QUANTIZERS: dict[str, type[Quantizer]] = {}

S = TypeVar("S", bound=type[Sparsifier])
Q = TypeVar("Q", bound=type[Quantizer])


def register_sparsifier(cls: S) -> S:
    """Class decorator: make a sparsifier known by its `name`."""
    _check_new(cls.name)
    SPARSIFIERS[cls.name] = cls
    return cls


def register_quantizer(cls: Q) -> Q:
    """Class decorator: make a quantizer known by its `name`."""
    _check_new(cls.name)
    QUANTIZERS[cls.name] = cls
    return cls


def _check_new(name: str) -> None:
    if name in SPARSIFIERS or name in QUANTIZERS:
        raise RuntimeError(f"two operators are named {name!r}")


def check_number(owner: str, key: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse a hyper-parameter that is no finite number inside its range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ConfigError(f"{owner}: {key} must be a number, got {value!r}.")
    if abs(value) > sys.float_info.max:  # also whole numbers that no float can hold
        raise ConfigError(f"{owner}: {key} must be a finite number, got {str(value)[:40]}.")
    if not (low < value if open_low else low <= value) or value > high:
        left = "(" if open_low else "["
        right = ")" if np.isinf(high) else "]"
        raise ConfigError(f"{owner}: {key} must be in {left}{low:g}, {high:g}{right}, got {value!r}.")


def check_whole(owner: str, key: str, value: object, low: int, high: int = 2**62) -> None:
    """Refuse a hyper-parameter that is no whole number inside its range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{owner}: {key} must be a whole number, got {value!r}.")
    if not low <= value <= high:
        limit = f"at least {low}" if high == 2**62 else f"from {low} to {high}"
        raise ConfigError(f"{owner}: {key} must be {limit}, got {value!r}.")


def kept_count(d: int, density: float | None, k: int | None = None) -> int:
    """Return the count k, given as such or as k/d: at least one coordinate of a non-empty vector, at most all."""
    return min(d, max(1, round((density or 0.0) * d) if k is None else k))


def largest(magnitude: Vector, k: int) -> Indices:
    """Return the positions of the `k` largest magnitudes in increasing order; ties go to the lower position.

    Zeros are left out, so that there may be fewer.
    """
    if k >= magnitude.size:
        return np.flatnonzero(magnitude)
    if k == 0:
        return np.empty(0, dtype=np.int64)
    # A partition by value, not by argument: half the time, and the choice among ties is ours.
    threshold = np.partition(magnitude, magnitude.size - k)[magnitude.size - k]
    if threshold == 0.0:
        return np.flatnonzero(magnitude)
    kept = np.flatnonzero(magnitude >= threshold)
    if kept.size > k:
        tied = np.flatnonzero(magnitude[kept] == threshold)
        kept = np.delete(kept, tied[k - kept.size :])
    return kept


def as_vector(x: NDArray[np.generic]) -> Vector:
    """Return `x` as a contiguous float32 vector (a view where it already is one).

    Raises
    ------
    ValueError
        Where `x` is not one-dimensional real numbers, or holds NaN or infinity (also after rounding to float32).
    """
    array = np.asarray(x)
    if array.ndim != 1:
        raise ValueError(f"an update is one flat vector, got an array of shape {array.shape}.")
    if array.dtype.kind not in "fiu":
        raise ValueError(f"an update holds real numbers, got dtype {array.dtype}.")
    with np.errstate(over="ignore"):
        vector = np.ascontiguousarray(array, dtype=np.float32)
    check_finite(vector)
    return vector


def add_in_place(target: Vector, addend: Vector) -> None:
    """Add without a warning where float32 overflows: whoever selects from the sum finds the infinity and refuses it."""
    with np.errstate(over="ignore"):
        np.add(target, addend, out=target)


def check_finite(vector: Vector) -> None:
    """Refuse NaN and infinity, naming the first bad position."""
    # A dot product reads at memory speed and is finite only if every element is; overflow of the squares of
    # large finite values is told apart by the exact test.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(vector, vector)):
            return
    bad = np.flatnonzero(~np.isfinite(vector))
    if bad.size:
        raise ValueError(
            f"the update has {bad.size} value(s) that are not finite (the first, {vector[bad[0]]}, at position "
            f"{bad[0]} of {vector.size}): training has diverged; lower the learning rate or clip gradients."
        )
