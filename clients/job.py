"""What a client is asked to do: the part of a scenario that concerns it, as JSON in the train message."""

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from fedsparse.errors import ConfigError


@dataclass(frozen=True)
class TrainSettings:
    """Local training: exactly one of `local_epochs` and `local_steps` (H)."""

    local_epochs: int | None = 1
    local_steps: int | None = None
    batch_size: int = 32
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_schedule: str = "constant"
    proximal_mu: float = 0.0
    clip_norm: float | None = None
    rounds: int = 1


@dataclass(frozen=True)
class Job:
    """Data, model and training of one run; hashable, so that a worker builds each thing once."""

    seed: int
    dataset: str
    data_dir: str | None
    num_clients: int
    partition: str
    model: str
    train: TrainSettings
    device: str = "auto"
    num_threads: int = 1


@lru_cache(maxsize=8)
def parse_job(text: str) -> Job:
    """Read a job; the scenario was checked where it was written, so anything odd here is a version mismatch."""
    try:
        raw: dict[str, Any] = json.loads(text)
        data, model, train = raw["data"], raw["model"], raw["train"]
        known = {f.name for f in fields(TrainSettings)}
        return Job(
            seed=int(raw["seed"]),
            dataset=str(data["dataset"]),
            data_dir=data.get("data_dir"),
            num_clients=int(data["num_clients"]),
            partition=str(data["partition"]),
            model=str(model["name"]),
            train=TrainSettings(**{key: value for key, value in train.items() if key in known}),
            device=str(raw.get("device", "auto")),
            num_threads=int(raw.get("num_threads", 1)),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the server's job cannot be read ({error!r}): are both sides of the same version?") from None
