"""Gradients of fully connected models without autograd, which takes longer than their arithmetic; many at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedsparse.models.arrays import HALF
from fedsparse.models.zoo import Against

LINE = 64  # bytes


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor that begins at a multiple of `LINE` bytes, where memory of its own does too.

    Some kernels of BLAS begin at such a place, and add up in another order where their operands begin elsewhere.
    """
    return tensor if tensor.data_ptr() % LINE == 0 else tensor.clone()


@dataclass(frozen=True)
class DenseShape:
    """Linear layers with ReLU between them, whose parameters lie one after the other in a vector of length d.

    Parameters
    ----------
    layers : tuple of (int, int, bool)
        Outputs, inputs, and whether there is a bias, from the input to the logits.
    against_zero : bool
        Whether the last layer gives one logit, that of the second of two classes; the first class has 0.
    """

    layers: tuple[tuple[int, int, bool], ...]
    against_zero: bool

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Return the shape of `model`; None where it is, or does, anything else."""
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
        if any(p.dtype in HALF or not p.requires_grad for p in parameters):
            return None
        layers = tuple((m.out_features, m.in_features, _has_bias(m)) for m in linears)
        return cls(layers, against_zero)

    def is_aligned(self, n: int, itemsize: int) -> bool:
        """Whether all that many models compute from n examples each begins where it does for one model alone."""
        widths = [self.layers[0][1], *(out for out, _, _ in self.layers)]
        return all(n * width * itemsize % LINE == 0 for width in widths)

    def split(self, vectors: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the weights (b, out, in) and biases (b, 1, out) of b models that are the rows of `vectors` (b, d)."""
        at = 0
        for out, inside, bias in self.layers:
            weight = vectors[:, at : at + out * inside].view(-1, out, inside)
            at += out * inside
            yield weight, vectors[:, at : at + out].unsqueeze(1) if bias else None
            at += out * bias


@dataclass(frozen=True)
class DenseLayer:
    """``z = x W^T + b`` of b models, and where the gradients of their parameters go.

    Where a matrix is a vector, BLAS adds up in another order for one model than for many: such products are taken one
    by one, each of operands that begin as if there were no others.
    """

    weight: Tensor
    bias: Tensor | None
    weight_grad: Tensor
    bias_grad: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Return z."""
        turned = self.weight.transpose(1, 2)
        if self.bias is None:
            return _products(x, turned) if self._thin else torch.bmm(x, turned)
        return _products(x, turned).add_(self.bias) if self._thin else torch.baddbmm(self.bias, x, turned)

    def backward(self, dz: Tensor) -> Tensor:
        """Return dx = dz W."""
        return _products(dz, self.weight) if self._thin else torch.bmm(dz, self.weight)

    def store_gradients(self, x: Tensor, dz: Tensor) -> None:
        """Write dW = dz^T x and db = sum dz."""
        turned = dz.transpose(1, 2)
        if self._thin:
            for left, right, out in zip(turned, x, self.weight_grad, strict=True):
                torch.mm(aligned(left), aligned(right), out=out)
        else:
            torch.bmm(turned, x, out=self.weight_grad)
        if self.bias_grad is not None:
            torch.sum(dz, 1, keepdim=True, out=self.bias_grad)

    @property
    def _thin(self) -> bool:
        return 1 in self.weight.shape[1:]


def _products(left: Tensor, right: Tensor) -> Tensor:
    return torch.stack([torch.mm(aligned(a), aligned(b)) for a, b in zip(left, right, strict=True)])


class DenseModels:
    """Models of one shape, the rows of a matrix, each with a batch of its own.

    Parameters
    ----------
    shape : DenseShape
        Their shape.
    values, grads : Tensor
        Parameters and gradients, (b, d).
    """

    def __init__(self, shape: DenseShape, values: Tensor, grads: Tensor) -> None:
        self.values, self.grads, self._shape = values, grads, shape
        pairs = zip(shape.split(values), shape.split(grads), strict=True)
        self._layers: Sequence[DenseLayer] = [DenseLayer(*value, *grad) for value, grad in pairs]

    def rows(self, start: int, stop: int) -> "DenseModels":
        """Return models `start` to `stop`, in the same memory."""
        return DenseModels(self._shape, self.values[start:stop], self.grads[start:stop])

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy (b, n) of each example, and overwrite the gradients by those of each model's mean.

        With x_0 the inputs (b, n, features), z_j = x_{j-1} W_j^T + b_j, x_j = relu(z_j) and p = softmax(z_L)::

            dz_L = (p - onehot(targets)) / n
            dz_j = (dz_{j+1} W_{j+1}) [x_j > 0]
        """
        x = [inputs]
        for layer in self._layers[:-1]:
            x.append(layer.forward(x[-1]).relu_())
        z = self._layers[-1].forward(x[-1])
        if self._shape.against_zero:
            z = nn.functional.pad(z, (1, 0))
        log_p, classes = torch.log_softmax(z, 2), targets.unsqueeze(2)
        losses = log_p.gather(2, classes).squeeze(2).neg_()
        dz = log_p.exp_().scatter_(2, classes, -1.0, reduce="add").div_(targets.shape[1])
        if self._shape.against_zero:
            dz = dz[:, :, 1:].contiguous()
        for j in range(len(self._layers) - 1, -1, -1):
            self._layers[j].store_gradients(x[j], dz)
            if j > 0:
                dz = self._layers[j].backward(dz).masked_fill_(x[j] <= 0, 0.0)
        return losses


def _has_bias(linear: nn.Linear) -> bool:
    bias: Tensor | None = linear.bias
    return bias is not None


def _has_hooks(thing: Any) -> bool:
    """Whether somebody added to what PyTorch does, or put a forward of their own in its place."""
    names = {*vars(thing), "_backward_hooks", "_post_accumulate_grad_hooks"}
    return any(getattr(thing, name, None) for name in names if name.endswith("_hooks") or name == "forward")
