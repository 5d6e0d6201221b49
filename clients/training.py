"""Local training by hand: SGD on a `FlatModel`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clients.dense import aligned
from clients.flat import FlatModel, Group, has_convolutions, input_dtype, to_input
from clients.job import TrainSettings
from clients.schedules import make_schedule
from fedsparse.errors import RunError
from fedsparse.models.arrays import HALF
from fedsparse.seeding import generator, int_seed

AT_ONCE = 2**16  # numbers of input that are read ahead: they should stay in a CPU's cache until they are used


@dataclass(frozen=True)
class TrainResult:
    """Mean loss over the examples seen (None where there were none), and the steps taken."""

    loss: float | None
    steps: int


def num_steps(n: int, settings: TrainSettings) -> int:
    """Return how many local steps a client with `n` examples takes in a round."""
    if n == 0:
        return 0
    steps = settings.local_steps or (settings.local_epochs or 0) * -(-n // settings.batch_size)
    return steps if settings.max_steps is None else min(steps, settings.max_steps)


def batches(n: int, settings: TrainSettings, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Yield index batches: shuffled epochs, each with its last, smaller batch, cut short after `local_steps`."""
    left = num_steps(n, settings)
    while left:
        order = rng.permutation(n)
        for start in range(0, n, settings.batch_size)[:left]:
            yield order[start : start + settings.batch_size]
            left -= 1


