"""The models that come with fedsparse, and the user's own."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fedsparse.compression.base import check_whole
from fedsparse.errors import ConfigError, cause, unknown_name
from fedsparse.seeding import int_seed
from fedsparse.spec import build, parse_stage
from fedsparse.userobject import load_object


@dataclass(frozen=True)
class Softmax:
    """Multinomial logistic regression."""

    name: ClassVar[str] = "softmax"
    summary: ClassVar[str] = "multinomial logistic regression"

    def make(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return a linear layer that starts at zero, as convex problems do."""
        linear = nn.Linear(prod(input_shape), num_classes)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(nn.Flatten(), linear)


@dataclass(frozen=True)
class Logistic:
    """Logistic regression: one weight vector for two classes, where softmax has two of opposite gradients."""

    bias: bool = True

    name: ClassVar[str] = "logistic"
    summary: ClassVar[str] = "logistic regression, logistic(bias=true): two classes; with more, softmax"

    def make(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the model; it starts at zero."""
        linear = nn.Linear(prod(input_shape), 1 if num_classes == 2 else num_classes, bias=self.bias)
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
        stack: list[nn.Module] = [nn.Flatten(), linear]
        return nn.Sequential(*stack, Against()) if num_classes == 2 else nn.Sequential(*stack)


class Against(nn.Module):
    """Put the logit 0 of the first class beside that of the second: cross-entropy is then the logistic loss."""

    def forward(self, logit: Tensor) -> Tensor:
        """Return logits of shape (n, 2) for those of shape (n, 1)."""
        return torch.cat([torch.zeros_like(logit), logit], dim=1)


@dataclass(frozen=True)
class MLP:
    """Fully connected network with ReLU."""

    hidden: int = 128
    layers: int = 1

    name: ClassVar[str] = "mlp"
    summary: ClassVar[str] = "fully connected, mlp(hidden=128, layers=1)"

    def __post_init__(self) -> None:
        check_whole(self.name, "hidden", self.hidden, 1, 1_000_000)
        check_whole(self.name, "layers", self.layers, 1, 100)

    def make(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network."""
        sizes = [prod(input_shape)] + [self.hidden] * self.layers
        stack: list[nn.Module] = [nn.Flatten()]
        for a, b in pairwise(sizes):
            stack += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*stack, nn.Linear(sizes[-1], num_classes))


@dataclass(frozen=True)
class CNN:
    """Two convolutions and one hidden layer, about 80 k parameters at 1x28x28."""

    name: ClassVar[str] = "cnn"
    summary: ClassVar[str] = "two convolutions, about 80 k parameters at 1x28x28"

    def make(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network, for images of 8x8 or more."""
        channels, height, width = _image(self.name, input_shape)
        flat = 32 * (height // 4) * (width // 4)
        return nn.Sequential(
            # ReLU after pooling gives the same numbers and gradients as before it, from a quarter of the work.
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(flat, 47),
            nn.ReLU(),
            nn.Linear(47, num_classes),
        )


class _Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(32, outside)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.GroupNorm(32, outside))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.short(x))


@dataclass(frozen=True)
class ResNet18:
    """ResNet-18 with GroupNorm in place of BatchNorm (Hsieh et al. 2020) and the 3x3 stem for small images."""

    name: ClassVar[str] = "resnet18"
    summary: ClassVar[str] = "ResNet-18 with GroupNorm, about 11.2 M parameters"

    def make(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the network, for images of 8x8 or more."""
        channels, _, _ = _image(self.name, input_shape)
        blocks: list[nn.Module] = []
        inside = 64
        for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [_Block(inside, outside, stride), _Block(outside, outside, 1)]
            inside = outside
        return nn.Sequential(
            nn.Conv2d(channels, 64, 3, 1, 1, bias=False),
            nn.GroupNorm(32, 64),
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(512, num_classes),
        )


class Recipe(Protocol):
    """What a registered model is: a frozen dataclass whose fields are its options."""

    def make(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return a fresh network."""
        ...


MODELS: dict[str, Callable[..., Recipe]] = {
    "softmax": Softmax,
    "logistic": Logistic,
    "mlp": MLP,
    "cnn": CNN,
    "resnet18": ResNet18,
}


def _image(name: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < 8:
        raise ConfigError(f"model {name!r} needs images (channels, height, width) of 8x8 or more, got {input_shape}.")
    return input_shape[0], input_shape[1], input_shape[2]


def check_model(name: str) -> None:
    """Raise what `build_model` would raise for a wrong name, without building anything."""
    if ":" in name and "(" not in name:
        load_object(name, "model")
        return
    stage = parse_stage(name)
    if stage.name not in MODELS:
        raise unknown_name("model", stage.name, [*MODELS, "package.module:callable"])
    build(stage, MODELS, "model")


def build_model(name: str, input_shape: tuple[int, ...], num_classes: int, seed: int) -> nn.Module:
    """Build a model by name, or by the user's ``package.module:callable(input_shape, num_classes)``.

    The same seed gives the same initial numbers; torch's global random state stays as it was. A user's model keeps what
    it learns in parameters and buffers: other attributes do not travel, and are shared by the clients of a process.

    Raises
    ------
    ConfigError
        Unknown name or option; a user's callable that raises, or returns what cannot be trained.
    """
    check_model(name)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed the GPUs' generators, too.
        torch.default_generator.manual_seed(int_seed(seed, "model"))
        if ":" not in name:
            return build(parse_stage(name), MODELS, "model").make(input_shape, num_classes)
        return _from_user(name, input_shape, num_classes)


def _from_user(name: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    try:
        model = load_object(name, "model")(input_shape, num_classes)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"model {name!r} raised {cause(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name!r} must return a torch.nn.Module, got {type(model).__name__}.")
    if any(
        isinstance(p, UninitializedParameter | UninitializedBuffer) for p in (*model.parameters(), *model.buffers())
    ):
        _materialise(name, model, input_shape)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"model {name!r} has no parameter to train (with requires_grad).")
    starts: dict[int, str] = {}
    for key, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(f"model {name!r}: parameter {key!r} is complex; use its real and imaginary part.")
        if parameter.numel() and (other := starts.setdefault(parameter.data_ptr(), key)) != key:
            raise ConfigError(
                f"model {name!r}: parameters {other!r} and {key!r} share memory; to tie weights, assign the same "
                "Parameter to both modules."
            )
    return model


def _materialise(name: str, model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Let lazy layers see one example: they have no shape before."""
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, *input_shape))
    except Exception as error:
        raise ConfigError(
            f"model {name!r} does not take examples of shape {input_shape}: {type(error).__name__}: {error}"
        ) from error
    model.train()
