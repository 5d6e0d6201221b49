"""Real training: client steps a second of a whole run, beside a bare PyTorch loop over the same batches.

Fashion-MNIST, 100 clients, 20 a round, cnn, batches of 32, one epoch, compression on; two workers of one thread each.
Four ways, in turn, so that a slow moment of the machine hits all alike:

- ``bare``: two processes with torch.optim.SGD and nothing else, arrays as PyTorch lays them out;
- ``bare, channels-last``: the same, with the layout that is faster on CPUs;
- ``clients alone``: two processes with fedsparse's local training, no server, no messages, no compression;
- ``run``: `fedsparse run` on Ray, from the second round on, evaluation left out.

*Efficiency* is clients alone over the run: what server, messages, compression and error memory leave.

    python -m benchmarks.training --rounds 4 --repeats 3
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import save
from fedsparse.run import RunFolder, run_scenario
from fedsparse.scenario import from_toml

WORKERS = 2
SCENARIO = """
name = "training-benchmark"
rounds = {rounds}
[data]
dataset = "fashion-mnist"
num_clients = 100
[model]
name = "cnn"
[train]
local_epochs = 1
batch_size = 32
lr = 0.05
clients_per_round = 20
[compression]
uplink = "topk(density=0.01)|qsgd(levels=8, norm=\\"max\\")"
[evaluation]
every = 1000
[engine]
name = "ray"
max_workers = 2
checkpoint = true
"""


def parts() -> list[Any]:
    """Return the clients' examples, as the run divides them."""
    from fedsparse.data import load_dataset, partition

    return partition("iid", load_dataset("fashion-mnist").y_train, 100, 0)


def steps(clients: list[int]) -> int:
    """Return how many batches these clients have."""
    return sum(-(-parts()[client].size // 32) for client in clients)


def bare(clients: list[int], channels_last: bool) -> float:
    """Train clients with plain PyTorch; return the seconds of the loop alone."""
    import torch

    from fedsparse.data import load_dataset
    from fedsparse.models import build_model

    torch.set_num_threads(1)
    data, shares = load_dataset("fashion-mnist"), parts()
    images = torch.from_numpy(np.array(data.x_train, dtype=np.float32)) * data.scale
    labels = torch.from_numpy(np.array(data.y_train))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = images.contiguous(memory_format=layout)
    model = build_model("cnn", data.input_shape, data.num_classes, 0).to(memory_format=layout)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def one(client: int) -> None:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batch in torch.from_numpy(np.random.default_rng(client).permutation(shares[client])).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()

    one(clients[0])  # the first use of an optimizer in a process is slow
    began = time.perf_counter()
    for client in clients:
        one(client)
    return time.perf_counter() - began


def alone(clients: list[int]) -> float:
    """Train clients with fedsparse's own local training; return the seconds of the loop alone."""
    from clients.flat import FlatModel
    from clients.job import TrainSettings
    from clients.training import torch_threads, train
    from fedsparse.data import load_dataset
    from fedsparse.models import build_model, model_arrays

    data, shares = load_dataset("fashion-mnist"), parts()
    flat = FlatModel(build_model("cnn", data.input_shape, data.num_classes, 0))
    arrays = model_arrays(flat.model)
    settings = TrainSettings(lr=0.05)

    def one(client: int) -> None:
        flat.load(arrays)
        keys = {"seed": 0, "server_round": 1, "client": client}
        train(flat, data.x_train, data.y_train, shares[client], settings, scale=data.scale, **keys)

    with torch_threads(1):
        one(clients[0])
        began = time.perf_counter()
        for client in clients:
            one(client)
        return time.perf_counter() - began


def side_by_side(work: Callable[..., float], *arguments: Any) -> float:
    """Run one share of 40 clients in each of two processes at once; return client steps a second of both together."""
    shares = [list(range(20)), list(range(20, 40))]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        seconds = pool.starmap(work, [(share, *arguments) for share in shares], chunksize=1)
    return sum(steps(share) / second for share, second in zip(shares, seconds, strict=True))


def whole_run(rounds: int) -> float:
    """Return client steps a second of a whole run, from its second round to its last but one."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run_scenario(from_toml(SCENARIO.format(rounds=rounds)), out)
        lines = RunFolder(out).rounds()[1:-1]
    return sum(steps([int(c) for c in line["cohort"]]) for line in lines) / sum(line["wall_s"] for line in lines)


def main() -> None:
    """Measure all ways in turn, and keep the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="rounds of a run; the first and the last do not count")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    ways: dict[str, Callable[[], float]] = {
        "bare": lambda: side_by_side(bare, False),
        "bare, channels-last": lambda: side_by_side(bare, True),
        "clients alone": lambda: side_by_side(alone),
        "run": lambda: whole_run(given.rounds),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.repeats):
        for name, measure in ways.items():
            found[name].append(measure())
    medians = {name: statistics.median(values) for name, values in found.items()}
    rows: list[dict[str, Any]] = [
        {
            "way": name,
            "client_steps_per_s": round(medians[name]),
            "lowest": round(min(values)),
            "highest": round(max(values)),
            "times_bare": round(medians[name] / medians["bare"], 2),
        }
        for name, values in found.items()
    ]
    efficiency = statistics.median(a / b for a, b in zip(found["run"], found["clients alone"], strict=True))
    rows.append({"way": "efficiency: run over clients alone", "value": round(efficiency, 3)})
    save("training", rows, "Fashion-MNIST, cnn, 100 clients, 20 a round, batch 32, one epoch; 2 workers x 1 thread")


if __name__ == "__main__":
    main()
