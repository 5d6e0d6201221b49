"""Averages of iterates against the sums of the papers, with resuming and dtypes."""

import re

import numpy as np
import pytest
from safetensors.numpy import load, save

from fedsparse.errors import ConfigError, PayloadError
from fedsparse.run.iterates import IterateAverage


def iterates(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "weight": rng.standard_normal((3, 4)).astype(np.float32),
            "wide": rng.standard_normal(2),
            "half": rng.standard_normal(2).astype(np.float16),
            "scalar": np.array(rng.standard_normal(), np.float32),
            "calls": np.array(10 * t, np.int64),
        }
        for t in range(count)
    ]


SPECS = {
    "uniform": lambda t: 1.0,
    "quadratic(a=100)": lambda t: (100.0 + t) ** 2,
    "quadratic(a=0.5)": lambda t: (0.5 + t) ** 2,
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("steps", [1, 8])
def test_equals_the_weighted_sum(spec, steps):
    """Also over a restart in the middle, through a file, and starting after the initial model."""
    models, average = iterates(40), IterateAverage(spec, steps)
    for server_round in range(1, 40):
        average.add(models[server_round], server_round)
        if server_round == 17:
            state = load(save(average.state_dict()))
            average = IterateAverage(spec, steps)
            average.load_state_dict(state, models[server_round])
    got = average.arrays()
    assert list(got) == list(models[0])
    weights = [SPECS[spec](steps * r) for r in range(1, 40)]
    for name, array in got.items():
        assert array.dtype == models[0][name].dtype
        assert array.shape == models[0][name].shape
        if name == "calls":
            assert array == 390
        else:
            wanted = np.average([m[name].astype(np.float64) for m in models[1:]], axis=0, weights=weights)
            np.testing.assert_allclose(array, wanted, rtol=1e-3 if name == "half" else 1e-6, err_msg=name)


def test_none_is_the_newest_model():
    models, average = iterates(3), IterateAverage("none")
    for server_round, model in enumerate(models):
        average.add(model, server_round)
        assert all(array is model[name] for name, array in average.arrays().items())
    restored = IterateAverage("none")
    restored.load_state_dict(average.state_dict(), models[-1])
    assert all(array is models[-1][name] for name, array in restored.arrays().items())


def test_a_model_that_stands_still_is_its_own_average():
    average, (model,) = IterateAverage("quadratic(a=7)"), iterates(1)
    for server_round in range(100):
        average.add(model, server_round)
    assert all(np.array_equal(array, model[name]) for name, array in average.arrays().items())


def test_many_rounds_of_a_float32_model_keep_their_digits():
    """A float32 sum of 20,000 would be off by its rounding, 1e-4 or so."""
    average, rng = IterateAverage("uniform"), np.random.default_rng(0)
    values = (1000 + rng.standard_normal(20_000)).astype(np.float32)
    for t, value in enumerate(values):
        average.add({"w": np.full(1, value)}, t)
    assert average._mean["w"][0] == pytest.approx(values.astype(np.float64).mean(), rel=1e-12)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("quadratc(a=1)", "Did you mean 'quadratic'"),
        ("quadratic", "needs a; options: a"),
        ("quadratic(a=0)", "a must be in (0, "),
        ("uniform(a=1)", "takes no options"),
        ("uniform|none", "without '|'"),
    ],
)
def test_what_is_wrong_is_explained(spec, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        IterateAverage(spec)


def test_misuse_is_refused():
    with pytest.raises(ConfigError, match="steps_per_round must be at least 1"):
        IterateAverage("uniform", 0)
    average = IterateAverage("uniform")
    with pytest.raises(RuntimeError, match="no iterate"):
        average.arrays()
    average.add({"w": np.ones(2)}, 1)
    with pytest.raises(PayloadError, match="other arrays"):
        average.add({"v": np.ones(2)}, 2)
