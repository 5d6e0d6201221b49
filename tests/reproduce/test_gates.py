"""Verdicts: each gate can say that a claim holds, that it does not, and that it cannot be judged."""

from pathlib import Path

import pytest

from fedsparse.compare import Comparison
from fedsparse.compare.results import Run, Variant
from fedsparse.reproduce.basu2019 import square_of_the_step
from fedsparse.reproduce.claims import Outcome
from fedsparse.reproduce.gates import both, fewer, lower, matches, stays_above
from fedsparse.reproduce.measures import bytes_to, final_loss, loss_at, memory_squares, settled_memory, total_bytes
from fedsparse.reproduce.sahu2021 import equal_bytes, error_explains
from fedsparse.run.summary import summarise
from fedsparse.scenario import Scenario, apply_overrides, from_toml

TEXT = """
name = "made-up"
rounds = 20
[data]
dataset = "digits"
num_clients = 2
[model]
name = "softmax"
[train]
local_steps = 1
lr = 0.1
"""
NAMES = ("a", "b")
HOLDS, FAILS, NOT = Outcome.HOLDS, Outcome.FAILS, Outcome.NOT_COMPARABLE


def run_of(scenario: Scenario, seed: int, losses: list[float | None], bytes_each: int = 100, error: float = 1.0) -> Run:
    lines = [
        {"round": i, "uplink_bytes": bytes_each, "uplink_frame_bits_formula": 4.0 * bytes_each, "dense_bytes": 1000}
        | {"eval_accuracy": None if loss is None else 0.5, "eval_loss": 1.0, "objective": loss, "train_loss": 1.0}
        | {"failed": {}, "cohort": ["0"], "accepted": ["0"], "total_error": error * i, "downlink_bytes": 1, "nnz": 1}
        for i, loss in enumerate(losses, 1)
    ]
    return Run(seed, Path(), summarise(scenario, lines, "completed", wall_s=1.0), lines)


def comparison_of(**variants: list[tuple[list[float | None], int, float] | None]) -> Comparison:
    """Return a comparison whose variants have (losses, bytes of a round, squared memory norm) for each seed."""
    scenario = from_toml(TEXT)
    made = []
    for name, runs in variants.items():
        built = tuple(None if run is None else run_of(scenario, seed, *run) for seed, run in enumerate(runs))
        made.append(Variant(name, scenario, built))
    return Comparison(scenario, tuple(range(len(made[0].runs))), tuple(made), {})


def plain(seeds: int = 3) -> Comparison:
    return comparison_of(a=[([1.0] * 20, 100, 1.0)] * seeds)


@pytest.mark.parametrize(
    ("first", "second", "outcome"),
    [
        ([1.0, 1.1, 1.0], [2.0, 2.0, 2.1], HOLDS),
        ([2.0, 2.0, 2.1], [1.0, 1.1, 1.0], FAILS),
        ([1.0, 3.0, 1.0], [2.0, 2.0, 2.1], FAILS),  # three such seeds show nothing
        ([1.0, None, 1.0], [2.0, 2.0, 2.1], NOT),
        ([1.0, float("inf"), 1.0], [2.0, 2.0, 2.1], FAILS),
        ([1.0, 1.1, 1.0], [float("inf")] * 3, HOLDS),
        ([1.0, 1.1, 1.0], [float("inf"), 2.0, 2.0], NOT),
    ],
)
def test_lower(first, second, outcome):
    assert lower(plain(), "loss", NAMES, (first, second)).outcome is outcome


def test_a_losing_pair_is_shown_whatever_the_verdict():
    seeds = 6
    first, second = [1.0] * 5 + [2.05], [2.0] * seeds
    verdict = lower(plain(seeds), "loss", NAMES, (first, second))
    assert verdict.outcome is HOLDS
    assert [(pair.seed, pair.better, pair.worse) for pair in verdict.losing] == [(5, 2.05, 2.0)]
    assert "lower in 5 of 6 pairs" in verdict.ours


def test_one_seed_proves_nothing():
    assert lower(plain(1), "loss", NAMES, ([1.0], [2.0])).outcome is NOT
    assert matches(plain(1), "loss", NAMES, ([1.0], [1.0]), 0.01).outcome is NOT


