"""Our own ClientApp: local training on the client's part of the data, compressed by `CompressionMod`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from numpy.typing import NDArray

from clients.flat import FlatModel
from clients.job import Job, TrainSettings, parse_job
from clients.mod import CompressionMod
from clients.together import Trained, Trainee, can_train_together, train_together
from clients.training import evaluate, torch_threads, train
from fedsparse.data import Dataset, load_dataset, partition
from fedsparse.data.local import load_local
from fedsparse.errors import ConfigError
from fedsparse.heap import keep_freed_memory
from fedsparse.models import build_model
from fedsparse.protocol import JOB_KEY, MAX_STEPS, WORK_KEY, only, records, to_array, views


@lru_cache(maxsize=4)
def _data(dataset: str, data_dir: str | None) -> Dataset:
    return load_dataset(dataset, data_dir)


@lru_cache(maxsize=4)
def _parts(dataset: str, data_dir: str | None, spec: str, num_clients: int, seed: int) -> list[NDArray[np.int64]]:
    data = _data(dataset, data_dir)
    return partition(spec, data.y_train, num_clients, seed, data.groups)


@lru_cache(maxsize=1)
def _own_data(source: str, input_shape: tuple[int, ...] | None, num_classes: int | None) -> Dataset:
    return load_local(source, input_shape, num_classes)


def _examples(job: Job, number: int, context: Context) -> tuple[Dataset, NDArray[np.int64]]:
    """Return the data and which of them are this client's: all of the device's own, or a part of the shared set."""
    if source := context.node_config.get("data"):
        data = _own_data(str(source), job.input_shape, job.num_classes)
        return data, np.arange(len(data.y_train))
    if number >= job.num_clients:
        raise ConfigError(f"partition-id is {number}, the data are divided among {job.num_clients} clients.")
    parts = _parts(job.dataset, job.data_dir, job.partition, job.num_clients, job.seed)
    return _data(job.dataset, job.data_dir), parts[number]


def _threads(job: Job, context: Context) -> int:
    """Return the threads of training: what the device allows, or else what the scenario says."""
    own = context.node_config.get("threads")
    return own if isinstance(own, int) and not isinstance(own, bool) and own > 0 else job.num_threads


@lru_cache(maxsize=4)
def _model(name: str, shape: tuple[int, ...], classes: int, seed: int, device: str) -> FlatModel:
    """Build once per worker: every client loads the global numbers into the same tensors."""
    keep_freed_memory()
    return FlatModel(build_model(name, shape, classes, seed).to(device))


def pick_device(wanted: str) -> torch.device:
    """Return the device to train on; "auto" takes CUDA where this process may see a GPU."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES") != "" else "cpu"
    return torch.device(wanted)


@dataclass(frozen=True)
class _Client:
    """All that one message asks of one client."""

    job: Job
    number: int
    data: Dataset
    part: NDArray[np.int64]
    flat: FlatModel
    config: ConfigRecord


def partition_id(context: Context) -> int:
    """Return which part of the data this node holds.

    Raises
    ------
    ConfigError
        Where the node's config does not say.
    """
    number = context.node_config.get("partition-id")
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ConfigError(
            f"this node's config has partition-id = {number!r}; start its SuperNode with "
            '--node-config "partition-id=0 num-partitions=10", each node with its own number.'
        )
    return number


def _open(message: Message, context: Context) -> _Client:
    config = next((c for c in records(message.content, ConfigRecord).values() if JOB_KEY in c), None)
    if config is None:
        raise ConfigError(
            f"the message's config has no {JOB_KEY!r}: the server side must send one, as fedsparse's does "
            "(pass it as train_config to the strategy's start)."
        )
    job, number = parse_job(str(config[JOB_KEY])), partition_id(context)
    data, part = _examples(job, number, context)
    device = pick_device(job.device)
    flat = _model(job.model, data.input_shape, data.num_classes, job.seed, str(device))
    return _Client(job, number, data, part, flat, config)


def _arrays(message: Message) -> dict[str, NDArray[np.generic]]:
    return views(only(message.content, ArrayRecord))


