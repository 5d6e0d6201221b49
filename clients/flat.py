"""A model whose trained parameters are views of one vector, and their gradients of another.

A step of SGD is then a few operations on whole vectors instead of a few for each tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from clients.dense import DenseModels, DenseShape
from fedsparse.errors import PayloadError
from fedsparse.models.arrays import HALF, copy_into, load_arrays, to_numpy, travelling


@dataclass(frozen=True)
class Group:
    """All trained parameters of one dtype, as vectors of length d, which autograd does not see.

    Parameters
    ----------
    values : Tensor
        What SGD moves: float32, or float64 for float64 parameters. The parameters themselves, except for half
        precision, where these are the master copies.
    parameters : Tensor
        What the model computes with.
    grads : Tensor
        Gradients, in the parameters' dtype.
    """

    values: Tensor
    parameters: Tensor
    grads: Tensor


class FlatModel:
    """A model, laid out for training by hand; it serves one client after the other.

    Inputs and convolution weights lie channels-last, which made a step of the cnn on 1x28x28 images 1.9 times as fast
    on a CPU; what travels is in C order.

    Parameters
    ----------
    model : torch.nn.Module
        Its parameters are moved into the vectors; their identity stays, so tied weights stay tied.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.dtype = input_dtype(model)
        self.channels_last = has_convolutions(model)
        self.norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        self.trained: dict[str, Tensor] = {}  # name -> its part of Group.values, in the parameter's shape
        kept = travelling(model)
        self._frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        self._names = set(kept)
        self._pristine = [(b, b.detach().clone()) for name, b in model.named_buffers() if name not in kept]
        by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in model.named_parameters():  # tied ones come once
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append((name, parameter))
        convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d)}
        self.groups = [self._move(dtype, named, convolutions) for dtype, named in by_dtype.items()]
        self.dense_shape = DenseShape.of(model)
        self.dense: DenseModels | None = None  # where there is a shape: this one model
        self.same_bits: dict[tuple[int, ...], bool] = {}  # see clients.together: by numbers of clients and of examples
        if self.dense_shape is not None:
            (group,) = self.groups
            self.dense = DenseModels(self.dense_shape, group.values.unsqueeze(0), group.grads.unsqueeze(0))

    def _move(self, dtype: torch.dtype, named: list[tuple[str, nn.Parameter]], convolutions: set[int]) -> Group:
        size = sum(parameter.numel() for _, parameter in named)
        parameters = torch.empty(size, dtype=dtype, device=self.device)
        grads = torch.zeros_like(parameters)
        values = torch.empty_like(parameters, dtype=torch.float32) if dtype in HALF else parameters
        start = 0
        for name, parameter in named:
            place = slice(start, start := start + parameter.numel())
            last = id(parameter) in convolutions
            old, shape = parameter.detach().clone(), parameter.shape
            parameter.data = _view(parameters[place], shape, last)
            parameter.grad = _view(grads[place], shape, last)
            self.trained[name] = _view(values[place], shape, last)
            self.trained[name].copy_(old)
            parameter.data.copy_(old)
        return Group(values, parameters, grads)

    def load(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Take the global model; nothing of the client that was trained before remains.

        Raises
        ------
        PayloadError
            Where `arrays` are not those of this model.
        """
        if missing := sorted(self._names - set(arrays)):
            raise PayloadError(f"the message lacks arrays of the model: {', '.join(missing[:5])}.")
        if rest := {name: array for name, array in arrays.items() if name not in self.trained}:
            load_arrays(self.model, rest)
        for name, value in self.trained.items():
            copy_into(value, arrays[name], name)
        for buffer, pristine in self._pristine:
            buffer.copy_(pristine)
        self.publish()

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return what was learnt, in C order: trained parameters, half-precision ones as float32, and buffers."""
        return {
            name: to_numpy(self.trained.get(name, tensor))
            for name, tensor in travelling(self.model).items()
            if name not in self._frozen
        }

    def publish(self) -> None:
        """Round the master copies to what the model computes with."""
        for group in self.groups:
            if group.values is not group.parameters:
                group.parameters.copy_(group.values)

    def batch(self, rows: NDArray[Any], scale: float) -> Tensor:
        """Return examples as the model's input."""
        return to_input(rows, scale, self.device, self.dtype, self.channels_last)


def to_input(rows: NDArray[Any], scale: float, device: torch.device, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Return ``float32(rows) * scale`` in the model's dtype and on its device."""
    raw = torch.from_numpy(np.ascontiguousarray(rows)).to(device)
    # Into memory of our own: kernels, so the last bits, depend on alignment and strides, and numpy gives a single
    # channel any stride.
    layout = torch.channels_last if channels_last and raw.ndim == 4 else torch.contiguous_format
    inputs = torch.empty(raw.shape, dtype=torch.float32, device=device, memory_format=layout)
    return inputs.copy_(raw).mul_(scale).to(dtype)


def input_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first floating-point parameter, in which it takes its input."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def has_convolutions(model: nn.Module) -> bool:
    """Return whether the model has two-dimensional convolutions, which run faster channels-last."""
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def _view(flat: Tensor, shape: torch.Size, channels_last: bool) -> Tensor:
    if not channels_last:
        return flat.view(shape)
    out, inside, height, width = shape
    return flat.view(out, height, width, inside).permute(0, 3, 1, 2)