def loaded(
    flat: FlatModel, x: NDArray[Any], y: NDArray[np.int64], scale: float, chosen: Iterator[NDArray[np.int64]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of rows as inputs and targets; several are read, converted and brought to the device at once."""
    most = max(1, AT_ONCE // max(int(np.prod(x.shape[1:])), 1))
    ahead: list[NDArray[np.int64]] = []
    for batch in chain(chosen, [None]):
        if ahead and (batch is None or sum(map(len, ahead)) + len(batch) > most):
            rows, sizes = np.concatenate(ahead), [len(rows) for rows in ahead]
            inputs, targets = flat.batch(x[rows], scale), torch.from_numpy(y[rows]).to(flat.device)
            yield from zip(torch.split(inputs, sizes), torch.split(targets, sizes), strict=True)
            ahead = []
        if batch is not None:
            ahead.append(batch)


def train(
    flat: FlatModel,
    x: NDArray[Any],
    y: NDArray[np.int64],
    part: NDArray[np.int64],
    settings: TrainSettings,
    *,
    scale: float,
    seed: int,
    server_round: int,
    client: int,
) -> TrainResult:
    """Train in place on the examples ``part`` of ``x, y``, starting from what was loaded.

    One step is, for the gradient g of the mean cross-entropy of a batch, clipped to the norm `clip_norm`::

        g <- g + weight_decay w + proximal_mu (w - w_global)
        v <- momentum v + g
        w <- w - eta_t v

    which is SGD as torch.optim has it, with the proximal term of FedProx (Li et al. 2020). The result depends on the
    arguments and the loaded numbers alone, to the last bit.

    Raises
    ------
    RunError
        Where the loss or a parameter is not finite any more.
    """
    schedule, total_steps = make_schedule(settings.lr_schedule), num_steps(part.size, settings)
    start = [group.values.clone() for group in flat.groups] if settings.proximal_mu else []
    velocity = [torch.zeros_like(group.values) for group in flat.groups] if settings.momentum else []
    losses: list[Tensor] = []
    rates: list[float] = []
    flat.model.train()
    rng = generator(seed, "batches", server_round, client)
    with _torch_seeded(int_seed(seed, "torch", server_round, client), flat.device):
        chosen = (part[batch] for batch in batches(part.size, settings, rng))
        for step, (inputs, targets) in enumerate(loaded(flat, x, y, scale, chosen)):
            losses.append(backward(flat, inputs, targets))
            rate = settings.lr * schedule.multiplier(server_round, settings.rounds, step, total_steps)
            sgd_step(flat.groups, velocity, start, settings, rate)
            flat.publish()
            rates.append(rate)
    if not losses:
        return TrainResult(None, 0)
    # Looked at only here: a GPU would wait for each look.
    values = torch.cat(losses).double().cpu().numpy()
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size or not all(is_finite(group.values) for group in flat.groups):
        ends = np.cumsum([len(loss) for loss in losses])
        step = int(np.searchsorted(ends, bad[0], side="right")) if bad.size else len(losses) - 1
        what = f"the loss is {values[bad[0]]}" if bad.size else "a parameter is no longer finite"
        raise RunError(
            f"client {client}, round {server_round}, step {step + 1}: {what}. Training has diverged: lower train.lr "
            f"(here {rates[step]:g}) or set train.clip_norm."
        )
    return TrainResult(float(values.mean()), len(losses))


def backward(flat: FlatModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each example, or their mean for each; overwrite the gradients by the mean's."""
    if flat.dense is not None:
        return flat.dense.backward(aligned(inputs.flatten(1)).unsqueeze(0), targets.unsqueeze(0)).squeeze(0)
    for group in flat.groups:
        group.grads.zero_()
    with _single_example_norms(flat, len(targets)):
        loss = _loss(flat.model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach().expand(len(targets))


def sgd_step(
    groups: list[Group], velocity: list[Tensor], start: list[Tensor], settings: TrainSettings, rate: float
) -> None:
    """Take one step of SGD; see `train` for the equation."""
    grads = [group.grads.to(group.values.dtype) for group in groups]
    if settings.clip_norm is not None:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g).double() for g in grads]))
        shrink = torch.clamp(settings.clip_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(shrink.to(grad.dtype))
    for i, (group, grad) in enumerate(zip(groups, grads, strict=True)):
        if settings.weight_decay:
            grad.add_(group.values, alpha=settings.weight_decay)
        if settings.proximal_mu:
            grad.add_(group.values - start[i], alpha=settings.proximal_mu)
        if settings.momentum:
            grad = velocity[i].mul_(settings.momentum).add_(grad)
        group.values.sub_(grad, alpha=rate)


def is_finite(values: Tensor) -> bool:
    """Whether all are: least and greatest are NaN where one is, and take a tenth of the time of torch.isfinite."""
    return values.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def _loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    # Half precision has too few digits for a sum of exponentials.
    logits = logits.float() if logits.dtype in HALF else logits
    return nn.functional.cross_entropy(logits, targets, reduction=reduction)


@contextmanager
def _single_example_norms(flat: FlatModel, size: int) -> Iterator[None]:
    """BatchNorm has no variance of one example: such a batch uses the running statistics instead."""
    norms = [norm for norm in flat.norms if norm.training and norm.track_running_stats] if size == 1 else []
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


@contextmanager
def _torch_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch for dropout and its like, and leave its global random state as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            yield


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads: the order of additions, so the last bits, depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    x: NDArray[Any],
    y: NDArray[np.int64],
    scale: float,
    device: torch.device,
    part: NDArray[np.int64] | None = None,
) -> tuple[float, float]:
    """Return (mean loss, accuracy) of `model` on ``x, y`` or its rows `part`; zeros where there are none."""
    rows = np.arange(len(y)) if part is None else part
    dtype, channels_last = input_dtype(model), has_convolutions(model)
    # Large images in small batches: activations take many times the memory of the input, and on a CPU they should stay
    # in its cache (measured for 1x28x28: batches of 128 take half the time of 1,000).
    numbers = 100_000 if channels_last and device.type == "cpu" else 1_000_000
    size = int(np.clip(numbers // max(int(np.prod(x.shape[1:])), 1), 1, 1000))
    model.eval()
    loss, right = 0.0, 0
    for start in range(0, rows.size, size):
        chosen = rows[start : start + size]
        targets = torch.from_numpy(np.ascontiguousarray(y[chosen])).to(device)
        logits = model(to_input(x[chosen], scale, device, dtype, channels_last))
        loss += float(_loss(logits, targets, "sum"))
        right += int((logits.argmax(1) == targets).sum())
    return loss / max(rows.size, 1), right / max(rows.size, 1)
