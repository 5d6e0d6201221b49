"""The constant threshold that spends a given number of bytes over the whole training."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsparse.compression import Compressor
from fedsparse.errors import ConfigError, unknown_name
from fedsparse.spec import Stage
from strategies.aggregation import Update
from strategies.policies.base import Plan, Policy, register_policy
from strategies.policies.costs import Costs
from strategies.policies.purse import Ahead, Purse
from strategies.report import RoundReport

log = logging.getLogger(__name__)

UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
TRUST = 5.0  # rounds without a failure (or, of a client, of the usual kind) that are taken for granted
FLOAT_BYTES = 4


def parse_bytes(text: object) -> float:
    """Read a budget such as ``"20MB"``: decimal units, 1 MB = 10^6 bytes."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kMGT]?B)\s*", text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(
            f'hard_threshold: budget must be a text such as "20MB", a number and one of {", ".join(UNITS)} '
            f"(1 MB = 1,000,000 bytes), got {text!r}."
        )
    if (number := float(match[1]) * UNITS[match[2]]) < 1.0:
        raise ConfigError(f"hard_threshold: budget must be at least 1B, got {text!r}.")
    return number


def format_bytes(number: float) -> str:
    """Write a number of bytes with a unit that suits it, rounded up to three digits."""
    unit = next((unit for unit in reversed(UNITS) if number >= UNITS[unit]), "B")
    digits = number / UNITS[unit]
    step = 10.0 ** max(0, 2 - len(str(int(digits))) + 1)
    return f"{np.ceil(digits * step) / step:g}{unit}"


