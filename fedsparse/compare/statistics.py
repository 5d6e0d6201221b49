"""Means over paired seeds, with confidence intervals that few seeds allow."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and the half width of its confidence interval.

    Parameters
    ----------
    mean : float
        Of `n` values.
    half : float or None
        None where fewer than two values give no interval.
    n : int
        How many values.
    """

    mean: float
    half: float | None
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.half is not None and abs(self.mean) > self.half


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Return the mean and Student's t interval of some values, None where there are none."""
    n = len(values)
    if n == 0:
        return None
    mean = sum(values) / n
    if n == 1:
        return Interval(mean, None, 1)
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    deviation = sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return Interval(mean, float(stdtrit(n - 1, 0.5 + confidence / 2)) * deviation / sqrt(n), n)


def paired(values: Sequence[float | None], base: Sequence[float | None]) -> Interval | None:
    """Return the interval of the differences ``value - base`` over the seeds that have both."""
    pairs = zip(values, base, strict=True)
    return interval([value - other for value, other in pairs if value is not None and other is not None])
