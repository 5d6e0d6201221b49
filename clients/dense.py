"""Gradients of fully connected models without autograd, which takes longer than their arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedsparse.models.arrays import HALF
from fedsparse.models.zoo import Against


@dataclass(frozen=True)
class DenseLayer:
    """``z = x W^T + b``, and where the gradients of its parameters go."""

    weight: Tensor
    bias: Tensor | None
    weight_grad: Tensor
    bias_grad: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Return z."""
        return x @ self.weight.T if self.bias is None else torch.addmm(self.bias, x, self.weight.T)

    def store_gradients(self, x: Tensor, dz: Tensor) -> None:
        """Write dW = dz^T x and db = sum dz."""
        torch.mm(dz.T, x, out=self.weight_grad)
        if self.bias_grad is not None:
            torch.sum(dz, 0, out=self.bias_grad)


@dataclass(frozen=True)
class DenseModel:
    """Linear layers with ReLU between them.

    Parameters
    ----------
    layers : sequence of DenseLayer
        From the input to the logits.
    against_zero : bool
        Whether the last layer gives one logit, that of the second of two classes; the first class has 0.
    """

    layers: Sequence[DenseLayer]
    against_zero: bool

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Return `model` as a DenseModel that shares its parameters and gradients; None where it is anything else."""
        modules = list(model) if type(model) is nn.Sequential else []
        if any(_has_hooks(thing) for thing in (model, *modules, *model.parameters())):
            return None
        against_zero = bool(modules) and type(modules[-1]) is Against
        first, *rest = [type(module) for module in modules[: len(modules) - against_zero]] or [nn.Module]
        linears = [module for module in modules if type(module) is nn.Linear]
        if first is not nn.Flatten or rest != [nn.Linear, *[nn.ReLU, nn.Linear] * (len(linears) - 1)]:
            return None
        parameters = [p for linear in linears for p in linear.parameters()]
        if modules[0].extra_repr() != nn.Flatten().extra_repr() or len(set(map(id, parameters))) < len(parameters):
            return None
        if any(p.dtype in HALF or p.grad is None or not p.requires_grad for p in parameters):
            return None
        return cls([_layer(linear) for linear in linears], against_zero)

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch, and overwrite the gradients by its own.

        With x_0 the inputs, z_j = x_{j-1} W_j^T + b_j, x_j = relu(z_j) and p = softmax(z_L)::

            dz_L = (p - onehot(targets)) / n
            dz_j = (dz_{j+1} W_{j+1}) [x_j > 0]
        """
        x = [inputs.flatten(1)]
        for layer in self.layers[:-1]:
            x.append(layer.forward(x[-1]).relu_())
        z = self.layers[-1].forward(x[-1])
        if self.against_zero:
            z = torch.cat([torch.zeros_like(z), z], dim=1)
        log_p = torch.log_softmax(z, 1)
        loss = nn.functional.nll_loss(log_p, targets)
        dz = log_p.exp_()
        dz.scatter_add_(1, targets.unsqueeze(1), dz.new_full((len(targets), 1), -1.0))
        dz.div_(len(targets))
        if self.against_zero:
            dz = dz[:, 1:].contiguous()
        for j in range(len(self.layers) - 1, -1, -1):
            self.layers[j].store_gradients(x[j], dz)
            if j > 0:
                dz = (dz @ self.layers[j].weight).masked_fill_(x[j] <= 0, 0.0)
        return loss


def _layer(linear: nn.Linear) -> DenseLayer:
    assert linear.weight.grad is not None
    bias: Tensor | None = linear.bias
    return DenseLayer(
        linear.weight.detach(),
        None if bias is None else bias.detach(),
        linear.weight.grad,
        None if bias is None else bias.grad,
    )


def _has_hooks(thing: Any) -> bool:
    """Whether somebody added to what PyTorch does, or put a forward of their own in its place."""
    names = {*vars(thing), "_backward_hooks", "_post_accumulate_grad_hooks"}
    return any(getattr(thing, name, None) for name in names if name.endswith("_hooks") or name == "forward")
