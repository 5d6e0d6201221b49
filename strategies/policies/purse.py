"""One byte budget: what is left of it, and the threshold that spends it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from typing import Any

import numpy as np

from fedsparse.compression import Compressor
from fedsparse.compression.operators.hard_threshold import HardThreshold
from strategies.aggregation import Update
from strategies.policies.costs import MEMORY, Costs
from strategies.policies.forecast import GAMMA, Floats, Forecast, Seen

CALIBRATION = 0.1  # of the rounds
GROWTH = 0.4  # largest change of log(lam) from one round to the next, within calibration
SETTLED = 10.0  # and after it, over the number of rounds
FREEZE = 0.05  # of the rounds, the last ones, keep lam
FIRST = 0.3  # of a fair share, which the first update sends
CALIBRATION_CAP = 0.8  # times a fair share: the most that an update sends within calibration
MARGIN = 0.005  # of the budget: what a cap may let through above it
LAST_CUT = 0.01  # of lam, in the last round, which sends the largest of what the rest of the budget buys
TAIL_MEAN = 1.6  # mean of the kept magnitudes over the threshold, where a quantizer hides the smallest
SEARCH = 1e-30  # a threshold that keeps everything: with a cap, Top-k


@dataclass(frozen=True)
class Ahead:
    """What a purse has still to pay for.

    Parameters
    ----------
    d : int
        Length of an update.
    rounds : sequence of int
        The rounds to come, from the present one on.
    updates : array
        Expected updates to be paid in each; the first is what arrives now if nobody fails.
    success : float
        Expected fraction that arrives.
    share : float
        Expected updates in a round of one client.
    step_size : callable
        Of a round.
    """

    d: int
    rounds: Sequence[int]
    updates: Floats
    success: float
    share: float
    step_size: Callable[[int], float]


@dataclass
class Purse:
    """A budget, for one client or for all.

    Parameters
    ----------
    base : Compressor
        A hard threshold, whose quantizer counts.
    budget : float
        Bytes.
    costs : Costs
        What updates take.
    """

    base: Compressor
    budget: float
    costs: Costs
    spent: float = 0.0
    lam: float | None = None
    decisions: int = 0
    active: float = 1.0  # fraction of the updates that are not zero: some clients may have no data
    forecast: Forecast | None = None
    predicted: float = field(default=0.0, init=False)  # bytes of this round, and of the later ones
    later: float = field(default=0.0, init=False)
    now: Compressor = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.base

    @property
    def outcome(self) -> float:
        """What will have been spent in the end if lam stays; the cap lets no more through than the budget."""
        return max(self.spent, min(self.spent + self.later, (1.0 + MARGIN) * self.budget))

    def threshold(self, lam: float, at_most: int | None = None) -> Compressor:
        """Return the compressor; lam with three digits, since every frame carries them."""
        return replace(self.base, sparsifier=HardThreshold(float(f"{lam:.3g}"), at_most=at_most))

    def decide(self, ahead: Ahead) -> None:
        """Choose the compressor of the round that begins."""
        d, costs = ahead.d, self.costs
        pays, left = ahead.updates * ahead.success, self.budget - self.spent
        now, expected, asked = float(pays[0]), float(pays.sum()), float(ahead.updates[0])
        header = costs.fixed(self.now, d)
        later_headers = header * (expected - now)
        money = max(left - header * expected, 0.0)  # for coordinates
        etas = np.array([ahead.step_size(r) for r in ahead.rounds])
        pays = self.active * pays  # an update that is zero is paid for by its header alone
        fair = costs.most(money / float(pays @ (etas / etas[0]) ** GAMMA), d)
        lam, counts = self._plan(ahead, pays, money)
        count = float(fair if counts is None else counts[0])
        cap: int | None
        if len(ahead.rounds) == 1:
            headers = header * now
            each = min((left - headers) / (self.active * now), (left + MARGIN * self.budget) / asked - header)
            lam, cap = max(LAST_CUT * lam, SEARCH), costs.most(max(each, 0.0), d, cautious=costs.rounds == 0)
            count = float(cap)
        elif counts is None:
            cap = fair if fair == d else max(int(FIRST * fair), 1)
        else:
            headers = header * asked * len(ahead.rounds)  # if everybody comes every time
            cap = self._cap(d, max((left + MARGIN * self.budget - headers) / asked, 0.0), count)
            if self._calibrating(ahead):
                cap = min(cap if cap is not None else d, int(CALIBRATION_CAP * max(fair, count)) + 1)
        self.now = self.threshold(lam, cap)
        count = count if cap is None else min(count, cap)
        self.predicted = now * float(header + self.active * costs.variable(count, d))
        self.later = left - self.predicted if len(pays) > 1 else 0.0
        if counts is not None:
            self.later = later_headers + float(pays[1:] @ costs.variable(counts[1:], d))

    def _calibrating(self, ahead: Ahead) -> bool:
        total = self.decisions + float(ahead.updates.sum() / ahead.updates[0])
        return self.decisions <= max(2, round(CALIBRATION * total))

    def _plan(self, ahead: Ahead, pays: Floats, money: float) -> tuple[float, Floats | None]:
        """Return lam, and the counts that it is expected to give; nothing is expected before anything was seen."""
        forecast = self.forecast
        if forecast is None or forecast.anchor is None:
            return SEARCH, None
        norms = forecast.norms(ahead.rounds, ahead.step_size)
        reach, outlooks = forecast.reaches(norms, ahead.share), forecast.outlooks()
        wanted = forecast.solve(
            outlooks, norms, reach, lambda counts: float(pays @ self.costs.variable(counts, ahead.d)), money
        )
        lam, total = self.lam or wanted, ahead.rounds[-1]
        if self.lam is None or self._calibrating(ahead):
            lam = min(wanted, lam * exp(GROWTH))
        elif len(ahead.rounds) > FREEZE * total:
            most = min(GROWTH, SETTLED / total)
            lam *= exp(min(max(log(wanted / lam), -most), most))
        self._next = lam = float(f"{lam:.3g}")
        return lam, forecast.mean_counts(outlooks, lam, norms, reach)

    def _cap(self, d: int, each: float, count: float) -> int | None:
        """Return the most that an update may send so that nothing is overdrawn; None where that is out of reach."""
        if each >= self.costs.variable(d, d):
            return None
        # Far more than was ever seen may not pack as well as what was.
        return max(self.costs.most(each, d, cautious=True), min(self.costs.most(each, d), int(2.0 * count)))

    def learn(self, server_round: int, eta: float, updates: Sequence[Update], share: float, d: int) -> None:
        """Learn from the updates of the round that was decided last."""
        self.forecast = self.forecast or Forecast(d)
        self.lam = self._next if self.forecast.anchor is not None else None
        self.decisions += 1
        moved = [update for update in updates if update.receipt.update_norm > 0.0]
        if updates:
            here = max(len(moved), 0.5) / len(updates)
            self.active = here if self.decisions == 1 else MEMORY * self.active + (1.0 - MEMORY) * here
        if not moved:
            return
        remembers = any(update.receipt.residual_norm > 0.0 for update in moved)
        norm = float(np.mean([update.receipt.update_norm for update in moved]))
        counts = [update.compressed.nnz for update in moved]
        known = [log(lam) for update in moved if (lam := self.effective(update)) > 0.0]
        if not known:
            return
        item = Seen(
            server_round,
            eta,
            norm,
            norm + (self.forecast.reach if remembers else 0.0),
            exp(float(np.mean(known))),
            float(np.mean(counts)),
            len(moved),
        )
        first = self.forecast.anchor is None
        self.forecast.learn(item, share if remembers else 0.0)
        if first and self.costs.exact_values:
            magnitudes = [np.abs(update.compressed.values) for update in moved if update.compressed.nnz > 1]
            spreads = [float(np.mean(np.log(x / x.min()))) for x in magnitudes]
            if sum(spreads) > 0.0:
                self.forecast.look(float(np.mean(spreads)))

    def effective(self, update: Update) -> float:
        """Return the threshold that an update's values show: lam, or more where a cap was reached."""
        sparsifier, values = self.now.sparsifier, update.compressed.values
        assert isinstance(sparsifier, HardThreshold)
        lam = sparsifier.threshold(update.compressed.d)
        if sparsifier.at_most is None or values.size == 0 or (lam > SEARCH and values.size < sparsifier.at_most):
            return lam if lam > SEARCH else 0.0
        magnitude = np.abs(values)
        shown = float(magnitude.min()) if self.costs.exact_values else float(magnitude.mean()) / TAIL_MEAN
        return max(lam, shown) if shown > SEARCH else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return what a restarted server needs; plain JSON values."""
        forecast = None if self.forecast is None else self.forecast.state_dict()
        mine = {"spent": self.spent, "lam": self.lam, "decisions": self.decisions, "active": self.active}
        return mine | {"forecast": forecast, "predicted": self.predicted, "later": self.later}

    def load_state_dict(self, state: dict[str, Any], d: int) -> None:
        """Undo `state_dict`."""
        self.spent, self.lam, self.decisions = float(state["spent"]), state["lam"], int(state["decisions"])
        self.active, self.predicted, self.later = (float(state[key]) for key in ("active", "predicted", "later"))
        self.forecast = None
        if state["forecast"] is not None:
            self.forecast = Forecast(d)
            self.forecast.load_state_dict(state["forecast"])
