"""Local training of many small fully connected models at once: the same bits as one after the other, in less time.

A step of such a model takes longer to begin than to compute. Clients that start from the same numbers take their steps
together, as rows of one matrix, as long as their batches are equally long.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clients.dense import LINE, DenseModels, aligned
from clients.flat import FlatModel, Group
from clients.job import TrainSettings
from clients.schedules import make_schedule
from clients.training import TrainResult, batches, is_finite, loaded, num_steps, sgd_step
from fedsparse.models.arrays import to_numpy
from fedsparse.seeding import generator

MOST_NUMBERS = 2**22  # of all models together; larger ones keep a CPU busy enough alone


@dataclass(frozen=True)
class Trainee:
    """One client's share of a common training: its number, its examples, and its steps."""

    client: int
    part: NDArray[np.int64]
    settings: TrainSettings


class Trained(NamedTuple):
    """What a client learnt."""

    arrays: dict[str, NDArray[np.generic]]
    result: TrainResult


class _Step(NamedTuple):
    """One step of the models `start` to `stop`, and the rows of the data that they take, one model after the other."""

    start: int
    stop: int
    rate: float
    rows: NDArray[np.int64]


def can_train_together(flat: FlatModel, settings: TrainSettings) -> bool:
    """Whether it is possible: with several threads, BLAS adds up otherwise for many models than for one."""
    alone = flat.device.type == "cpu" and torch.get_num_threads() > 1
    return flat.dense is not None and settings.clip_norm is None and not alone


def train_together(
    flat: FlatModel,
    x: NDArray[Any],
    y: NDArray[np.int64],
    trainees: Sequence[Trainee],
    *,
    scale: float,
    seed: int,
    server_round: int,
) -> dict[int, Trained]:
    """Train clients from the numbers loaded in `flat`, which stay; see `clients.training.train` for the rest.

    The settings may differ in `max_steps` only. Clients whose training diverges are left out: alone, they tell why.

    Returns
    -------
    dict
        What each client learnt, to the last bit as alone.
    """
    ordered = sorted(trainees, key=lambda one: (num_steps(one.part.size, one.settings), one.part.size), reverse=True)
    most = max(1, MOST_NUMBERS // max(flat.groups[0].values.numel(), 1))
    found: dict[int, Trained] = {}
    for at in range(0, len(ordered), most):
        some = ordered[at : at + most]
        steps = list(_plan(some, seed, server_round))
        batches_of = loaded(flat, x, y, scale, (step.rows for step in steps))
        found |= _train(flat, some, zip(steps, batches_of, strict=True))
    return found


def _train(
    flat: FlatModel, trainees: Sequence[Trainee], steps: Iterable[tuple[_Step, tuple[Tensor, Tensor]]]
) -> dict[int, Trained]:
    assert flat.dense_shape is not None
    settings, start = trainees[0].settings, flat.groups[0].values
    models = DenseModels(flat.dense_shape, _rows(start, len(trainees)).copy_(start), _rows(start, len(trainees)))
    velocity = _rows(start, len(trainees)).zero_() if settings.momentum else None
    losses: list[list[Tensor]] = [[] for _ in trainees]
    part = lru_cache(models.rows)
    for step, (inputs, targets) in steps:
        some, count = part(step.start, step.stop), step.stop - step.start
        each = _backward(flat, some, inputs.reshape(count, len(inputs) // count, -1), targets.view(count, -1))
        moved = [] if velocity is None else [velocity[step.start : step.stop]]
        group = Group(some.values, some.values, some.grads)
        sgd_step([group], moved, [start] if settings.proximal_mu else [], settings, step.rate)
        for one, loss in zip(range(step.start, step.stop), each, strict=True):
            losses[one].append(loss)
    found: dict[int, Trained] = {}
    for trainee, values, loss in zip(trainees, models.values, losses, strict=True):
        seen = torch.cat(loss).double().cpu().numpy() if loss else np.empty(0)
        if np.isfinite(seen).all() and is_finite(values):
            result = TrainResult(float(seen.mean()) if loss else None, len(loss))
            found[trainee.client] = Trained(_arrays(flat, values), result)
    return found


def _arrays(flat: FlatModel, values: Tensor) -> dict[str, NDArray[np.generic]]:
    like = flat.trained
    pieces = torch.split(values, [value.numel() for value in like.values()])
    return {name: to_numpy(piece.view(like[name].shape)) for name, piece in zip(like, pieces, strict=True)}


def _plan(trainees: Sequence[Trainee], seed: int, server_round: int) -> Iterator[_Step]:
    """Yield all steps in order; neighbours with equally long batches and the same rate take theirs at once."""
    settings = trainees[0].settings
    schedule = make_schedule(settings.lr_schedule)
    totals = [num_steps(one.part.size, one.settings) for one in trainees]
    rngs = [generator(seed, "batches", server_round, one.client) for one in trainees]
    streams = [batches(one.part.size, one.settings, rng) for one, rng in zip(trainees, rngs, strict=True)]

    def next_step(number: int, index: int) -> tuple[int, float, NDArray[np.int64]]:
        batch = next(streams[number])
        rate = settings.lr * schedule.multiplier(server_round, settings.rounds, index, totals[number])
        return len(batch), rate, trainees[number].part[batch]

    for index in range(max(totals)):
        going = [(number, *next_step(number, index)) for number, total in enumerate(totals) if index < total]
        for (_, rate), alike in groupby(going, key=lambda each: each[1:3]):
            members = list(alike)
            rows = np.concatenate([rows for *_, rows in members])
            yield _Step(members[0][0], members[-1][0] + 1, rate, rows)


def _backward(flat: FlatModel, models: DenseModels, inputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the gradients of all models at once, where that was seen to give the bits of one after the other."""
    inputs, kind = aligned(inputs), tuple(targets.shape)
    assert flat.dense_shape is not None
    if len(targets) == 1 or not flat.dense_shape.is_aligned(targets.shape[1], inputs.itemsize):
        return _one_by_one(models, inputs, targets)
    if flat.same_bits.get(kind, False):
        return models.backward(inputs, targets)
    if kind in flat.same_bits:
        return _one_by_one(models, inputs, targets)
    losses, grads = models.backward(inputs, targets), models.grads.clone()
    wanted = _one_by_one(models, inputs, targets)
    flat.same_bits[kind] = torch.equal(losses, wanted) and torch.equal(grads, models.grads)
    return wanted


def _one_by_one(models: DenseModels, inputs: Tensor, targets: Tensor) -> Tensor:
    each = zip(inputs.split(1), targets.split(1), strict=True)  # type: ignore[no-untyped-call]
    return torch.cat([models.rows(i, i + 1).backward(aligned(x), y) for i, (x, y) in enumerate(each)])


def _rows(like: Tensor, count: int) -> Tensor:
    line = LINE // like.itemsize  # every model begins at the start of one, as it does alone
    size = -(-like.numel() // line) * line
    return torch.zeros(count, size, dtype=like.dtype, device=like.device)[:, : like.numel()]
