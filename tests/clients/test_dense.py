"""Gradients by hand equal autograd's, for every model that they are used for, and for no other."""

import numpy as np
import pytest
import torch
from torch import nn

from clients.dense import DenseShape
from clients.flat import FlatModel
from clients.training import backward
from fedsparse.models import build_model


def batch(n: int, classes: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(n)
    return torch.from_numpy(rng.normal(size=(n, 1, 4, 5))).to(dtype), torch.from_numpy(rng.integers(0, classes, n))


@pytest.mark.parametrize("n", [1, 2, 7, 33])
@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("softmax", 10),
        ("softmax", 2),
        ("logistic", 2),
        ("logistic(bias=false)", 2),
        ("logistic(bias=false)", 3),
        ("mlp(hidden=7)", 10),
        ("mlp(hidden=1)", 2),
        ("mlp(hidden=9, layers=3)", 4),
    ],
)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_gradients_equal_those_of_autograd(name, classes, n, dtype, atol):
    model = build_model(name, (1, 4, 5), classes, 0).to(dtype)
    for parameter in model.parameters():  # zeros would hide most of it
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(n))
    flat = FlatModel(model)
    assert flat.dense is not None
    inputs, targets = batch(n, classes, dtype)
    for _ in range(2):  # the second time into gradients that are not zero
        ours = backward(flat, inputs, targets).mean(), [p.grad.clone() for p in model.parameters()]
    flat.dense = None
    theirs = backward(flat, inputs, targets).mean(), [p.grad for p in model.parameters()]
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=20 * atol)


def test_a_relu_at_zero_and_a_certain_prediction_have_the_gradients_of_autograd():
    model = build_model("mlp(hidden=3)", (1, 4, 5), 3, 0)
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    with torch.no_grad():
        model[3].bias.copy_(torch.tensor([1e4, 0.0, 0.0]))
    flat = FlatModel(model)
    inputs, targets = batch(5, 3, torch.float32)
    ours = backward(flat, inputs, targets).mean(), [p.grad.clone() for p in model.parameters()]
    flat.dense = None
    theirs = backward(flat, inputs, targets).mean(), [p.grad for p in model.parameters()]
    torch.testing.assert_close(ours, theirs)


def dense(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(20, 4), *between, nn.Linear(4, 3))


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def frozen() -> nn.Module:
    model = dense(nn.ReLU())
    model[1].weight.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))
    model[3].weight = model[1].weight
    return model


def hooked() -> nn.Module:
    model = dense(nn.ReLU())
    model[2].register_forward_hook(lambda *_: None)
    return model


def hooked_gradient() -> nn.Module:
    model = dense(nn.ReLU())
    model[1].weight.register_hook(lambda grad: 2 * grad)
    return model


def with_another_forward() -> nn.Module:
    model = dense(nn.ReLU())
    model[1].forward = lambda x: x[:, :4]
    return model


@pytest.mark.parametrize(
    "model",
    [
        build_model("cnn", (1, 8, 8), 10, 0),
        dense(),
        dense(nn.Tanh()),
        dense(nn.ReLU(), nn.Dropout()),
        dense(nn.ReLU()).to(torch.bfloat16),
        nn.Sequential(nn.Linear(20, 3)),
        nn.Sequential(nn.Flatten(2), nn.Linear(20, 3)),
        nn.Sequential(nn.Flatten(), Scaled(20, 3)),
        nn.Sequential(nn.Flatten()),
        nn.Sequential(),
        nn.Linear(20, 3),
        nn.utils.parametrizations.weight_norm(nn.Linear(20, 3)),
        nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(20, 3))),
        frozen(),
        tied(),
        hooked(),
        hooked_gradient(),
        with_another_forward(),
    ],
    ids=str,
)
def test_any_other_model_is_left_to_autograd(model):
    assert DenseShape.of(model) is None
