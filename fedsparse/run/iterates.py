"""Weighted averages of the server's iterates: what the theorems on SGD are about, rather than the last iterate."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import check_number, check_whole
from fedsparse.errors import PayloadError
from fedsparse.spec import build, parse_stage

Arrays = Mapping[str, NDArray[Any]]


class Weighting(ABC):
    """How much each iterate counts."""

    name: ClassVar[str]

    @abstractmethod
    def weight(self, t: int) -> float:
        """Return w_t of the iterate after t steps."""


@dataclass(frozen=True)
class Newest(Weighting):
    """No average: the last iterate alone."""

    name: ClassVar[str] = "none"

    def weight(self, t: int) -> float:
        """Return 0."""
        return 0.0


@dataclass(frozen=True)
class Uniform(Weighting):
    """w_t = 1 (Polyak and Juditsky 1992)."""

    name: ClassVar[str] = "uniform"

    def weight(self, t: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Quadratic(Weighting):
    """w_t = (a + t)^2 (Stich et al. 2018, Theorem 2.4; Basu et al. 2019, for strongly convex f).

    Parameters
    ----------
    a : float
        The shift of the learning rate c / (mu (a + t)).
    """

    a: float

    name: ClassVar[str] = "quadratic"

    def __post_init__(self) -> None:
        check_number(self.name, "a", self.a, 0.0, 1e18, open_low=True)

    def weight(self, t: int) -> float:
        """Return (a + t)^2."""
        return float((self.a + t) ** 2)


WEIGHTINGS: dict[str, Callable[..., Weighting]] = {cls.name: cls for cls in (Newest, Uniform, Quadratic)}


def make_weights(spec: str) -> Weighting:
    """Build the weighting that a spec names: ``"none"``, ``"uniform"`` or ``"quadratic(a=100)"``.

    Raises
    ------
    ConfigError
        Unknown name or option, or a value out of range.
    """
    return build(parse_stage(spec), WEIGHTINGS, "iterate_average")


class IterateAverage:
    """The average ``sum w_t x_t / sum w_t`` of the models x_t that the server had after t local steps.

    The theorems average over every step; the server sees every H-th iterate only, so that with H = 1 and full
    participation both are the same. Floating-point arrays, running statistics included, are averaged in float64;
    integers are those of the newest model.

    Parameters
    ----------
    spec : str
        See `make_weights`.
    steps_per_round : int
        H, the local steps of a round: t of the model after round r is r H. 1 where clients train by epochs.
    """

    def __init__(self, spec: str, steps_per_round: int = 1) -> None:
        check_whole("iterate_average", "steps_per_round", steps_per_round, 1)
        self.weighting, self.steps_per_round = make_weights(spec), steps_per_round
        self._newest: dict[str, NDArray[Any]] = {}
        self._mean: dict[str, NDArray[np.float64]] = {}
        self._total = 0.0

    def add(self, arrays: Arrays, server_round: int) -> None:
        """Count the model after a round; 0 is the one that the training starts from."""
        if self._newest and set(arrays) != set(self._newest):
            raise PayloadError("the model of this round has other arrays than the one before.")
        self._newest = dict(arrays)
        if isinstance(self.weighting, Newest):
            return
        weight = self.weighting.weight(server_round * self.steps_per_round)
        self._total += weight
        for name, array in arrays.items():
            if array.dtype.kind == "f":
                # As a step towards the new one: a model that stands still is its own average, to the last bit.
                mean = self._mean.setdefault(name, np.zeros(array.shape, dtype=np.float64))
                mean += (weight / self._total) * (array - mean)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the average so far, in the dtypes of the model.

        Raises
        ------
        RuntimeError
            Before any model was added.
        """
        if not self._newest:
            raise RuntimeError("no iterate has been added yet")
        means = {name: mean.astype(self._newest[name].dtype) for name, mean in self._mean.items()}
        return {**self._newest, **means}

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return arrays alone, so that one safetensors file can hold them; the newest model is not among them."""
        state: dict[str, NDArray[Any]] = {"total": np.array(self._total)}
        state |= {f"mean.{name}": mean.copy() for name, mean in self._mean.items()}
        return state

    def load_state_dict(self, state: Arrays, newest: Arrays) -> None:
        """Undo `state_dict`, given the model that was added last."""
        self._total, self._newest = float(state["total"]), dict(newest)
        self._mean = {key.removeprefix("mean."): a.copy() for key, a in state.items() if key.startswith("mean.")}
