"""Local training by hand: the same steps as torch.optim, the same bits every time, on every kind of model."""

import numpy as np
import pytest
import torch
from torch import nn

from clients.job import TrainSettings
from clients.schedules import make_schedule
from clients.training import FlatParameters, batches, evaluate, train
from fedsparse.data import load_dataset
from fedsparse.errors import ConfigError, RunError
from fedsparse.models import build_model, model_arrays
from fedsparse.seeding import generator

DIGITS = load_dataset("digits")
CPU = torch.device("cpu")


def fit(model: nn.Module, settings: TrainSettings, part=None, **changes):
    part = np.arange(100) if part is None else part
    kwargs = {"lr": settings.lr, "scale": DIGITS.scale, "seed": 0, "server_round": 1, "client": 3, "device": CPU}
    return train(model, FlatParameters(model), DIGITS.x_train, DIGITS.y_train, part, settings, **{**kwargs, **changes})


@pytest.mark.parametrize("name", ["mlp(hidden=16)", "cnn"])
@pytest.mark.parametrize("prox", [0.0, 0.5])
def test_steps_equal_torch_optim(name, prox):
    settings = TrainSettings(local_epochs=2, batch_size=32, lr=0.05, momentum=0.9, weight_decay=0.01, proximal_mu=prox)
    ours, theirs = (build_model(name, (1, 8, 8), 10, 0) for _ in range(2))
    result = fit(ours, settings)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    start = [p.detach().clone() for p in theirs.parameters()]
    losses = []
    for batch in batches(100, settings, generator(0, "batches", 1, 3)):
        optimizer.zero_grad()
        inputs = torch.from_numpy(DIGITS.x_train[batch]).float() * DIGITS.scale
        loss = nn.functional.cross_entropy(theirs(inputs), torch.from_numpy(DIGITS.y_train[batch]))
        losses.append((float(loss.detach()), len(batch)))
        proximal = sum(((p - w) ** 2).sum() for p, w in zip(theirs.parameters(), start, strict=True))
        (loss + prox / 2 * proximal).backward()
        optimizer.step()
    for (key, a), (_, b) in zip(model_arrays(ours).items(), model_arrays(theirs).items(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, err_msg=key)
    assert result.steps == len(losses) == 8
    assert result.loss == pytest.approx(sum(v * n for v, n in losses) / sum(n for _, n in losses), rel=1e-4)


class Hard(nn.Module):
    """BatchNorm, dropout, tied and frozen weights."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64, bias=False)
        self.norm = nn.BatchNorm1d(64)
        self.b = nn.Linear(64, 64, bias=False)
        self.b.weight = self.a.weight
        self.fixed = nn.Linear(64, 64).requires_grad_(False)
        self.head = nn.Linear(64, 10)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.a(x.flatten(1)))
        return self.head(nn.functional.dropout(self.fixed(torch.relu(self.b(x))), 0.3, self.training))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_hard_models_train_and_repeat_their_bits(dtype):
    """33 examples in batches of 32 leave a last batch of one, for which BatchNorm has no variance."""
    torch.manual_seed(0)
    model = Hard(dtype)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    runs = []
    for _ in range(2):
        model.load_state_dict(start)
        torch.manual_seed(len(runs))  # what happened before in the process must not matter
        fit(model, TrainSettings(local_epochs=2, batch_size=32, lr=0.05, momentum=0.5), np.arange(33))
        runs.append({name: array.tobytes() for name, array in model_arrays(model).items()})
    assert runs[0] == runs[1]
    assert model.b.weight is model.a.weight
    assert torch.equal(model.fixed.weight, start["fixed.weight"])
    assert not torch.equal(model.a.weight, start["a.weight"])


def test_half_precision_takes_inputs_in_its_type():
    model = build_model("mlp(hidden=8)", (1, 8, 8), 10, 0).to(torch.float16)
    assert fit(model, TrainSettings(lr=0.01)).loss > 0


def test_epochs_and_steps():
    rng = np.random.default_rng(0)
    epochs = list(batches(10, TrainSettings(local_epochs=2, batch_size=4), rng))
    assert [len(b) for b in epochs] == [4, 4, 2, 4, 4, 2]
    assert sorted(np.concatenate(epochs[:3])) == list(range(10))
    steps = list(batches(10, TrainSettings(local_epochs=None, local_steps=5, batch_size=4), rng))
    assert [len(b) for b in steps] == [4, 4, 2, 4, 4]


def test_an_empty_client_changes_nothing():
    model = build_model("mlp", (1, 8, 8), 10, 0)
    before = {n: a.tobytes() for n, a in model_arrays(model).items()}
    result = fit(model, TrainSettings(local_epochs=None, local_steps=5), np.empty(0, np.int64))
    assert (result.loss, result.steps) == (None, 0)
    assert {n: a.tobytes() for n, a in model_arrays(model).items()} == before


def test_divergence_names_client_round_and_remedy():
    model = build_model("mlp", (1, 8, 8), 10, 0)
    with pytest.raises(RunError, match=r"client 3, round 1, step \d+: the loss is .*lower train.lr"):
        fit(model, TrainSettings(local_epochs=20, lr=1e30))
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
        "step(every=2, by=0.5)": [1, 1, 0.5],
        "inverse(a=2)": [1, 2 / 3, 0.5],
    }
    for spec, wanted in factors.items():
        assert [make_schedule(spec).factor(t, 3) for t in (1, 2, 3)] == pytest.approx(wanted)
    with pytest.raises(ConfigError, match="Did you mean 'cosine'"):
        make_schedule("cosin")
    with pytest.raises(ConfigError, match="needs every"):
        make_schedule("step")