def test_matches_and_stays_above():
    near, far, base = [1.001, 1.002, 1.003], [1.2, 1.3, 1.25], [1.0, 1.0, 1.0]
    assert matches(plain(), "loss", NAMES, (near, base), 0.01).outcome is HOLDS
    assert matches(plain(), "loss", NAMES, (far, base), 0.01).outcome is FAILS
    assert stays_above(plain(), "loss", NAMES, (far, base), 0.01).outcome is HOLDS
    assert stays_above(plain(), "loss", NAMES, (near, base), 0.01).outcome is FAILS


def test_fewer_counts_who_did_not_get_there_by_a_lower_bound():
    ours = [1.0, 1.1, 0.9]
    assert fewer("bytes", NAMES, (ours, [100.0, 110.0, 90.0]), 50).outcome is HOLDS
    assert fewer("bytes", NAMES, (ours, [10.0, 11.0, 9.0]), 50).outcome is FAILS
    assert fewer("bytes", NAMES, (ours, [None] * 3), 50, [200.0] * 3).outcome is HOLDS
    assert "more than" in fewer("bytes", NAMES, (ours, [None] * 3), 50, [200.0] * 3).ours
    assert fewer("bytes", NAMES, (ours, [None] * 3), 50, [20.0] * 3).outcome is NOT
    assert fewer("bytes", NAMES, ([None] * 3, ours), 50).outcome is FAILS


def test_all_of_several_is_the_worst_of_them():
    good = lower(plain(), "loss", NAMES, ([1.0, 1.1, 1.0], [2.0, 2.0, 2.1]))
    bad = lower(plain(), "loss", NAMES, ([2.0, 2.0, 2.1], [1.0, 1.1, 1.0]))
    assert both(good, good).outcome is HOLDS
    assert both(good, bad).outcome is FAILS


def test_measures_of_a_run():
    scenario = from_toml(TEXT)
    run = run_of(scenario, 0, [None, 4.0, None, 3.0, *[2.0] * 14, 1.0, 2.0], bytes_each=10, error=0.5)
    assert final_loss(run) == 1.5
    assert total_bytes(run) == 200
    assert total_bytes(run, formula=True) == 100
    assert bytes_to(run, 3.5) == 40
    assert bytes_to(run, 0.5) is None
    assert loss_at(run, 30) == 3.5
    assert loss_at(run, 10) is None
    assert loss_at(run, 15, formula=True) == 3.5
    assert memory_squares(run)[3] == (4, 0.5)
    assert settled_memory(run) == pytest.approx(0.5)


def test_equal_bytes_are_compared_at_the_smaller_total():
    slow, fast = [2.0 - 0.05 * i for i in range(20)], [2.0 - 0.09 * i for i in range(20)]
    made = comparison_of(**{"hard": [(fast, 80, 1.0)] * 3, "top": [(slow, 100, 2.0)] * 3})
    assert equal_bytes(made, ("hard", "top")).outcome is HOLDS
    assert equal_bytes(made, ("top", "hard")).outcome is FAILS
    apart = comparison_of(**{"hard": [(fast, 30, 1.0)] * 3, "top": [(slow, 100, 2.0)] * 3})
    assert equal_bytes(apart, ("hard", "top")).outcome is NOT
    noisy = [(fast, 100, 1.0), (fast, 100, 1.01), (fast, 100, 1.0)]
    made = comparison_of(**{"hard": noisy, "top": [(slow, 100, 2.0)] * 3})
    assert error_explains(made, (("hard", "top"),)).outcome is HOLDS
    other = comparison_of(**{"hard": noisy, "top": [(slow, 100, 0.5)] * 3})
    assert error_explains(other, (("hard", "top"),)).outcome is FAILS


@pytest.mark.parametrize(("power", "outcome"), [(2.0, HOLDS), (1.0, FAILS)])
def test_exponent_of_the_memory(power, outcome):
    variants = []
    for factor in ("0.5", "1", "2"):
        scenario = apply_overrides(from_toml(TEXT), [f"train.lr={0.02 * float(factor)}"])
        square = float(factor) ** power
        runs = tuple(run_of(scenario, seed, [1.0] * 20, 100, square * (1 + 0.01 * seed)) for seed in range(3))
        variants.append(Variant(f"QTop-k-constant-{factor}", scenario, runs))
    verdict = square_of_the_step(Comparison(from_toml(TEXT), (0, 1, 2), tuple(variants), {}))
    assert verdict.outcome is outcome
