"""Divisions of examples among clients: disjoint, seeded, complete where they claim to be."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsparse.data import PARTITIONS, label_distribution, partition
from fedsparse.errors import ConfigError

SPECS = [
    "iid",
    "dirichlet(alpha=0.1)",
    "dirichlet(alpha=1e-05)",
    "dirichlet(alpha=1000.0)",
    "shards(shards_per_client=2)",
    "pathological(classes_per_client=1)",
    "quantity_skew(alpha=0.5)",
]


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=60)
@given(n=st.integers(0, 400), classes=st.integers(1, 10), clients=st.integers(1, 60), seed=st.integers(0, 2**40))
def test_disjoint_seeded_and_complete(spec, n, classes, clients, seed):
    """Every example goes to exactly one client; more clients than examples leaves some empty, never an error."""
    labels = np.random.default_rng(seed).integers(0, classes, n)
    if spec.startswith("pathological") and n == 0:
        return
    parts = partition(spec, labels, clients, seed)
    assert len(parts) == clients
    everything = np.concatenate(parts)
    assert everything.dtype == np.int64
    assert np.unique(everything).size == everything.size
    # With fewer places than classes some class has no holder; that is the only way to leave examples out.
    if not (spec.startswith("pathological") and clients < np.unique(labels).size):
        assert everything.size == n
    again = partition(spec, labels, clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@settings(max_examples=100)
@given(
    kind=st.sampled_from(["dirichlet", "quantity_skew"]),
    clients=st.integers(1, 40),
    min_size=st.integers(0, 10),
    spare=st.integers(0, 300),
    seed=st.integers(0, 2**40),
)
def test_every_client_gets_min_size(kind, clients, min_size, spare, seed):
    labels = np.random.default_rng(seed).integers(0, 5, clients * min_size + spare)
    if not labels.size:
        return
    parts = partition(f"{kind}(alpha=0.05, min_size={min_size})", labels, clients, seed)
    sizes = np.array([part.size for part in parts])
    assert sizes.min() >= min_size
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(labels.size))
    with pytest.raises(ConfigError, match="the data has"):
        partition(f"{kind}(min_size={labels.size + 1})", labels, clients, seed)


@pytest.mark.parametrize("spelling", ["dirichlet", "dirichlet( alpha = 0.10 )", "dirichlet(alpha=1e-1)"])
def test_spelling_does_not_change_who_gets_what(spelling):
    labels = np.arange(1000) % 10
    one, other = (partition(spec, labels, 10, 0) for spec in ("dirichlet(alpha=0.1)", spelling))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_seeds_and_purposes_matter():
    labels = np.arange(1000) % 10
    first, second = (partition("dirichlet(alpha=0.5)", labels, 10, seed) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test_pathological_gives_exactly_k_classes(k):
    labels = np.repeat(np.arange(10), 100)
    counts = label_distribution(partition(f"pathological(classes_per_client={k})", labels, 30, 0), labels, 10)
    assert ((counts > 0).sum(axis=1) == k).all()
    holders = (counts > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1, "classes are used evenly"


def test_dirichlet_skew_follows_alpha():
    labels = np.repeat(np.arange(10), 500)

    def largest_share(alpha: float) -> float:
        counts = label_distribution(partition(f"dirichlet(alpha={alpha})", labels, 20, 0), labels, 10)
        kept = counts[counts.sum(axis=1) > 0]
        return float((kept.max(axis=1) / kept.sum(axis=1)).mean())

    assert largest_share(0.05) > 0.6 > 0.3 > largest_share(100.0)


def test_shards_give_few_classes_and_equal_sizes():
    labels = np.repeat(np.arange(10), 100)
    parts = partition("shards(shards_per_client=2)", labels, 50, 0)
    assert {part.size for part in parts} == {20}
    assert (label_distribution(parts, labels, 10) > 0).sum(axis=1).max() <= 2


def test_natural_clients():
    groups = np.array([7, 3, 7, 5, 3, 7])
    parts = partition("natural", np.zeros(6, np.int64), 3, 0, groups)
    assert [sorted(part.tolist()) for part in parts] == [[1, 4], [3], [0, 2, 5]]
    with pytest.raises(ConfigError, match="has 3 clients, num_clients is 4"):
        partition("natural", np.zeros(6, np.int64), 4, 0, groups)
    with pytest.raises(ConfigError, match="names no natural clients"):
        partition("natural", np.zeros(6, np.int64), 3, 0)


def test_ten_thousand_clients():
    labels = np.random.default_rng(0).integers(0, 10, 60_000)
    for spec in [*SPECS, "dirichlet(alpha=1e-300)", "quantity_skew(alpha=0.5, min_size=3)"]:
        start = time.process_time()
        assert len(partition(spec, labels, 10_000, 0)) == 10_000
        assert time.process_time() - start < 2.0, spec


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dirichlett(alpha=1)", "Did you mean 'dirichlet'"),
        ("dirichlet(alfa=1)", "Did you mean 'alpha'"),
        ("dirichlet(alpha=0)", r"\(0, "),
        ("shards(shards_per_client=0)", "at least 1|from 1"),
        ("pathological(classes_per_client=11)", "the data has 10 classes"),
        ("iid|iid", "without '|'"),
    ],
)
def test_bad_specs_are_explained(spec, words):
    with pytest.raises(ConfigError, match=words):
        partition(spec, np.arange(100) % 10, 5, 0)
    assert spec.split("(")[0] not in PARTITIONS or "=" in spec or "|" in spec
