"""What a client is asked to do: the part of a scenario that concerns it, as JSON in the train message."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from clients.schedules import make_schedule
from fedsparse.compression.base import check_number, check_whole
from fedsparse.errors import ConfigError, unknown_name

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class TrainSettings:
    """Local training: exactly one of `local_epochs` and `local_steps` (H); no more than `max_steps` in any case.

    Raises
    ------
    ConfigError
        Impossible values.
    """

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
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if (self.local_epochs is None) == (self.local_steps is None):
            raise ConfigError(
                f"train needs exactly one of local_epochs and local_steps, got {self.local_epochs} and "
                f"{self.local_steps}."
            )
        for key in ("local_epochs", "local_steps", "batch_size", "rounds", "max_steps"):
            if getattr(self, key) is not None:
                check_whole("train", key, getattr(self, key), 1)
        check_number("train", "lr", self.lr, 0.0, float("inf"), open_low=True)
        for key in ("weight_decay", "proximal_mu"):
            check_number("train", key, getattr(self, key), 0.0, float("inf"))
        check_number("train", "momentum", self.momentum, 0.0, 1.0)
        if self.clip_norm is not None:
            check_number("train", "clip_norm", self.clip_norm, 0.0, float("inf"), open_low=True)
        make_schedule(self.lr_schedule)


@dataclass(frozen=True)
class Job:
    """Data, model and training of one run; hashable, so that a worker builds each thing once.

    `input_shape` and `num_classes` are what the model takes, for devices that bring their own data.
    """

    seed: int
    dataset: str
    data_dir: str | None
    num_clients: int
    partition: str
    model: str
    train: TrainSettings
    device: str = "auto"
    num_threads: int = 1
    input_shape: tuple[int, ...] | None = None
    num_classes: int | None = None

    def __post_init__(self) -> None:
        check_whole("job", "num_clients", self.num_clients, 1)
        check_whole("job", "num_threads", self.num_threads, 1)
        if self.device not in DEVICES:
            raise unknown_name("device", self.device, DEVICES)


@lru_cache(maxsize=8)
def parse_job(text: str) -> Job:
    """Read a job.

    Raises
    ------
    ConfigError
        Text that is no job (another version of the server's side, most likely), or impossible values.
    """
    try:
        raw: dict[str, Any] = json.loads(text)
        data, train = raw["data"], dict(raw["train"])
        if raw.get("clip_norm") is not None:
            train.setdefault("clip_norm", raw["clip_norm"])
        _refuse_unknown(train)
        return Job(
            seed=int(raw["seed"]),
            dataset=str(data["dataset"]),
            data_dir=data.get("data_dir"),
            num_clients=data["num_clients"],
            partition=str(data["partition"]),
            model=str(raw["model"]["name"]),
            train=TrainSettings(**train),
            device=str(raw.get("device", "auto")),
            num_threads=raw.get("num_threads", 1),
            input_shape=tuple(int(n) for n in data["input_shape"]) if "input_shape" in data else None,
            num_classes=int(data["num_classes"]) if "num_classes" in data else None,
        )
    except ConfigError as error:
        raise ConfigError(f"the server's job: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the server's job cannot be read ({error!r}): are both sides of the same version?") from None


def _refuse_unknown(train: Mapping[str, Any]) -> None:
    """A setting that this version would silently ignore changes what is learnt."""
    known = {f.name for f in fields(TrainSettings)}
    for key in train:
        if key not in known:
            raise unknown_name("train setting (are both sides of the same version?)", key, known)
