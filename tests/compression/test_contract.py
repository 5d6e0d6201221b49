"""The one table that every registered operator runs through."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsparse.compression import QUANTIZERS, SPARSIFIERS, Compressed, Compressor, decode, encode
from fedsparse.errors import ConfigError

SPARSE = [spec for cls in SPARSIFIERS.values() for spec in cls.examples]
QUANT = [spec for cls in QUANTIZERS.values() for spec in cls.examples]
FIRST_S = [cls.examples[0] for cls in SPARSIFIERS.values()]
FIRST_Q = [cls.examples[0] for cls in QUANTIZERS.values()]
# Every operator by itself; every quantizer after a sparsifier; every sparsifier before a deterministic and a random
# quantizer: what can go wrong between two of them shows there. The whole product would say the same for ten minutes.
COMPOSED = {f"topk(density=0.2)|{q}" for q in FIRST_Q} | {
    f"{s}|{q}" for s in FIRST_S for q in ("sign", "qsgd(levels=16)")
}
FLAT = sorted({*SPARSE, *(f"none|{q}" for q in QUANT), *COMPOSED})
PIECEWISE = {*FIRST_S, *(f"topk(density=0.2)|{q}" for q in FIRST_Q), "randk(density=0.1)|qsgd(levels=16)"}
ALL = FLAT + sorted(f"piecewise({spec})" for spec in PIECEWISE)

finite = st.floats(-1e6, 1e6, width=32)
vectors = hnp.arrays(
    np.float32, st.integers(0, 300), elements=st.one_of(finite, st.just(0.0), st.sampled_from([1.0, -1.0]))
)


def bounds_of(d: int, cuts: list[float]) -> np.ndarray:
    return np.array([0, *sorted(int(c * d) for c in cuts), d], dtype=np.int64)


cuts = st.lists(st.floats(0, 1), max_size=3)


def same(a: Compressed, b: Compressed) -> bool:
    indices = (a.indices is None) == (b.indices is None) and (a.indices is None or np.array_equal(a.indices, b.indices))
    return indices and a.d == b.d and a.values.tobytes() == b.values.tobytes() and np.array_equal(a.codes, b.codes)


@pytest.mark.parametrize("spec", ALL)
def test_spec_round_trips(spec):
    compressor = Compressor.from_spec(spec)
    assert Compressor.from_spec(compressor.spec) == compressor
    assert Compressor.from_spec(compressor.spec).spec == compressor.spec


@pytest.mark.parametrize("spec", ALL)
@settings(max_examples=25)
@given(x=vectors, where=cuts, seed=st.integers(0, 2**64 - 1))
def test_bytes_conservation_determinism(spec, x, where, seed):
    """Frame round trip is exact; p = C(p) + e; the same seed gives the same bits; inputs stay untouched."""
    compressor, bounds, before = Compressor.from_spec(spec), bounds_of(x.size, where), x.copy()
    sent = compressor.compress(x, seed, bounds)
    assert x.tobytes() == before.tobytes()
    assert sent.d == x.size
    assert sent.values.dtype == np.float32
    if sent.indices is not None:
        assert sent.indices.dtype == np.int64
        assert np.all(np.diff(sent.indices) > 0)
        assert sent.indices.size == sent.values.size
        assert sent.indices.size == 0 or (sent.indices[0] >= 0 and sent.indices[-1] < x.size)
    frame = encode(sent, compressor, update_id=seed)
    assert same(decode(frame, compressor, x.size, bounds=bounds, update_id=seed), sent)
    assert encode(compressor.compress(x, seed, bounds), compressor, update_id=seed) == frame

    residual = np.full_like(x, -0.0)  # the identity of addition: 0.0 would turn -0.0 into 0.0
    again = compressor.compress_with_memory(x, residual, seed, bounds)
    assert same(again, sent)
    assert x.tobytes() == before.tobytes()
    rounding = 1.2e-7 * max(np.abs(x).max(initial=0), np.abs(sent.values).max(initial=0)) + 1e-45
    gap = again.to_dense().astype(np.float64) + residual - x
    assert np.abs(gap).max(initial=0) <= rounding, "update mass was lost"
    accumulator = np.zeros(x.size, dtype=np.float64)
    sent.add_to(accumulator, 0.5)
    np.testing.assert_allclose(accumulator, 0.5 * sent.to_dense().astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize("spec", ALL)
@settings(max_examples=10)
@given(x=hnp.arrays(np.float32, st.integers(1, 60), elements=finite), where=cuts)
def test_claimed_bound_holds(spec, x, where):
    """``E||x - C(x)||^2 <= absolute + relative ||x||^2`` on every input: exactly, or on average over many draws."""
    compressor, bounds = Compressor.from_spec(spec), bounds_of(x.size, where)
    claim = compressor.claim(x.size, bounds)
    draws = 1 if not claim.random else 120
    errors = []
    for seed in range(draws):
        error = compressor.compress(x, seed, bounds).to_dense().astype(np.float64) - x
        errors.append(float(error @ error))
    norm2 = float(x.astype(np.float64) @ x)
    # Float32 rounding; for a random operator also five standard errors of the mean, and what a rare draw that never
    # came up could have changed (Bernstein's inequality: the sample's own deviation knows nothing of it).
    chance = 5 * np.std(errors) / np.sqrt(draws) + 5 * norm2 / draws if claim.random else 0.0
    slack = chance + 1e-6 * norm2 + 1e-30
    assert np.mean(errors) <= claim.absolute + claim.relative * norm2 + slack


@pytest.mark.parametrize("spec", [s for s in FLAT if Compressor.from_spec(s).claim(40).unbiased])
def test_unbiased_operators_are_unbiased(spec):
    x = np.random.default_rng(1).standard_normal(40).astype(np.float32)
    compressor = Compressor.from_spec(spec)
    draws = np.stack([compressor.compress(x, seed).to_dense() for seed in range(4000)]).astype(np.float64)
    standard_error = draws.std(axis=0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(axis=0) - x) <= 5 * standard_error + 1e-6)


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize(
    "x",
    [
        np.zeros(0, np.float32),
        np.zeros(50, np.float32),
        np.array([3.0], np.float32),
        np.ones(64, np.float32),
        np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38], np.float32),
        np.array([3e37, -3e37, 1.0], np.float32),
    ],
    ids=["empty", "zeros", "one", "ties", "denormal", "huge"],
)
def test_odd_inputs(spec, x):
    compressor, bounds = Compressor.from_spec(spec), np.array([0, x.size // 2, x.size])
    sent = compressor.compress(x, 7, bounds)
    assert np.isfinite(sent.values).all()
    assert same(decode(encode(sent, compressor), compressor, x.size, bounds=bounds), sent)


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_refused(spec, bad):
    x = np.ones(100, np.float32)
    x[41] = bad
    residual = np.ones(100, np.float32)
    compressor = Compressor.from_spec(spec)
    with pytest.raises(ValueError, match="position 41"):
        compressor.compress(x, 0, np.array([0, 100]))
    with pytest.raises(ValueError, match="position 41"):
        compressor.compress_with_memory(x, residual, 0, np.array([0, 100]))
    assert np.array_equal(residual, np.ones(100, np.float32)), "a refused update must not touch the memory"


@pytest.mark.parametrize("spec", FLAT)
def test_other_layouts_and_types_mean_the_same(spec):
    base = np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32)
    compressor = Compressor.from_spec(spec)
    wanted = compressor.compress(np.ascontiguousarray(base[:, 0]), 3)
    assert same(compressor.compress(base[:, 0], 3), wanted)
    assert same(compressor.compress(base[:, 0].astype(np.float64), 3), wanted)
    assert same(compressor.compress(base[:, 0].astype(">f4"), 3), wanted)


def test_wrong_shapes_and_types_are_refused():
    compressor = Compressor.from_spec("topk(k=1)")
    for bad in (np.ones((2, 2), np.float32), np.array(["a"]), np.array([1j]), np.array([None])):
        with pytest.raises(ValueError, match="an update"):
            compressor.compress(bad, 0)
    with pytest.raises(ValueError, match="residual"):
        compressor.compress_with_memory(np.ones(3, np.float32), np.zeros(4, np.float32), 0)
    with pytest.raises(ConfigError, match="boundaries"):
        Compressor.from_spec("piecewise(topk(k=1))").compress(np.ones(3, np.float32), 0, np.array([0, 2]))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("topkk(density=0.1)", "Did you mean 'topk'"),
        ("topk(densty=0.1)", "Did you mean 'density'"),
        ("topk", "exactly one of density"),
        ("topk(density=0.1, k=3)", "exactly one of density"),
        ("topk(density=0)", r"\(0, 1\]"),
        ("topk(density=1.5)", r"\(0, 1\]"),
        ("topk(k=0)", "at least 1"),
        ("topk(k=1.5)", "whole number"),
        ("hard_threshold", "needs lam"),
        ("hard_threshold(lam=0)", r"\[1.2e-38, 3.4e\+38\]"),
        ("hard_threshold(lam=1e-300)", r"\[1.2e-38, 3.4e\+38\]"),
        ("hard_threshold(lam=-1)", r"\[1.2e-38, 3.4e\+38\]"),
        ('hard_threshold(lam="x")', "must be a number"),
        ("topk(k=1)|topk(k=1)", "one sparsifier"),
        ("sign|topk(k=1)", "one sparsifier"),
        ("topk(k=1)|sign|sign", "one sparsifier"),
        ("topk(k=1)|qsgd(levels=0)", "from 1 to 32767"),
        ("none|sign(levels=2)", "unknown option"),
        ("none|float16(levels=2)", "takes no options"),
        ("topk(k=1)|piecewise(sign)", "outermost"),
        ("piecewise(piecewise(sign))", "outermost"),
        ("", "expected a name"),
        ("topk(", "topk"),
    ],
)
def test_bad_specs_are_explained(spec, words):
    with pytest.raises(ConfigError, match=words):
        Compressor.from_spec(spec)


def test_a_sum_that_overflows_is_refused():
    """Two finite halves of an infinite p: found where it is selected, in silence until then."""
    for spec in ("topk(k=1)", "hard_threshold(lam=1.0)", "none|sign"):
        halves = np.full(3, 3e38, np.float32)
        with pytest.raises(ValueError, match="not finite"):
            Compressor.from_spec(spec).compress_with_memory(halves, halves.copy(), 0)


@pytest.mark.parametrize("spec", FLAT)
def test_near_the_largest_float32_a_frame_decodes_or_nothing_is_sent(spec):
    rng = np.random.default_rng(3)
    x = (np.float32(3.4e38) * rng.choice([-1, 1, 0.99], 64)).astype(np.float32)
    compressor = Compressor.from_spec(spec)
    sent = None
    with np.errstate(over="ignore"), suppress(ValueError):
        sent = compressor.compress(x, 1)
    if sent is not None:
        np.testing.assert_array_equal(decode(encode(sent, compressor), compressor, d=64).values, sent.values)


def test_error_feedback_over_rounds_loses_nothing():
    """After T rounds: sum of what was sent + e_T == sum of all updates."""
    for spec in FLAT:
        rng = np.random.default_rng(5)
        compressor, residual = Compressor.from_spec(spec), np.zeros(200, np.float32)
        updates, sent = np.zeros(200), np.zeros(200)
        for round_ in range(30):
            update = rng.standard_normal(200).astype(np.float32) * 0.1
            updates += update
            compressor.compress_with_memory(update, residual, round_).add_to(sent)
        scale = max(1.0, float(np.abs(residual).max()), float(np.abs(sent).max()))
        np.testing.assert_allclose(sent + residual, updates, atol=3e-5 * scale, err_msg=spec)


def relative_error(spec: str, x: np.ndarray, seeds: int = 20) -> float:
    """Return the mean of ``||x - C(x)||^2 / ||x||^2``."""
    compressor = Compressor.from_spec(spec)
    errors = [compressor.compress(x, seed).to_dense().astype(np.float64) - x for seed in range(seeds)]
    return float(np.mean([error @ error for error in errors]) / (x.astype(np.float64) @ x))


def test_drive_loses_the_same_share_whatever_the_distribution():
    """About 1 - 2/pi (Vargaftik et al. 2021, Theorem 3), where plain sign loses nearly all of a skewed vector."""
    rng = np.random.default_rng(0)
    skewed = (rng.standard_normal(4096) * np.exp(3 * rng.standard_normal(4096))).astype(np.float32)
    for x in (rng.standard_normal(4096).astype(np.float32), skewed):
        assert relative_error("none|drive", x, 1) == pytest.approx(1 - 2 / np.pi, abs=0.03)
    assert relative_error("none|sign", skewed, 1) > 0.8


@pytest.mark.parametrize(
    ("spec", "factor"),
    [
        ("sampled_topk(density=0.01)", 1.5),
        ("sidco(density=0.01)", 2.0),
        ('sidco(density=0.01, fit="gamma", stages=2)', 2.0),
        ('sidco(density=0.001, fit="pareto", stages=3)', 2.5),
    ],
)
def test_estimated_thresholds_keep_about_what_is_wanted(spec, factor):
    """On the heavy-tailed magnitudes that gradients have."""
    x = np.random.default_rng(1).laplace(size=200_000).astype(np.float32)
    compressor = Compressor.from_spec(spec)
    wanted = compressor.sparsifier.density * x.size
    kept = [compressor.compress(x, seed).nnz for seed in range(5)]
    assert wanted / factor <= np.mean(kept) <= wanted * factor


def test_scaled_qsgd_is_a_contraction_where_the_unscaled_is_none():
    """Basu et al. 2019, Lemma 1 and Lemma 2: beta >= 1 breaks the one, never the other."""
    d = 400
    assert Compressor.from_spec("none|qsgd(levels=4)").claim(d).delta is None
    scaled = Compressor.from_spec("none|qsgd(levels=4, scaled=true)")
    assert scaled.claim(d).delta == pytest.approx(1 / (1 + min(d / 16, np.sqrt(d) / 4)))
    x = np.random.default_rng(0).standard_normal(d).astype(np.float32)
    assert relative_error("none|qsgd(levels=4, scaled=true)", x) < 1 < relative_error("none|qsgd(levels=4)", x)
