"""Our own ClientApp: local training on the client's part of the data, compressed by `CompressionMod`."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from numpy.typing import NDArray
from torch import nn

from clients.job import Job, parse_job
from clients.mod import CompressionMod
from clients.schedules import make_schedule
from clients.training import FlatParameters, evaluate, train
from fedsparse.data import Dataset, load_dataset, partition
from fedsparse.models import build_model, frozen_names, load_arrays, model_arrays
from fedsparse.protocol import JOB_KEY, views


@lru_cache(maxsize=4)
def _data(dataset: str, data_dir: str | None) -> Dataset:
    return load_dataset(dataset, data_dir)


@lru_cache(maxsize=4)
def _parts(dataset: str, data_dir: str | None, spec: str, num_clients: int, seed: int) -> list[NDArray[np.int64]]:
    data = _data(dataset, data_dir)
    return partition(spec, data.y_train, num_clients, seed, data.groups)


@lru_cache(maxsize=4)
def _model(job_model: str, shape: tuple[int, ...], classes: int, device: str) -> tuple[nn.Module, FlatParameters]:
    """Build once per worker: every client loads the global numbers into the same tensors."""
    model = build_model(job_model, shape, classes, seed=0).to(device)
    return model, FlatParameters(model)


def pick_device(wanted: str) -> torch.device:
    """Return the device to train on; "auto" takes CUDA where this process may see a GPU."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES") != "" else "cpu"
    return torch.device(wanted)


def _open(message: Message, context: Context) -> tuple[Job, int, Dataset, NDArray[np.int64]]:
    job = parse_job(str(message.content.config_records["config"][JOB_KEY]))
    torch.set_num_threads(job.num_threads)
    client = int(context.node_config["partition-id"])
    data = _data(job.dataset, job.data_dir)
    parts = _parts(job.dataset, job.data_dir, job.partition, job.num_clients, job.seed)
    return job, client, data, parts[client]


def _train(message: Message, context: Context) -> Message:
    job, client, data, part = _open(message, context)
    config = message.content.config_records["config"]
    server_round = int(config["server-round"])  # type: ignore[arg-type]
    settings = job.train
    if "proximal-mu" in config:  # FedProx tells its clients
        settings = replace(settings, proximal_mu=float(config["proximal-mu"]))  # type: ignore[arg-type]
    device = pick_device(job.device)
    model, flat = _model(job.model, data.input_shape, data.num_classes, str(device))
    arrays = views(message.content.array_records["arrays"])
    load_arrays(model, arrays)
    before = _trained(model)
    lr = settings.lr * make_schedule(settings.lr_schedule).factor(server_round, settings.rounds)
    result = train(
        model, flat, data.x_train, data.y_train, part, settings,
        lr=lr, scale=data.scale, seed=job.seed, server_round=server_round, client=client, device=device,
    )  # fmt: skip
    after = _trained(model)
    # What was learnt goes on top of the server's own numbers: half-precision models must not round those away.
    new = {name: _advanced(arrays[name], before[name], after[name]) for name in after}
    metrics: dict[str, Any] = {"num-examples": int(part.size), "train-loss": result.loss or 0.0}
    metrics["local-steps"] = result.steps
    content = RecordDict({"arrays": ArrayRecord({name: Array(array) for name, array in new.items()})})
    content["metrics"] = MetricRecord(metrics)
    return Message(content, reply_to=message)


def _trained(model: nn.Module) -> dict[str, NDArray[np.generic]]:
    frozen = set(frozen_names(model))
    return {name: array for name, array in model_arrays(model).items() if name not in frozen}


def _advanced(sent: NDArray[Any], before: NDArray[Any], after: NDArray[Any]) -> NDArray[Any]:
    if sent.dtype.kind != "f" or np.array_equal(sent, before):
        return after
    return np.asarray(sent + (after - before), dtype=sent.dtype)


def _evaluate(message: Message, context: Context) -> Message:
    job, _, data, part = _open(message, context)
    device = pick_device(job.device)
    model, _ = _model(job.model, data.input_shape, data.num_classes, str(device))
    load_arrays(model, views(message.content.array_records["arrays"]))
    loss, accuracy = evaluate(model, data.x_train, data.y_train, data.scale, device, part)
    metrics = MetricRecord({"num-examples": int(part.size), "loss": loss, "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _query(message: Message, context: Context) -> Message:
    """Tell which part of the data this node holds: Flower's node ids change with every run."""
    record = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
    return Message(RecordDict({"node": record}), reply_to=message)


def make_app(mods: Sequence[Mod] | None = None) -> ClientApp:
    """Return the ClientApp; `mods` default to a `CompressionMod` with its own defaults."""
    made = ClientApp(mods=list(mods) if mods is not None else [CompressionMod()])
    made.train()(_train)
    made.evaluate()(_evaluate)
    made.query()(_query)
    return made


app = make_app()
