"""What the papers would say about a scenario that is allowed, but unwise."""

from clients.schedules import Inverse, StronglyConvex, make_schedule
from fedsparse.compression import Compressor
from fedsparse.compression.operators.hard_threshold import HardThreshold
from fedsparse.scenario.schema import Scenario
from strategies.policies import Constant, make_policy

DECAYED = 0.2  # a final learning rate below this share of the first is a decaying one


def advice(scenario: Scenario, d: int) -> list[str]:
    """Return warnings about conditions of the theorems that a scenario does not meet.

    Parameters
    ----------
    scenario : Scenario
        A valid one.
    d : int
        Trained parameters.
    """
    policy = make_policy(scenario.compression.uplink)
    if policy.lossless:
        return []
    found = [_memory(scenario, policy.base, d), _momentum(scenario)]
    if isinstance(policy, Constant):
        found += [_shift(scenario, policy.base, d), _fixed_threshold(scenario, policy.base)]
    return [text for text in found if text]


def _memory(scenario: Scenario, compressor: Compressor, d: int) -> str:
    if scenario.compression.error_memory or compressor.claim(d).unbiased:
        return ""
    return (
        f"compression.error_memory = false with {compressor}, which is biased: without memory SGD need not converge "
        "(Stich et al. 2018, Section 4; Karimireddy et al. 2019, counterexamples). Set compression.error_memory = true."
    )


def _shift(scenario: Scenario, compressor: Compressor, d: int) -> str:
    schedule, delta = make_schedule(scenario.train.lr_schedule), compressor.sparsifier.claim(d).delta
    if not isinstance(schedule, Inverse | StronglyConvex) or schedule.per != "step":
        return ""
    if not delta or not scenario.compression.error_memory:
        return ""
    wanted = (scenario.train.local_steps or 1) / delta
    if schedule.a >= 0.99 * wanted:  # d/k, rounded
        return ""
    return (
        f"train.lr_schedule: the shift a = {schedule.a:g} is below H d/k = {wanted:.0f}: the first steps are larger "
        "than the memory can follow (Stich et al. 2018, Theorem 2.4; Basu et al. 2019, Theorem 2). "
        f"Take a >= {wanted:.0f}."
    )


def _fixed_threshold(scenario: Scenario, compressor: Compressor) -> str:
    schedule, sparsifier = make_schedule(scenario.train.lr_schedule), compressor.sparsifier
    steps = scenario.train.local_steps or 1
    last = schedule.multiplier(max(1, scenario.rounds * 9 // 10), scenario.rounds, 0, steps)
    decays = last < DECAYED * schedule.multiplier(1, scenario.rounds, 0, steps)
    if not decays or not isinstance(sparsifier, HardThreshold):
        return ""
    return (
        f"{compressor} has a fixed lam while the learning rate decays: in the end less and less is sent (gamma-FedHT). "
        f"step_aware({compressor}) lets lam follow the schedule, hard_threshold(budget=...) finds lam by itself."
    )


def _momentum(scenario: Scenario) -> str:
    if not scenario.compression.momentum_correction or not scenario.train.momentum:
        return ""
    return (
        "compression.momentum_correction takes the place of the clients' own momentum (Lin et al. 2018, Section 3.2): "
        "with train.momentum as well it is applied twice. Set train.momentum = 0."
    )
