"""A model as named arrays: what travels between server and clients."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsparse.errors import PayloadError

HALF = (torch.float16, torch.bfloat16)


def travelling(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that travel, parameters then buffers, under their state_dict names.

    Tied parameters appear once, under their first name; buffers that are not part of the state_dict do not appear.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    kept = set(model.state_dict().keys())
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in kept})
    return tensors


def model_arrays(model: nn.Module) -> dict[str, NDArray[np.generic]]:
    """Return parameters, then buffers, as copies under their state_dict names.

    Tied parameters appear once. Arrays are in C order whatever the memory format. Half-precision parameters become
    float32: the server keeps master copies, so that small updates are not rounded away.
    """
    return {name: to_numpy(tensor) for name, tensor in travelling(model).items()}


def to_numpy(tensor: Tensor) -> NDArray[np.generic]:
    """Return a copy of a tensor as an array in C order, half precision as float32."""
    tensor = tensor.detach().cpu()
    if tensor.dtype in HALF:
        tensor = tensor.float()
    # A copy: the model goes on training in the memory that a view would show.
    return np.array(tensor.numpy(), order="C", copy=True)


def load_arrays(model: nn.Module, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    """Copy arrays into the model in place, each into its own dtype and memory format; absent ones stay as they are.

    Raises
    ------
    PayloadError
        An array that the model does not have, or of another shape.
    """
    tensors = travelling(model)
    for name, array in arrays.items():
        if name not in tensors:
            raise PayloadError(f"the model has no array {name!r}.")
        copy_into(tensors[name], array, name)


@torch.no_grad()
def copy_into(target: Tensor, array: NDArray[Any], name: str) -> None:
    """Copy an array, which may be read-only, into a tensor of the same shape.

    Raises
    ------
    PayloadError
        Where the shapes differ; `name` says which array it is.
    """
    if tuple(array.shape) != tuple(target.shape):
        raise PayloadError(f"array {name!r} has shape {tuple(array.shape)}, the model {tuple(target.shape)}.")
    if target.device.type == "cpu" and target.dtype != torch.bfloat16:
        # numpy reads read-only memory without a second copy, where torch warns.
        with np.errstate(over="ignore"):
            np.copyto(target.detach().numpy(), array, casting="unsafe")
    else:
        target.copy_(torch.from_numpy(np.array(array, order="C")))


def frozen_names(model: nn.Module) -> tuple[str, ...]:
    """Return the parameters that are not trained, so never sent."""
    return tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
