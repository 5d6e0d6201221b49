"""Local training by hand: the same steps as torch.optim, the same bits every time, on every kind of model."""

import numpy as np
import pytest
import torch
from torch import nn

from clients.flat import FlatModel, to_input
from clients.job import TrainSettings
from clients.schedules import make_schedule
from clients.training import batches, evaluate, num_steps, torch_threads, train
from fedsparse.data import load_dataset
from fedsparse.errors import ConfigError, PayloadError, RunError
from fedsparse.models import build_model, model_arrays
from fedsparse.seeding import generator

DIGITS = load_dataset("digits")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """As clients train; and the runners of these tests share the CPUs."""
    with torch_threads(1):
        yield


def fit(flat: FlatModel | nn.Module, settings: TrainSettings, part=None, x=DIGITS.x_train, **changes):
    flat = flat if isinstance(flat, FlatModel) else FlatModel(flat)
    part = np.arange(100) if part is None else part
    kwargs = {"scale": DIGITS.scale, "seed": 0, "server_round": 1, "client": 3, **changes}
    return train(flat, x, DIGITS.y_train, part, settings, **kwargs)


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in model_arrays(model).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["mlp(hidden=16)", "cnn"])
@pytest.mark.parametrize(("prox", "clip"), [(0.0, None), (0.5, None), (0.0, 0.5)])
def test_steps_equal_torch_optim(name, dtype, prox, clip):
    settings = TrainSettings(
        local_epochs=2, batch_size=32, lr=0.05, momentum=0.9, weight_decay=0.01, proximal_mu=prox, clip_norm=clip
    )
    ours, theirs = (build_model(name, (1, 8, 8), 10, 0).to(dtype) for _ in range(2))
    result = fit(ours, settings)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    start = [p.detach().clone() for p in theirs.parameters()]
    losses = []
    for batch in batches(100, settings, generator(0, "batches", 1, 3)):
        optimizer.zero_grad()
        inputs = (torch.from_numpy(DIGITS.x_train[batch]).float() * DIGITS.scale).to(dtype)
        loss = nn.functional.cross_entropy(theirs(inputs), torch.from_numpy(DIGITS.y_train[batch]))
        losses.append((float(loss.detach()), len(batch)))
        proximal = sum(((p - w) ** 2).sum() for p, w in zip(theirs.parameters(), start, strict=True))
        (loss + prox / 2 * proximal).backward()
        if clip:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        optimizer.step()
    atol = 2e-5 if dtype == torch.float32 else 1e-12
    for (key, a), (_, b) in zip(model_arrays(ours).items(), model_arrays(theirs).items(), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, err_msg=key)
    assert result.steps == len(losses) == 8
    assert result.loss == pytest.approx(sum(v * n for v, n in losses) / sum(n for _, n in losses), rel=1e-4)


