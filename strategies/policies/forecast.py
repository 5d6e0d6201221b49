"""How many coordinates a constant threshold will send in the rounds to come.

With error feedback and local training, a client's updates point the same way for many rounds: the cosine of consecutive
updates of one client was about 0.9 in our runs. So a coordinate that moves by v a round is sent every lam/v rounds, for
the first time when the sum of its movements reaches lam. Over a population of coordinates this gives, for an update
of norm u that follows others of norms u_s::

    n = d ( P(v u >= lam) + (u / lam) E[v; lam / G <= v < lam / u] ),    G = sum of all u_s up to now,

the first term sent every time, the second every lam/(v u)-th time, and slower ones not yet. The sizes v follow a
stretched exponential, ``P(v > x) = exp(-(x / scale)^shape)``: its scale comes from the first round's largest values,
its shape from how well each of a few shapes explains the counts since. The norms are a power of the round times a
power of the step size, ``u_t = c t^beta eta_t^gamma``, fitted to the norms that clients report.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHAPES = (0.35, 0.45, 0.6, 0.8, 1.1, 1.5)
SHAPE, SHAPE_SPREAD = 0.6, 0.35  # prior of the shape: mean, standard deviation of its logarithm
COUNT_NOISE, OFFSET_SPREAD = 0.5, 0.2  # of log counts: around the model; of what the model gets wrong for good
BETA, BETA_SPREAD = -0.38, 0.08
GAMMA, GAMMA_SPREAD = 0.7, 0.2
NORM_NOISE = 0.15
HALF_LIFE = 8.0  # rounds after which an observation counts half
KEEP = 100  # observations
CAUTION = 0.5  # standard deviations: a lam too low in the beginning costs less than one too high


@dataclass(frozen=True)
class Seen:
    """One observation: the mean update of a round.

    Parameters
    ----------
    server_round : int
        When.
    eta : float
        Step size of the round.
    norm, reach : float
        u, and G.
    lam, count : float
        The threshold that was effective, and the mean number of coordinates that it sent.
    updates : int
        Over which the mean was taken.
    """

    server_round: int
    eta: float
    norm: float
    reach: float
    lam: float
    count: float
    updates: int


class Population:
    """Coordinates whose sizes follow a stretched exponential of scale 1."""

    def __init__(self, shape: float) -> None:
        self.shape = shape
        self.log_v = np.linspace(-14.0, log(40.0) / shape, 1500)
        self.above = np.exp(-np.exp(np.minimum(shape * self.log_v, 5.0)))  # P(v >= .)
        v = np.exp(self.log_v)
        mass = np.sqrt(v[1:] * v[:-1]) * (self.above[:-1] - self.above[1:])
        self.mass = np.append(np.cumsum(mass[::-1])[::-1], 0.0)  # E[v; v >= .]

    def sent(self, lam: float | Floats, norm: Floats, reach: Floats, scale: float) -> Floats:
        """Return n / d, see the head of this file; norm and reach in units of the scale's."""
        always, ever = np.log(lam / (norm * scale)), np.log(lam / (reach * scale))
        tail = np.interp(always, self.log_v, self.above)
        slow = np.interp(ever, self.log_v, self.mass) - np.interp(always, self.log_v, self.mass)
        return np.asarray(tail + norm * scale / lam * slow)


@lru_cache
def population(shape: float) -> Population:
    """Return a population's tables, made once."""
    return Population(shape)


def fit_norms(seen: Sequence[Seen]) -> Floats:
    """Return (log c, beta, gamma) of the norms' law: least squares with priors on beta and gamma."""
    precision = np.diag([1e-6, BETA_SPREAD**-2, GAMMA_SPREAD**-2])
    target = precision @ np.array([0.0, BETA, GAMMA])
    half_life = max(HALF_LIFE, len(seen) / 3.0)
    for age, item in enumerate(reversed(seen)):
        weight = 0.5 ** (age / half_life) / NORM_NOISE**2
        row = np.array([1.0, log(item.server_round), log(item.eta)])
        precision = precision + weight * np.outer(row, row)
        target = target + weight * log(item.norm) * row
    return np.asarray(np.linalg.solve(precision, target))


@dataclass(frozen=True)
class Outlook:
    """What one shape of the population says about the rounds to come.

    Parameters
    ----------
    population, scale
        Sizes of coordinates.
    factor : float
        By which counts have exceeded the model lately.
    weight : float
        Posterior probability of the shape.
    """

    population: Population
    scale: float
    factor: float
    weight: float


