"""Models: reproducible, of the promised size, and able to travel whatever they are made of."""

import numpy as np
import pytest
import torch
from torch import nn

from fedsparse.errors import ConfigError, PayloadError
from fedsparse.models import build_model, frozen_names, load_arrays, model_arrays


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["softmax", "logistic", "mlp", "mlp(hidden=7, layers=3)", "cnn", "resnet18"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8)])
def test_models_are_seeded_and_run(name, shape):
    state = torch.random.get_rng_state()
    model, again, other = (build_model(name, shape, 10, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state is nobody's business"
    a, b, c = (model_arrays(m) for m in (model, again, other))
    assert all(a[k].tobytes() == b[k].tobytes() for k in a)
    assert "softmax" in name or "logistic" in name or any(a[k].tobytes() != c[k].tobytes() for k in a)
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_sizes():
    assert 70_000 <= count(build_model("cnn", (1, 28, 28), 10, 0)) <= 90_000
    assert 11.1e6 <= count(build_model("resnet18", (3, 32, 32), 10, 0)) <= 11.3e6
    assert count(build_model("softmax", (1, 28, 28), 10, 0)) == 7850


def test_wrong_names_are_explained():
    for name, words in {
        "cn": "Did you mean 'cnn'",
        "mlp(hiden=3)": "Did you mean 'hidden'",
        "mlp(hidden=0)": "from 1",
        "no_such_module:make": "importing no_such_module failed",
    }.items():
        with pytest.raises(ConfigError, match=words):
            build_model(name, (1, 28, 28), 10, 0)
    with pytest.raises(ConfigError, match="needs images"):
        build_model("cnn", (64,), 10, 0)


def test_logistic_of_two_classes_has_one_weight_vector():
    model = build_model("logistic(bias=false)", (5,), 2, 0)
    (weight,) = model.parameters()
    x, y = torch.randn(7, 5), torch.tensor([0, 1, 1, 0, 1, 0, 1])
    weight.data = torch.randn(1, 5)
    loss = nn.functional.cross_entropy(model(x), y)
    expected = torch.log1p(torch.exp(-(2.0 * y - 1.0) * (x @ weight[0]))).mean()
    torch.testing.assert_close(loss, expected)
    assert sum(p.numel() for p in build_model("logistic", (5,), 3, 0).parameters()) == 18


USER_MODELS = """
from collections import OrderedDict
import torch
from torch import nn
def good(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), nn.Dropout())
def lazy(shape, classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(classes))
def dictionary(shape, classes): return OrderedDict()
def raises(shape, classes): raise KeyError("width")
def exits(shape, classes): raise SystemExit(2)
def frozen(shape, classes): return good(shape, classes).requires_grad_(False)
def wrong(shape, classes): return nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))
def shared(shape, classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64))
    model[2].weight.data = model[1].weight.data
    return model
def imaginary(shape, classes):
    model = good(shape, classes)
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return model
"""


def test_user_models(tmp_path, monkeypatch):
    (tmp_path / "tests_user_model.py").write_text(USER_MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("good", "lazy"):
        state = torch.random.get_rng_state()
        a, b = (model_arrays(build_model(f"tests_user_model:{name}", (1, 8, 8), 10, 0)) for _ in range(2))
        assert all(a[key].tobytes() == b[key].tobytes() for key in a)
        assert torch.equal(torch.random.get_rng_state(), state)
    for name, words in {
        "dictionary": "must return a torch.nn.Module, got OrderedDict",
        "raises": "raised KeyError: 'width'",
        "exits": "raised SystemExit: 2",
        "frozen": "no parameter to train",
        "wrong": r"does not take examples of shape \(1, 8, 8\)",
        "shared": "'1.weight' and '2.weight' share memory",
        "imaginary": "'phase' is complex",
    }.items():
        with pytest.raises(ConfigError, match=words):
            build_model(f"tests_user_model:{name}", (1, 8, 8), 10, 0)


class Odd(nn.Module):
    """Tied weights, a frozen layer, BatchNorm with its counter, half precision, a 0-d parameter, channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.half = nn.Linear(4, 4).to(torch.bfloat16)
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def test_odd_models_travel():
    model, copy = Odd(), Odd()
    arrays = model_arrays(model)
    assert "decoder.weight" not in arrays, "tied parameters travel once"
    assert arrays["half.weight"].dtype == np.float32
    assert arrays["wide"].dtype == np.float64
    assert arrays["norm.num_batches_tracked"].dtype == np.int64
    assert arrays["scale"].shape == ()
    assert all(array.flags.c_contiguous for array in arrays.values())
    assert np.array_equal(arrays["conv.weight"], model.conv.weight.detach().contiguous().numpy())
    assert frozen_names(model) == ("frozen.weight", "frozen.bias")
    assert "scratch" not in arrays
    for array in arrays.values():
        array.flags.writeable = False  # as they come out of a message
    load_arrays(copy, arrays)
    for (name, a), (_, b) in zip(model.state_dict().items(), copy.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert copy.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert copy.decoder.weight is copy.encoder.weight
    for name in ("x", "scratch"):
        with pytest.raises(PayloadError, match=f"no array '{name}'"):
            load_arrays(model, {name: np.zeros(3)})
    with pytest.raises(PayloadError, match="shape"):
        load_arrays(model, {"scale": np.zeros(1, np.float32)})
