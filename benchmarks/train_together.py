"""Small fully connected models: how much faster are clients that train together than one after the other?

One thread, Fashion-MNIST, plain SGD, milliseconds per client and local step, all ways in turn:

- ``autograd``: fedsparse's local training with PyTorch's gradients, one client after the other;
- ``alone``: the same with its gradients by hand (`clients.dense`);
- ``vmap``: torch.func.vmap over gradients of stacked models;
- ``together``: `clients.together`, which is what a run does.

`run_steps_per_s` is a whole run, inline, 20 of 100 clients a round, with error memory and Top-k; `run_gain` is how many
times longer a round of it takes when its clients train one after the other.

    python -m benchmarks.train_together
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from benchmarks._report import save
from clients.client_app import LocalTraining
from clients.flat import FlatModel
from clients.job import TrainSettings
from clients.together import Trainee, train_together
from clients.training import batches, train
from fedsparse.data import Dataset, load_dataset
from fedsparse.models import build_model, model_arrays
from fedsparse.run import RunFolder, run_scenario
from fedsparse.scenario import from_toml
from fedsparse.seeding import generator

MODELS = ("softmax", "mlp(hidden=32)", "mlp(hidden=128)")
EXAMPLES = 1280  # of each client
STEPS = {1: 40, 8: 40, 32: 20, 128: 10}
LR = 0.05
SCENARIO = """
name = "together"
rounds = {rounds}
[data]
dataset = "fashion-mnist"
num_clients = 100
[model]
name = "{model}"
[train]
batch_size = {size}
lr = 0.05
clients_per_round = 20
[compression]
uplink = "topk(density=0.01)"
[evaluation]
every = 1000
[engine]
name = "inline"
"""


@lru_cache(maxsize=1)
def data() -> Dataset:
    """Return the images in memory."""
    return load_dataset("fashion-mnist")


def parts(clients: int) -> list[Any]:
    """Return each client's examples."""
    return [np.arange(client * EXAMPLES, (client + 1) * EXAMPLES) for client in range(clients)]


def settings(size: int) -> TrainSettings:
    """Return so many steps that every batch is full."""
    return TrainSettings(local_epochs=None, local_steps=STEPS[size], batch_size=size, lr=LR)


def alone(flat: FlatModel, size: int, clients: int, by_hand: bool) -> Tensor:
    """Train one client after the other; return their parameters."""
    d, arrays, dense, found = data(), model_arrays(flat.model), flat.dense, []
    flat.dense = dense if by_hand else None
    for client, part in enumerate(parts(clients)):
        flat.load(arrays)
        keys = {"seed": 0, "server_round": 1, "client": client}
        train(flat, d.x_train, d.y_train, part, settings(size), scale=d.scale, **keys)
        found.append(flat.groups[0].values.clone())
    flat.dense = dense
    flat.load(arrays)
    return torch.stack(found)


class Stacked:
    """The parameters of many clients as rows of one matrix, and their batches."""

    def __init__(self, flat: FlatModel, size: int, clients: int) -> None:
        self.size, self.clients = size, clients
        self.values = flat.groups[0].values.expand(clients, -1).clone()
        self._shapes = {name: p.shape for name, p in flat.model.named_parameters()}
        streams = [
            (p, batches(p.size, settings(size), generator(0, "batches", 1, c))) for c, p in enumerate(parts(clients))
        ]
        self._streams = streams

    def views(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return the rows' parts as tensors (clients, *shape)."""
        pieces = matrix.split([shape.numel() for shape in self._shapes.values()], dim=1)
        return {n: v.view(self.clients, *s) for (n, s), v in zip(self._shapes.items(), pieces, strict=True)}

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the next batch of each client, as one."""
        rows = np.concatenate([part[next(stream)] for part, stream in self._streams])
        inputs = torch.from_numpy(data().x_train[rows]).float().mul_(data().scale)
        targets = torch.from_numpy(data().y_train[rows])
        return inputs.view(self.clients, self.size, -1), targets.view(self.clients, self.size)


def by_vmap(flat: FlatModel, size: int, clients: int) -> Tensor:
    """Train all at once with torch.func."""

    def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(flat.model, parameters, (inputs,)), targets)

    all_of_them, stacked = vmap(grad_and_value(loss)), Stacked(flat, size, clients)
    values = stacked.views(stacked.values)
    for _ in range(STEPS[size]):
        grads, _ = all_of_them(values, *stacked.batch())
        for name, grad in grads.items():
            values[name].sub_(grad, alpha=LR)
    return stacked.values


def together(flat: FlatModel, size: int, clients: int) -> Tensor:
    """Train all at once as fedsparse does."""
    d = data()
    trainees = [Trainee(client, part, settings(size)) for client, part in enumerate(parts(clients))]
    found = train_together(flat, d.x_train, d.y_train, trainees, scale=d.scale, seed=0, server_round=1)
    rows = [np.concatenate([array.ravel() for array in found[client].arrays.values()]) for client in range(clients)]
    return torch.from_numpy(np.stack(rows))


def per_step(ways: dict[str, Callable[[], Tensor]], steps: int, repeats: int) -> dict[str, float]:
    """Return milliseconds per client and step, the median of runs in turn; all ways must agree."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, Tensor] = {}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            found[name] = way()
            if turn:
                times[name].append((time.perf_counter() - start) / (steps * len(found[name])) * 1e3)
    for name, values in found.items():
        torch.testing.assert_close(values, found["autograd"][: len(values)], atol=1e-3, rtol=0.0, msg=name)
    return {name: statistics.median(values) for name, values in times.items()}


def round_s(model: str, size: int) -> float:
    """Return the seconds of a round of a whole run, evaluation left out."""
    with tempfile.TemporaryDirectory() as folder:
        run_scenario(from_toml(SCENARIO.format(rounds=10, model=model, size=size)), Path(folder) / "run")
        return statistics.median(line["wall_s"] for line in RunFolder(Path(folder) / "run").rounds()[1:-1])


def measure(model: str, size: int, repeats: int) -> dict[str, Any]:
    """Measure one model with one batch size."""
    flat = FlatModel(build_model(model, data().input_shape, data().num_classes, 0))
    ways: dict[str, Callable[[], Tensor]] = {
        "autograd": partial(alone, flat, size, 32, False),
        "alone": partial(alone, flat, size, 32, True),
    }
    ways |= {f"vmap_{n}": partial(by_vmap, flat, size, n) for n in (8, 32)}
    ways |= {f"together_{n}": partial(together, flat, size, n) for n in (8, 32)}
    found = per_step(ways, STEPS[size], repeats)
    row: dict[str, Any] = {"model": model, "batch": size, **{f"ms_{name}": round(ms, 4) for name, ms in found.items()}}
    if size > 1:
        second = round_s(model, size)
        with patch.object(LocalTraining, "train_ahead", staticmethod(lambda turns: None)):
            one_by_one = round_s(model, size)
        steps = 20 * -(-600 // size)
        row |= {"run_steps_per_s": round(steps / second), "run_gain": round(one_by_one / second, 2)}
    return row


def main() -> None:
    """Measure all models and batch sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(model, size, given.repeats) for model in MODELS for size in STEPS]
    save("train_together", rows, "milliseconds per client and local step, one thread; 8 or 32 clients together")


if __name__ == "__main__":
    main()