@dataclass
class Forecast:
    """Counts of the rounds to come, from those that were seen.

    Parameters
    ----------
    d : int
        Length of an update.
    """

    d: int
    shape: float = SHAPE
    seen: list[Seen] = field(default_factory=list)
    anchor: Seen | None = None
    reach: float = 0.0  # sum of norms so far, of a typical client; stays 0 without error memory

    def learn(self, item: Seen, share: float) -> None:
        """Add an observation; `share` is the expected number of updates of a client in such a round."""
        self.anchor = self.anchor or item
        self.seen = [*self.seen[-KEEP + 1 :], item]
        self.reach += share * item.norm

    def look(self, spread: float) -> None:
        """Take a first view of the shape: `spread` is the mean of log(|x| / lam) over the largest coordinates.

        Beyond a high threshold, a stretched exponential falls like a power ``alpha = shape log(d / k)``, and the mean
        is 1 / alpha (Hill 1975). That is the tail's shape; most of what will be sent lies below, hence half the way.
        """
        assert self.anchor is not None
        hill = 1.0 / (spread * log(self.d / min(max(self.anchor.count, 0.5), 0.9 * self.d)))
        self.shape = min(max((SHAPE * hill) ** 0.5, SHAPES[0]), SHAPES[-1])

    def reaches(self, norms: Floats, share: float) -> Floats:
        """Return the expected G of updates of these norms; a client takes part in a round with `share`."""
        return self.reach + norms + (share * (np.cumsum(norms) - norms) if self.reach > 0.0 else 0.0)

    def norms(self, rounds: Sequence[int], step_size: Callable[[int], float]) -> Floats:
        """Return the expected norms of updates in `rounds`."""
        level, beta, gamma = fit_norms(self.seen)
        times, etas = np.array(rounds, dtype=np.float64), np.array([step_size(r) for r in rounds])
        return np.asarray(np.exp(level + beta * np.log(times) + gamma * np.log(etas)))

    def outlooks(self) -> list[Outlook]:
        """Return each shape's scale, factor and posterior weight."""
        assert self.anchor is not None
        first, d = self.anchor, self.d
        tail = log(d / min(max(first.count, 0.5), 0.9 * d))
        lam, norm, reach, count, updates = (
            np.array([getattr(item, name) for item in self.seen], dtype=np.float64)
            for name in ("lam", "norm", "reach", "count", "updates")
        )
        ages = np.arange(len(self.seen))[::-1]
        weights = 0.5 ** (ages / HALF_LIFE) / (COUNT_NOISE**2 + 1.0 / (count * updates + 1.0))
        floor = 0.5 / updates
        results, scores = [], []
        for shape in SHAPES:
            scale = first.lam / first.norm / tail ** (1.0 / shape)
            model = d * population(shape).sent(lam, norm, reach, scale)
            # While memories fill, the model's edge is sharper than the world's: no ratio counts for more than e.
            misfit = np.clip(np.log((count + floor) / (model + floor)), -1.0, 1.0)
            offset = float(weights @ misfit) / (float(weights.sum()) + OFFSET_SPREAD**-2)
            scores.append(-0.5 * (float(weights @ misfit**2) + (log(shape / self.shape) / SHAPE_SPREAD) ** 2))
            results.append((population(shape), scale, exp(offset)))
        posterior = np.exp(np.array(scores) - max(scores))
        posterior /= posterior.sum()
        return [Outlook(*result, float(weight)) for result, weight in zip(results, posterior, strict=True)]

    def counts(self, outlook: Outlook, lam: float, norms: Floats, reach: Floats) -> Floats:
        """Return the mean count of an update in each round to come."""
        model = self.d * outlook.factor * outlook.population.sent(lam, norms, reach, outlook.scale)
        return np.asarray(np.minimum(model, self.d))

    def mean_counts(self, outlooks: Sequence[Outlook], lam: float, norms: Floats, reach: Floats) -> Floats:
        """Return `counts` averaged over the shapes."""
        return np.asarray(sum(o.weight * self.counts(o, lam, norms, reach) for o in outlooks))

    def solve(
        self, outlooks: Sequence[Outlook], norms: Floats, reach: Floats, cost: Callable[[Floats], float], money: float
    ) -> float:
        """Return the constant lam at which `cost` of the counts to come equals `money`."""
        means = []
        for outlook in outlooks:
            low, high = log(1e-9 * float(norms.max()) + 1e-37), log(float(reach.max()))
            for _ in range(40):
                middle = 0.5 * (low + high)
                if cost(self.counts(outlook, exp(middle), norms, reach)) > money:
                    low = middle
                else:
                    high = middle
            means.append(high)
        weights, logs = np.array([o.weight for o in outlooks]), np.array(means)
        mean = float(weights @ logs)
        return exp(mean - CAUTION * float(weights @ (logs - mean) ** 2) ** 0.5)

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen; plain JSON values."""
        anchor = None if self.anchor is None else vars(self.anchor)
        return {"seen": [vars(item) for item in self.seen], "anchor": anchor, "reach": self.reach, "shape": self.shape}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self.seen = [Seen(**item) for item in state["seen"]]
        self.anchor = None if state["anchor"] is None else Seen(**state["anchor"])
        self.reach, self.shape = float(state["reach"]), float(state["shape"])
