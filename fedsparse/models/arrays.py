"""A model as named arrays: what travels between server and clients."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsparse.errors import PayloadError


def model_arrays(model: nn.Module) -> dict[str, NDArray[np.generic]]:
    """Return parameters, then buffers, under their state_dict names.

    Tied parameters appear once. Arrays are in C order whatever the memory format. Half-precision parameters become
    float32: the server keeps master copies, so that small updates are not rounded away.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    kept = set(model.state_dict().keys())
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in kept})
    return {name: _to_numpy(tensor) for name, tensor in tensors.items()}


def _to_numpy(tensor: Tensor) -> NDArray[np.generic]:
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.float16, torch.bfloat16):
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
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, array in arrays.items():
            target = tensors.get(name)
            if target is None:
                raise PayloadError(f"the model has no array {name!r}.")
            if tuple(array.shape) != tuple(target.shape):
                raise PayloadError(f"array {name!r} has shape {tuple(array.shape)}, the model {tuple(target.shape)}.")
            # torch refuses to look at read-only memory without a warning; ours is only read.
            source = np.asarray(array)
            target.copy_(torch.from_numpy(source if source.flags.writeable else source.copy()))


def frozen_names(model: nn.Module) -> tuple[str, ...]:
    """Return the parameters that are not trained, so never sent."""
    return tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