class Hard(nn.Module):
    """Convolution, BatchNorm, dropout, tied and frozen weights, and a buffer that does not travel."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.a = nn.Linear(256, 256, bias=False)
        self.norm = nn.BatchNorm1d(256)
        self.b = nn.Linear(256, 256, bias=False)
        self.b.weight = self.a.weight
        self.fixed = nn.Linear(256, 64).requires_grad_(False)
        self.head = nn.Linear(64, 10)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.a(self.conv(x).flatten(1)))
        x = nn.functional.dropout(self.fixed(torch.relu(self.b(x))), 0.3, self.training)
        if self.training:
            self.calls += 1
        return self.head(x) * (1 + 0.01 * self.calls)


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_hard_models_train_and_repeat_their_bits(dtype):
    """33 examples in batches of 32 leave a last batch of one, for which BatchNorm has no variance.

    One FlatModel serves all clients of a process: neither what it trained before nor torch's own random state matters.
    """
    torch.manual_seed(0)
    model = Hard(dtype)
    start = model_arrays(model)
    fixed, flat = model.fixed.weight.clone(), FlatModel(model)
    settings = TrainSettings(local_epochs=2, batch_size=32, lr=0.05, momentum=0.5)
    runs = []
    for other in (4, 5):
        flat.load(start)
        fit(flat, settings, np.arange(40, 90), client=other)
        flat.load(start)
        torch.manual_seed(other)
        state = torch.random.get_rng_state()
        fit(flat, settings, np.arange(33))
        assert torch.equal(torch.random.get_rng_state(), state)
        runs.append({name: array.tobytes() for name, array in flat.arrays().items()})
    assert runs[0] == runs[1]
    assert model.b.weight is model.a.weight
    assert torch.equal(model.fixed.weight, fixed)
    after = flat.arrays()
    assert set(after) == set(start) - {"fixed.weight", "fixed.bias"}, "what is frozen is not sent back"
    assert all(array.flags.c_contiguous for array in after.values())
    assert not np.array_equal(after["conv.weight"], start["conv.weight"])
    assert after["norm.num_batches_tracked"] == 2, "the batches of one example do not count"
    with pytest.raises(PayloadError, match=r"lacks arrays of the model: head\.bias"):
        flat.load({name: array for name, array in start.items() if name != "head.bias"})


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_the_bits_do_not_depend_on_how_the_data_lies_in_memory(name):
    """A memory map, a copy and another float type of the same images choose the same kernels."""
    plain = DIGITS.x_train[:, 0].copy()
    layouts = [plain[:, None], plain.reshape(-1, 1, 8, 8).copy(), np.asfortranarray(plain[:, None])]
    layouts += [layouts[1].astype(dtype) for dtype in (np.float32, np.float64, np.int64)]
    found = set()
    for x in layouts:
        model = build_model(name, (1, 8, 8), 10, 0)
        fit(model, TrainSettings(local_epochs=2, lr=0.1), np.arange(100), x)
        loss, _ = evaluate(build_model(name, (1, 8, 8), 10, 0), x, DIGITS.y_train, DIGITS.scale, CPU)
        found.add((tuple(bits(model).values()), loss))
    assert len(found) == 1
    for channels_last in (True, False):
        inputs = [to_input(x[np.arange(7)], DIGITS.scale, CPU, torch.float32, channels_last) for x in layouts]
        assert len({i.stride() for i in inputs}) == 1
        assert all(i.data_ptr() % 64 == 0 for i in inputs), "torch's own memory, aligned alike everywhere"


@pytest.mark.parametrize(("lr", "tolerance"), [(1e-4, 0.05), (0.2, 0.1)])
def test_half_precision_learns_as_float32_does(lr, tolerance):
    """Master copies add up what a bfloat16 parameter would round away, 2^-9 of its size; the parameters follow them."""
    exact, half = (build_model("mlp(hidden=16)", (1, 8, 8), 10, 0) for _ in range(2))
    start, flat = model_arrays(exact), FlatModel(half.to(torch.bfloat16))
    flat.load(start)
    assert all(np.array_equal(array, start[name]) for name, array in flat.arrays().items())
    settings = TrainSettings(local_epochs=10, lr=lr)
    fit(exact, settings)
    fit(flat, settings)
    for name, array in model_arrays(exact).items():
        wanted, got = array - start[name], flat.arrays()[name] - start[name]
        assert np.linalg.norm(got - wanted) < tolerance * np.linalg.norm(wanted), name
    for name, array in model_arrays(half).items():
        np.testing.assert_allclose(array, flat.arrays()[name], rtol=2**-8, err_msg=name)


def test_half_precision_takes_inputs_in_its_type():
    model = build_model("mlp(hidden=8)", (1, 8, 8), 10, 0).to(torch.float16)
    assert fit(model, TrainSettings(lr=0.01)).loss > 0


def test_epochs_and_steps():
    rng = np.random.default_rng(0)
    epochs = list(batches(10, TrainSettings(local_epochs=2, batch_size=4), rng))
    assert [len(b) for b in epochs] == [4, 4, 2, 4, 4, 2]
    assert sorted(np.concatenate(epochs[:3])) == list(range(10))
    by_steps = TrainSettings(local_epochs=None, local_steps=5, batch_size=4)
    assert [len(b) for b in batches(10, by_steps, rng)] == [4, 4, 2, 4, 4]
    for n in (0, 1, 4, 10):
        for settings in (by_steps, TrainSettings(local_epochs=3, batch_size=4)):
            assert len(list(batches(n, settings, rng))) == num_steps(n, settings)


def test_an_empty_client_changes_nothing():
    model = build_model("mlp", (1, 8, 8), 10, 0)
    before = bits(model)
    result = fit(model, TrainSettings(local_epochs=None, local_steps=5), np.empty(0, np.int64))
    assert (result.loss, result.steps) == (None, 0)
    assert bits(model) == before


def test_divergence_names_client_round_and_remedy():
    model = build_model("mlp", (1, 8, 8), 10, 0)
    with pytest.raises(RunError, match=r"client 3, round 1, step \d+: the loss is .*lower train.lr"):
        fit(model, TrainSettings(local_epochs=20, lr=1e30))
    # The last step can leave a finite loss and infinite parameters.
    with pytest.raises(RunError, match="step 1: a parameter is no longer finite"):
        fit(
            build_model("mlp", (1, 8, 8), 10, 0),
            TrainSettings(local_epochs=None, local_steps=1, lr=3e38, weight_decay=9.0),
        )
    fit(build_model("mlp", (1, 8, 8), 10, 0), TrainSettings(local_epochs=3, lr=1.0, clip_norm=0.1))


def test_clipping_bounds_the_step():
    model = build_model("mlp", (1, 8, 8), 10, 0)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    fit(model, TrainSettings(local_epochs=None, local_steps=1, lr=1.0, clip_norm=0.01))
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert float((after - before).norm()) == pytest.approx(0.01, rel=1e-3)


def test_it_learns():
    model = build_model("mlp", (1, 8, 8), 10, 0)
    fit(model, TrainSettings(local_epochs=20, lr=0.3), np.arange(len(DIGITS.y_train)))
    _, accuracy = evaluate(model, DIGITS.x_test, DIGITS.y_test, DIGITS.scale, CPU)
    assert accuracy > 0.93


def test_schedules():
    factors = {
        "constant": [1, 1, 1],
        "cosine": [1, 0.75, 0.25],
        "step(every=2, factor=0.5)": [1, 1, 0.5],
        "inverse(a=2)": [1, 2 / 3, 0.5],
        "inverse_sqrt": [1, 0.5**0.5, 3**-0.5],
        "inverse_sqrt(a=0.5)": [1, 3**-0.5, 5**-0.5],
        "strongly_convex(c=2, mu=0.5, a=4, per='round')": [1, 0.8, 2 / 3],
    }
    for spec, wanted in factors.items():
        assert [make_schedule(spec).multiplier(t, 3, 7, 9) for t in (1, 2, 3)] == pytest.approx(wanted)
    for spec in ("inverse(a=2, per='step')", "strongly_convex(c=1, mu=0.5, a=2)"):
        by_step = make_schedule(spec)
        got = [by_step.multiplier(server_round, 2, step, 3) for server_round in (1, 2) for step in range(3)]
        assert got == pytest.approx([2 / (2 + t) for t in range(6)])
    for spec, words in {
        "cosin": "Did you mean 'cosine'",
        "step": "needs every",
        "cosine(per='epoch')": "Allowed: round, step",
        "step(every=0)": "at least 1",
        "inverse_sqrt(a=0)": r"a must be in \(0",
        "strongly_convex(c=2, mu=1e-4)": "needs a; options: per, c, mu, a",
        "strongly_convex(c=0, mu=1, a=1)": "c must be .* the experiments c = 2",
        "strongly_convex(c=8, mu=0.0, a=1)": "mu must be .*mu-strongly convex .*Theorem 2.4.* use inverse_sqrt",
        "strongly_convex(c=8, mu=1, a=-3)": "a must be .* got -3.* shift a > 1 of the order of d/k",
    }.items():
        with pytest.raises(ConfigError, match=words):
            make_schedule(spec)


def test_a_schedule_by_step_reaches_the_steps():
    """With factor 1e-30 after the first step, only the first step moves the model."""
    one, many = (build_model("mlp", (1, 8, 8), 10, 0) for _ in range(2))
    fit(one, TrainSettings(local_epochs=None, local_steps=1))
    fit(many, TrainSettings(local_epochs=2, lr_schedule="step(every=1, factor=1e-30, per='step')"))
    assert bits(one) == bits(many)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"local_steps": 3}, "exactly one of local_epochs and local_steps"),
        ({"local_epochs": None}, "exactly one of local_epochs and local_steps"),
        ({"lr": 0.0}, "lr must be in"),
        ({"lr": float("nan")}, "lr must be a number"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"momentum": -0.1}, "momentum"),
        ({"lr_schedule": "cosin"}, "cosine"),
    ],
)
def test_impossible_settings_are_explained(changes, words):
    with pytest.raises(ConfigError, match=words):
        TrainSettings(**changes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_repeats_its_bits_and_agrees_with_the_cpu():
    arrays = model_arrays(build_model("cnn", (1, 8, 8), 10, 0))
    flats = [FlatModel(build_model("cnn", (1, 8, 8), 10, 0).to(device)) for device in ("cuda", "cuda", "cpu")]
    for flat in flats:
        flat.load(arrays)
        fit(flat, TrainSettings(local_epochs=2, lr=0.05, momentum=0.9))
    first, second, cpu = (flat.arrays() for flat in flats)
    for name in arrays:
        assert first[name].tobytes() == second[name].tobytes()
        np.testing.assert_allclose(first[name], cpu[name], atol=1e-3)


@pytest.mark.parametrize("name", ["softmax", "cnn"])
def test_how_many_examples_are_read_at_once_changes_nothing(name, monkeypatch):
    found = []
    for numbers in (1, 64 * 40, 2**20):
        monkeypatch.setattr("clients.training.AT_ONCE", numbers)
        model = build_model(name, (1, 8, 8), 10, 0)
        result = fit(model, TrainSettings(local_epochs=2, batch_size=16, lr=0.1))
        found.append((result, bits(model)))
    assert found[0] == found[1] == found[2]
