"""Real training: client steps a second of a whole run, beside a bare PyTorch loop over the same batches.

Fashion-MNIST, 100 clients, 20 a round, cnn, batches of 32, one epoch, compression on; two workers of one thread each.
Four ways, in turn, so that a slow moment of the machine hits all alike:

- ``bare``: two processes with torch.optim.SGD and nothing else, arrays as PyTorch lays them out;
- ``bare, channels-last``: the same, with the layout that is faster on CPUs;
- ``clients alone``: two processes with fedsparse's local training, no server, no messages, no compression;
- ``run``: `fedsparse run` on Ray, from the second round on, evaluation left out.

*Efficiency* is the time of clients by themselves over that of the run: what server, messages, compression and error
memory leave. It is given twice: for the faster of the bare loops, and for fedsparse's own training, which the run
uses. Each is by the clock, and by the CPU time of a client step, driver and workers together: other work on the
machine disturbs that less, but it does not see workers that wait.

    python -m benchmarks.training --rounds 4 --repeats 3
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import save
from fedsparse.run import RoundDone, RunFolder, run_scenario
from fedsparse.scenario import from_toml

WORKERS = 2
MARK = uuid.uuid4().hex  # in the environment of this run's workers
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


def bare(clients: list[int], channels_last: bool) -> tuple[float, float]:
    """Train clients with plain PyTorch; return seconds and CPU seconds of the loop alone."""
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
    return timed(one, clients)


def alone(clients: list[int]) -> tuple[float, float]:
    """Train clients with fedsparse's own local training; return seconds and CPU seconds of the loop alone."""
    from clients.flat import FlatModel
    from clients.job import TrainSettings
    from clients.training import torch_threads, train
    from fedsparse.data import load_dataset
    from fedsparse.heap import keep_freed_memory
    from fedsparse.models import build_model, model_arrays

    data, shares = load_dataset("fashion-mnist"), parts()
    keep_freed_memory()  # as workers do
    flat = FlatModel(build_model("cnn", data.input_shape, data.num_classes, 0))
    arrays = model_arrays(flat.model)
    settings = TrainSettings(lr=0.05)

    def one(client: int) -> None:
        flat.load(arrays)
        keys = {"seed": 0, "server_round": 1, "client": client}
        train(flat, data.x_train, data.y_train, shares[client], settings, scale=data.scale, **keys)

    with torch_threads(1):
        one(clients[0])
        return timed(one, clients)


def timed(work: Callable[[int], None], clients: list[int]) -> tuple[float, float]:
    """Return the seconds, and the CPU seconds, that some work for each client takes."""
    began, cpu = time.perf_counter(), time.process_time()
    for client in clients:
        work(client)
    return time.perf_counter() - began, time.process_time() - cpu


def side_by_side(work: Callable[..., tuple[float, float]], *arguments: Any) -> tuple[float, float]:
    """Run 20 clients in each of two processes at once; return client steps a second, and CPU milliseconds of a step."""
    shares = [list(range(20)), list(range(20, 40))]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        found = pool.starmap(work, [(share, *arguments) for share in shares], chunksize=1)
    per_second = sum(steps(share) / second for share, (second, _) in zip(shares, found, strict=True))
    return per_second, sum(cpu for _, cpu in found) / sum(map(steps, shares)) * 1e3


def cpu_seconds() -> float:
    """Return the CPU time so far of this process and of Ray's workers."""
    total = time.process_time()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if (stat.parent / "cmdline").read_bytes().startswith(b"ray::Worker") and MARK in environment(stat.parent):
                total += sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue
    return total


def environment(process: Path) -> str:
    """Return the environment in which a process was started."""
    return (process / "environ").read_bytes().decode(errors="replace")


def whole_run(rounds: int) -> tuple[float, float]:
    """Return client steps a second, and CPU milliseconds of a step, of a run without its first and its last round."""
    os.environ["FEDSPARSE_TRAINING_BENCHMARK"] = MARK
    after: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        listen = lambda event: after.append(cpu_seconds()) if isinstance(event, RoundDone) else None  # noqa: E731
        run_scenario(from_toml(SCENARIO.format(rounds=rounds)), out, on_event=listen)
        lines = RunFolder(out).rounds()[1:-1]
    count = sum(steps([int(c) for c in line["cohort"]]) for line in lines)
    return count / sum(line["wall_s"] for line in lines), (after[-2] - after[0]) / count * 1e3


def main() -> None:
    """Measure all ways in turn, and keep the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="rounds of a run; the first and the last do not count")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "bare": lambda: side_by_side(bare, False),
        "bare, channels-last": lambda: side_by_side(bare, True),
        "clients alone": lambda: side_by_side(alone),
        "run": lambda: whole_run(given.rounds),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(given.repeats):
        for name, measure in ways.items():
            found[name].append(measure())
    rates = {name: [rate for rate, _ in values] for name, values in found.items()}
    cpus = {name: [cpu for _, cpu in values] for name, values in found.items()}
    rows: list[dict[str, Any]] = [
        {
            "way": name,
            "client_steps_per_s": round(statistics.median(rates[name])),
            "lowest": round(min(rates[name])),
            "highest": round(max(rates[name])),
            "times_bare": round(statistics.median(rates[name]) / statistics.median(rates["bare"]), 2),
            "cpu_ms_per_step": round(statistics.median(cpus[name]), 3),
        }
        for name in ways
    ]
    for way in ("bare, channels-last", "clients alone"):
        efficiency = statistics.median(run / alone for run, alone in zip(rates["run"], rates[way], strict=True))
        by_cpu = statistics.median(alone / run for run, alone in zip(cpus["run"], cpus[way], strict=True))
        rows.append({"way": f"efficiency: {way}, to run", "value": round(efficiency, 3), "by_cpu": round(by_cpu, 3)})
    save("training", rows, "Fashion-MNIST, cnn, 100 clients, 20 a round, batch 32, one epoch; 2 workers x 1 thread")


if __name__ == "__main__":
    main()
