"""Clients that train together learn what each of them learns alone, to the last bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clients.flat import FlatModel
from clients.job import TrainSettings
from clients.together import Trained, Trainee, can_train_together, train_together
from clients.training import torch_threads, train
from fedsparse.models import build_model, model_arrays

RNG = np.random.default_rng(0)
SHAPE = (1, 5, 6)
X = RNG.integers(0, 256, (400, *SHAPE), dtype=np.uint8)
MODELS = {
    "softmax": 10,
    "softmax ": 3,
    "logistic": 2,
    "logistic(bias=false)": 2,
    "mlp(hidden=7)": 10,
    "mlp(hidden=8)": 10,
}
MODELS |= {"mlp(hidden=1)": 3, "mlp(hidden=20, layers=3)": 4}


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


def random_model(name: str, seed: int) -> FlatModel:
    model = build_model(name.strip(), SHAPE, MODELS[name], 0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(seed))
    return FlatModel(model)


def alone(flat: FlatModel, y: np.ndarray, trainee: Trainee) -> Trained:
    start = model_arrays(flat.model)
    keys = {"scale": 1 / 255, "seed": 3, "server_round": 2, "client": trainee.client}
    result = train(flat, X, y, trainee.part, trainee.settings, **keys)
    learnt = Trained(flat.arrays(), result)
    flat.load(start)
    return learnt


def assert_same_bits(flat: FlatModel, y: np.ndarray, trainees: list[Trainee], found: dict[int, Trained]) -> None:
    for trainee in trainees:
        wanted, got = alone(flat, y, trainee), found[trainee.client]
        assert got.result == wanted.result
        assert list(got.arrays) == list(wanted.arrays)
        for name, array in wanted.arrays.items():
            assert got.arrays[name].tobytes() == array.tobytes(), name


@given(
    st.sampled_from(list(MODELS)),
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.sampled_from([1, 3, 8, 32]),
    st.sampled_from([(2, None), (None, 5)]),
    st.sampled_from([{}, {"momentum": 0.9}, {"weight_decay": 0.01, "proximal_mu": 0.1}]),
    st.sampled_from(["constant", "inverse(a=2, per='step')"]),
    st.integers(0, 100),
)
def test_together_as_alone(name, sizes, batch_size, duration, more, schedule, seed):
    epochs, steps = duration
    settings = TrainSettings(
        local_epochs=epochs, local_steps=steps, batch_size=batch_size, lr=0.02, lr_schedule=schedule, rounds=4, **more
    )
    flat = random_model(name, seed)
    y = np.random.default_rng(seed).integers(0, MODELS[name], len(X))
    at = np.cumsum([0, *sizes])
    trainees = [Trainee(i, np.arange(at[i], at[i + 1]), settings) for i in range(len(sizes))]
    trainees[0] = replace(trainees[0], settings=replace(settings, max_steps=2))
    before = model_arrays(flat.model)
    found = train_together(flat, X, y, trainees, scale=1 / 255, seed=3, server_round=2)
    assert all(np.array_equal(array, before[n]) for n, array in model_arrays(flat.model).items())
    assert_same_bits(flat, y, trainees, found)
    assert all(flat.same_bits.values()), "on this machine they really train together"


def equal_parts(count: int, settings: TrainSettings) -> list[Trainee]:
    return [Trainee(i, np.arange(40 * i, 40 * (i + 1)), settings) for i in range(count)]


def test_where_the_bits_would_differ_each_takes_its_own_steps(monkeypatch):
    """A BLAS that adds up in another order for many matrices is found out by itself."""
    flat, y = random_model("mlp(hidden=8)", 0), RNG.integers(0, 10, len(X))
    trainees = equal_parts(5, TrainSettings(local_epochs=2, batch_size=16, lr=0.1))
    bmm = torch.bmm

    def other(a, b, **kwargs):
        product = bmm(a, b, **kwargs)
        return product.mul_(1 + 1e-6) if len(a) > 1 else product

    monkeypatch.setattr(torch, "bmm", other)
    found = train_together(flat, X, y, trainees, scale=1 / 255, seed=3, server_round=2)
    assert flat.same_bits == {(5, 16): False, (5, 8): False}
    assert_same_bits(flat, y, trainees, found)


def test_who_diverges_is_left_to_say_so_and_spoils_nobody():
    flat, y = random_model("softmax", 0), RNG.integers(0, 10, len(X))
    settings = TrainSettings(local_epochs=1, batch_size=16, lr=0.1, weight_decay=1e-3)
    x, trainees = X.astype(np.float32), equal_parts(3, settings)
    x[45] = np.inf
    found = train_together(flat, x, y, trainees, scale=1 / 255, seed=3, server_round=2)
    assert sorted(found) == [0, 2]


def test_large_models_train_in_small_groups(monkeypatch):
    flat, y = random_model("softmax", 0), RNG.integers(0, 10, len(X))
    trainees = equal_parts(7, TrainSettings(local_epochs=1, batch_size=16, lr=0.1))
    monkeypatch.setattr("clients.together.MOST_NUMBERS", 3 * flat.groups[0].values.numel())
    found = train_together(flat, X, y, trainees, scale=1 / 255, seed=3, server_round=2)
    assert max(count for count, _ in flat.same_bits) == 3
    assert_same_bits(flat, y, trainees, found)


def test_others_train_alone():
    settings = TrainSettings()
    dense = random_model("softmax", 0)
    assert can_train_together(dense, settings)
    assert not can_train_together(dense, replace(settings, clip_norm=1.0))
    assert not can_train_together(FlatModel(build_model("cnn", (1, 8, 8), 10, 0)), settings)
    with torch_threads(2):
        assert not can_train_together(dense, settings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_together_as_alone_on_a_gpu():
    flat = FlatModel(random_model("mlp(hidden=7)", 0).model.to("cuda"))
    y = RNG.integers(0, 10, len(X))
    trainees = equal_parts(5, TrainSettings(local_epochs=2, batch_size=16, lr=0.1))
    found = train_together(flat, X, y, trainees, scale=1 / 255, seed=3, server_round=2)
    assert_same_bits(flat, y, trainees, found)
