"""Policies: what the server decides from round to round, and that clients and report follow."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsparse.compression import Compressor
from fedsparse.errors import ConfigError
from strategies.policies import POLICIES, Budget, Constant, Plan, make_policy
from strategies.policies.balanced import finishing_together
from strategies.report import RoundReport

EXAMPLES = [example for cls in POLICIES.values() if cls is not Budget for example in cls.examples]


def plan(server_round: int, rounds: int | None = 100, step_size=lambda t: 1.0) -> Plan:
    pace = {"0": (1.0, 1e2), "1": (1.0, 2e2)}.__getitem__
    return Plan(server_round, rounds, 10_000, ["0", "1"], 10, step_size=step_size, pace=pace)


def densities(policy, norms, step_size=lambda t: 1.0) -> list[float]:
    """Return the density of each round where the updates' norms are these."""
    found = []
    for server_round, norm in enumerate(norms, 1):
        policy.begin(plan(server_round, step_size=step_size))
        found.append(policy.compressor("0").sparsifier.density)
        policy.observe(RoundReport(server_round, update_norm=norm), [])
    return found


@pytest.mark.parametrize("spec", EXAMPLES)
def test_specs_round_trip_and_every_round_has_a_compressor_that_clients_can_read(spec):
    policy = make_policy(spec)
    assert make_policy(policy.spec).spec == policy.spec
    assert not policy.lossless
    for server_round in (1, 2, 50, 100):
        policy.begin(plan(server_round))
        compressor = policy.compressor("0")
        assert Compressor.from_spec(compressor.spec) == compressor


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(1e-3, 1e3)), min_size=1, max_size=30),
    st.floats(1e-3, 0.5),
    st.floats(0.01, 1.0),
    st.floats(1.0, 100.0),
)
def test_balanced_densities_finish_together(paces, mean, least, most):
    before, rate = np.array(paces).T
    low, high = mean * least, min(1.0, mean * most)
    shares = finishing_together(before, rate, mean, low, high)
    assert shares.mean() == pytest.approx(mean, rel=1e-6)
    assert np.all((shares >= low) & (shares <= high))
    ends = (before + shares / rate)[(shares > low * (1 + 1e-9)) & (shares < high * (1 - 1e-9))]
    assert ends.size == 0 or np.ptp(ends) <= 1e-6 * ends.max()


def test_balanced_measures_what_a_coordinate_takes():
    policy = make_policy("balanced(topk(density=0.01), least=0.5, most=1.5)")
    policy.begin(plan(1))
    slow, fast = (policy.compressor(client).sparsifier.density for client in "01")
    assert slow + fast == pytest.approx(0.02)
    assert slow < fast <= 0.015
    with pytest.raises(ConfigError, match="simulated devices"):
        policy.begin(replace(plan(1), pace=None))


def test_a_plain_compressor_is_the_constant_policy():
    policy = make_policy("topk(density=0.01)|sign")
    assert isinstance(policy, Constant)
    assert policy.spec == "topk(density=0.01)|sign"
    assert make_policy("none").lossless


def test_warmup_takes_the_densities_of_the_paper():
    got = densities(make_policy("warmup(topk(density=0.001), rounds=4)"), [1.0] * 6)
    assert got == pytest.approx([0.25, 0.0629, 0.0158, 0.003976, 0.001, 0.001], rel=0.01)


def test_step_aware_threshold_follows_the_schedule():
    policy = make_policy("step_aware(hard_threshold(lam=0.02)|sign)")
    lams = []
    for server_round in (1, 2, 3):
        policy.begin(plan(server_round, step_size=lambda t: 0.5 / t))
        lams.append(policy.compressor("0").sparsifier.lam)
    assert lams == pytest.approx([0.02, 0.01, 0.02 / 3])


def test_accordion_is_high_while_norms_change_and_after_a_drop_of_the_step_size():
    norms = [10.0] * 2 + [4.0] * 2 + [3.9] * 4
    got = densities(make_policy("accordion(topk(density=0.01), high=0.1, every=2)"), norms)
    # Decisions after rounds 2 (nothing to compare with), 4 (10 -> 4: changed) and 6 (4 -> 3.9: calm).
    assert got == [0.1] * 6 + [0.01] * 2
    calm = [1.0] * 8
    dropped = densities(
        make_policy("accordion(topk(density=0.01), high=0.1, every=2)"), calm, lambda t: 1.0 if t < 7 else 0.1
    )
    assert dropped == [0.1] * 4 + [0.01] * 2 + [0.1] * 2


def test_accordion_goes_on_after_a_restart():
    spec, norms = "accordion(topk(density=0.01), high=0.1, every=3)", [5.0, 5, 5, 4.9, 4.9, 4.9, 1, 1, 1, 1, 1, 1, 1]
    whole, first = make_policy(spec), make_policy(spec)
    expected = densities(whole, norms)
    got = densities(first, norms[:5])
    second = make_policy(spec)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for server_round, norm in enumerate(norms[5:], 6):
        second.begin(plan(server_round))
        got.append(second.compressor("0").sparsifier.density)
        second.observe(RoundReport(server_round, update_norm=norm), [])
    assert got == expected


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("warmup(topk(k=5))", "has none"),
        ("warmup(topk(density=0.5), start=0.1)", "below the final density"),
        ("warmup(topk(density=0.01), rounds=0)", "rounds must be at least 1"),
        ("warmup(topk(density=0.01), round=3)", "rounds"),
        ("warmup()", "takes one compressor"),
        ("warmup(topk(density=0.01))|sign", "inside warmup"),
        ("accordion(topk(density=0.01))", "needs high"),
        ("accordion(topk(density=0.1), high=0.01)", "below the low density"),
        ("step_aware(topk(density=0.1))", "scales a hard threshold"),
        ('step_aware(hard_threshold(lam="1/(2*sqrt(k))", k=5))', "of a given lam"),
        ("balanced(topk(k=5))", "has none"),
        ("balanced(topk(density=0.1), least=2)", "least"),
        ("warmip(topk(density=0.1))", "warmip"),
        ('hard_threshold(lam="1/k", k=5)', "the rule"),
        ('hard_threshold(lam="1/(2*sqrt(k))")', "exactly one of density and k"),
        ("hard_threshold(lam=0.1, density=0.1)", "belong to the rule"),
        ('hard_threshold(lam=0.1, budget="1MB")', "leave out lam"),
        ('piecewise(hard_threshold(budget="1MB"))', "stands alone"),
        ('warmup(hard_threshold(budget="1MB"))', "stands alone"),
        ("warmup(accordion(topk(density=0.1), high=0.2))", "accordion is a policy and must be outermost"),
    ],
)
def test_mistakes_are_named(spec, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        make_policy(spec)