@register_policy
@dataclass
class Budget(Policy):
    """The user says what the training may cost, in uplink bytes; lam follows.

    Minimising the total error ``sum_t ||e_t||^2`` under a budget for the sum of what is sent gives hard threshold with
    ONE lam for all rounds (Sahu et al. 2021, Theorem 3): more is sent while updates are large. Which lam that is
    depends on the updates to come, so:

    1. The first round sends the largest coordinates, 0.3 of a fair share (lam ~ 0, `at_most`): that shows the scale.
    2. `forecast` predicts from the norms and counts seen so far how many coordinates any constant lam would send
       in each round to come; `costs` has measured what they take on the wire.
    3. lam is the threshold that spends what is left in the rounds that are left: it is solved for anew in every round,
       but moves by no more than 10 / rounds of itself after the first tenth, and not at all in the last twentieth.
    4. No update sends more than the budget allows (`at_most`), and the last round sends the largest of what the rest
       of the budget buys.

    With fewer than five rounds the first and the last one, whose shares are guessed, weigh too much for the budget to
    be spent to the last percents; the same holds where many clients have no data, and for quantizers that round many
    kept values to zero (QSGD by the 2-norm with few levels), whose frames stay far below what was planned.

    Spent is what the server received: frames, exact arrays, and replies that it rejected. Replies that never came
    are unknown to it.

    Parameters
    ----------
    base : Compressor
        A hard threshold of any lam, and the quantizer.
    budget : str
        A number and a unit, such as ``"20MB"``.
    per : {"all", "client"}
        Whose budget that is: of all clients together, or of each, which then has its own lam. With ``"client"``, who
        takes part in random rounds may keep its last share: nobody knows which round is its last.
    """

    base: Compressor
    budget: str
    per: str = "all"
    _bytes: float = field(init=False, repr=False)
    _costs: Costs = field(init=False, repr=False)
    _purses: dict[str, Purse] = field(init=False, repr=False, default_factory=dict)
    _plan: Plan | None = field(init=False, repr=False, default=None)
    _counts: dict[str, float] = field(init=False, repr=False)
    _joined: dict[str, int] = field(init=False, repr=False, default_factory=dict)

    name = "hard_threshold(budget=...)"
    summary = "the constant lam that minimises the total error under a byte budget"
    source = "Sahu et al. 2021, Theorem 3"
    examples = ('hard_threshold(budget="20MB")', 'hard_threshold(budget="500kB", per="client")|sign')

    def __post_init__(self) -> None:
        self._bytes = parse_bytes(self.budget)
        if self.per not in ("all", "client"):
            raise unknown_name("value of per in hard_threshold(budget=...):", self.per, ["all", "client"])
        if self.base.piecewise:
            raise ConfigError(
                "hard_threshold(budget=...) needs one lam for the whole update, which piecewise would apply to tensors "
                "that each need their own scale: leave piecewise out."
            )
        self._costs = Costs(self.base)
        self._counts = {"d": 0.0, "asked": 0.0, "accepted": 0.0, "rounds": 0.0}

    @property
    def spec(self) -> str:
        options: dict[str, Any] = {"budget": self.budget} | ({"per": self.per} if self.per != "all" else {})
        _, mark, tail = str(self.base).partition("|")
        return f"{Stage('hard_threshold', options=options)}{mark}{tail}"

    def begin(self, plan: Plan) -> None:
        if plan.rounds is None:
            raise ConfigError(
                f"{self.spec} must know the number of rounds to divide the budget: give rounds= to "
                "CompressedStrategy, num_rounds to its start(), or rounds in the scenario."
            )
        self._plan, self._costs.exact = plan, float(plan.exact_bytes)
        self._counts["d"] = plan.d
        if not plan.cohort or plan.d == 0:
            return
        if self._counts["rounds"] == 0:
            self._check(plan, plan.rounds)
        rounds = range(plan.server_round, max(plan.rounds, plan.server_round) + 1)
        for owner, now in self._owners(plan):
            if owner not in self._purses:
                self._purses[owner] = Purse(self.base, self._bytes, self._costs)
            later = self._later(owner, plan)
            updates = np.full(len(rounds), later)
            updates[0] = now
            success = (self._counts["accepted"] + TRUST) / (self._counts["asked"] + TRUST)
            share = later if self.per == "client" else later / max(plan.num_clients, len(plan.cohort))
            self._purses[owner].decide(Ahead(plan.d, rounds, updates, success, share, self._step_size))

    def _owners(self, plan: Plan) -> list[tuple[str, float]]:
        """Return whose budgets this round touches, and how many updates each may have to pay."""
        if self.per == "all":
            return [("all", float(len(plan.cohort)))]
        return [(client, 1.0) for client in plan.cohort]

    def _later(self, owner: str, plan: Plan) -> float:
        """Return the updates that an owner is expected to be asked for in a later round."""
        if self.per == "all":
            return float(len(plan.cohort))
        usual = len(plan.cohort) / max(plan.num_clients, 1)
        gone = self._counts["rounds"]
        weight = TRUST / (usual * (1.0 - usual)) if usual < 1.0 else TRUST
        return (usual * weight + self._joined.get(owner, 0)) / (weight + gone)

    def _step_size(self, server_round: int) -> float:
        assert self._plan is not None
        return max(float(self._plan.step_size(server_round)), 1e-9)

    def _check(self, plan: Plan, rounds: int) -> None:
        """Refuse a budget that not even empty updates fit in; warn of one that whole updates fit in."""
        updates = rounds * (len(plan.cohort) if self.per == "all" else len(plan.cohort) / max(plan.num_clients, 1))
        empty = self._costs.fixed(self.base, plan.d) * updates
        whose = "" if self.per == "all" else " of each client"
        if self._bytes < empty:
            least = format_bytes(empty + updates * float(self._costs.law(max(1.0, 1e-3 * plan.d), plan.d)))
            what = "headers" if self._costs.exact == 0.0 else "headers and uncompressed arrays"
            raise ConfigError(
                f"the budget{whose} of {self.budget} is too small: the {what} of {updates:.0f} updates alone take "
                f"{format_bytes(empty)}. Give at least {least}, which leaves room for 0.1 % of the coordinates, or "
                "have fewer rounds or smaller cohorts."
            )
        whole = self._costs.fixed(self.base, plan.d) + float(self._costs.law(plan.d, plan.d))
        dense = min(FLOAT_BYTES * plan.d, whole) * updates
        if self._bytes > dense and not self._purses:
            log.warning(
                "the budget%s of %s is more than the %s that %.0f updates take with every coordinate: nearly all of it "
                'will be sent; give a smaller budget, or take uplink = "none"',
                whose,
                self.budget,
                format_bytes(dense),
                updates,
            )

    def compressor(self, client: str) -> Compressor:
        purse = self._purses.get("all" if self.per == "all" else client)
        return purse.now if purse is not None else self.base

    def observe(self, report: RoundReport, updates: Sequence[Update]) -> None:
        plan = self._plan
        if plan is None or not self._purses:
            return
        self._pay(report, updates)
        if not updates:
            return
        owners = self._owners(plan)
        report.predicted_bytes = sum(self._purses[owner].predicted for owner, _ in owners)
        compressors = [self.compressor(update.client) for update in updates]
        self._costs.learn(updates, compressors, plan.d)
        thresholds = [self._purse(update.client).effective(update) for update in updates]
        report.lam = float(np.mean([lam for lam in thresholds if lam > 0.0])) if any(thresholds) else None
        eta = self._step_size(plan.server_round)
        for owner, _ in owners:
            own = [update for update in updates if self.per == "all" or update.client == owner]
            share = len(own) / max(plan.num_clients, len(plan.cohort)) if self.per == "all" else 1.0
            self._purses[owner].learn(plan.server_round, eta, own, share, plan.d)
        self._counts["asked"] += len(plan.cohort)
        self._counts["accepted"] += len(updates)
        self._counts["rounds"] += 1
        for client in plan.cohort:
            self._joined[client] = self._joined.get(client, 0) + 1
        report.budget_spent = sum(purse.spent for purse in self._purses.values())
        report.budget_predicted = sum(purse.outcome for purse in self._purses.values())

    def _purse(self, client: str) -> Purse:
        return self._purses["all" if self.per == "all" else client]

    def _pay(self, report: RoundReport, updates: Sequence[Update]) -> None:
        """Take what was received from the purses, also of replies that do not count."""
        for update in updates:
            self._purse(update.client).spent += update.payload_bytes
        for client, failure in report.failed.items():
            self._purse(client).spent += failure.payload_bytes

    def state_dict(self) -> dict[str, Any]:
        return {
            "costs": self._costs.state_dict(),
            "counts": dict(self._counts),
            "joined": dict(self._joined),
            "purses": {owner: purse.state_dict() for owner, purse in self._purses.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._costs.load_state_dict(state["costs"])
        self._counts = {key: float(value) for key, value in state["counts"].items()}
        self._joined = {client: int(times) for client, times in state["joined"].items()}
        self._purses = {}
        for owner, saved in state["purses"].items():
            self._purses[owner] = Purse(self.base, self._bytes, self._costs)
            self._purses[owner].load_state_dict(saved, int(self._counts["d"]))