def _settings(message: Message, client: _Client) -> TrainSettings:
    settings = client.job.train
    if "proximal-mu" in client.config:  # FedProx tells its clients
        settings = replace(settings, proximal_mu=_number(client.config, "proximal-mu"))
    if (work := records(message.content, ConfigRecord).get(WORK_KEY)) is not None:
        settings = replace(settings, max_steps=int(_number(work, MAX_STEPS)))
    return settings


def _train(message: Message, context: Context) -> Message:
    content = _AHEAD.pop(message.metadata.message_id, None)
    if content is None:
        client = _open(message, context)
        job, data, flat = client.job, client.data, client.flat
        flat.load(_arrays(message))
        with torch_threads(_threads(job, context)):
            result = train(
                flat,
                data.x_train,
                data.y_train,
                client.part,
                _settings(message, client),
                scale=data.scale,
                seed=job.seed,
                server_round=int(_number(client.config, "server-round")),
                client=client.number,
            )
        content = _learnt(client.part.size, Trained(flat.arrays(), result))
    return Message(content, reply_to=message)


def _learnt(examples: int, trained: Trained) -> RecordDict:
    arrays, result = trained
    metrics: dict[str, Any] = {"num-examples": examples, "train-loss": result.loss or 0.0}
    metrics["local-steps"] = result.steps
    content = RecordDict({"arrays": ArrayRecord({name: to_array(array) for name, array in arrays.items()})})
    content["metrics"] = MetricRecord(metrics)
    return content


_AHEAD: dict[str, RecordDict] = {}  # by message id: what clients learnt together, until each one's turn comes


def train_ahead(turns: Sequence[tuple[Message, Context]]) -> None:
    """Train those clients together who can, before each of them is asked; see `clients.together`.

    Engines call it with the messages that a process answers next. It changes nothing but the time: whoever is not
    trained here, for whatever reason, trains when asked.
    """
    _AHEAD.clear()
    alike: dict[Any, list[tuple[Message, _Client]]] = {}
    for message, context in turns:
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            continue
        client = _open(message, context)
        settings = _settings(message, client)
        server_round, threads = int(_number(client.config, "server-round")), _threads(client.job, context)
        places = ((name, a.ctypes.data, a.shape, a.dtype.str) for name, a in _arrays(message).items())
        key = (client.job, replace(settings, max_steps=None), server_round, threads, id(client.data), *places)
        alike.setdefault(key, []).append((message, client))
    for (job, settings, server_round, threads, *_), group in alike.items():
        message, client = group[0]
        data, flat = client.data, client.flat
        with torch_threads(threads):
            if len(group) < 2 or not can_train_together(flat, settings):
                continue
            flat.load(_arrays(message))
            trained = train_together(
                flat,
                data.x_train,
                data.y_train,
                [Trainee(each.number, each.part, _settings(asked, each)) for asked, each in group],
                scale=data.scale,
                seed=job.seed,
                server_round=server_round,
            )
        for asked, each in group:
            if each.number in trained:
                _AHEAD[asked.metadata.message_id] = _learnt(each.part.size, trained[each.number])


def _evaluate(message: Message, context: Context) -> Message:
    client = _open(message, context)
    data, flat = client.data, client.flat
    flat.load(_arrays(message))
    with torch_threads(_threads(client.job, context)):
        loss, accuracy = evaluate(flat.model, data.x_train, data.y_train, data.scale, flat.device, client.part)
    metrics = MetricRecord({"num-examples": int(client.part.size), "loss": loss, "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _query(message: Message, context: Context) -> Message:
    """Tell which part of the data this node holds: Flower's node ids change with every run."""
    record = ConfigRecord({"partition-id": partition_id(context)})
    return Message(RecordDict({"node": record}), reply_to=message)


def _number(config: ConfigRecord, key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"the message's config must have a number {key!r}, got {value!r}.")
    return float(value)


class LocalTraining(ClientApp):
    """A ClientApp whose clients can train together where an engine asks for that."""

    train_ahead = staticmethod(train_ahead)


def make_app(mods: Sequence[Mod] | None = None) -> LocalTraining:
    """Return the ClientApp; `mods` default to a `CompressionMod` with its own defaults."""
    made = LocalTraining(mods=list(mods) if mods is not None else [CompressionMod()])
    made.train()(_train)
    made.evaluate()(_evaluate)
    made.query()(_query)
    return made


app = make_app()
