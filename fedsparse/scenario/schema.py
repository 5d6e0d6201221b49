"""The sections and keys of a scenario file.

Every key's description says what is allowed, in the words that an error message uses.
"""

import json
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, Strict

PositiveInt = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
EngineName = Literal["inline", "ray", "flower", "deployment"]
FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"


class Section(BaseModel):
    """A table of a scenario file: unknown keys and wrong types are refused, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Data(Section):
    """Which data, and how it is split over the clients."""

    dataset: Text = Field(description='a data set\'s name such as "fashion-mnist", or "package.module:callable"')
    data_dir: Text | None = Field(default=None, description="the folder that holds the data set's files")
    num_clients: PositiveInt = Field(description="a whole number of at least 1")
    partition: Text = Field(default="iid", description='a partition such as "dirichlet(alpha=0.1)"')


class Model(Section):
    """Which model."""

    name: Text = Field(description='a model\'s name such as "cnn", or "package.module:callable"')


class Train(Section):
    """Local training, and how many clients take part in a round."""

    local_epochs: PositiveInt | None = Field(
        default=None, description="a whole number of at least 1, instead of local_steps"
    )
    local_steps: PositiveInt | None = Field(
        default=None, description="a whole number of at least 1, instead of local_epochs"
    )
    batch_size: PositiveInt = Field(default=32, description="a whole number of at least 1")
    lr: Positive = Field(description="a number above 0")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="a number from 0 up to, not including, 1")
    weight_decay: NotNegative = Field(default=0.0, description="a number of at least 0")
    lr_schedule: Text = Field(default="constant", description="a learning-rate schedule")
    proximal_mu: NotNegative = Field(default=0.0, description="a number of at least 0")
    clip_norm: Positive | None = Field(default=None, description="a number above 0: the largest gradient norm")
    clients_per_round: PositiveInt | None = Field(
        default=None, description="a whole number from 1 to data.num_clients; without it, all clients"
    )


class Strategy(Section):
    """The Flower strategy that aggregates."""

    name: Text = Field(default="FedAvg", description="a class of flwr.serverapp.strategy")
    weighting: Literal["num_examples", "uniform"] = Field(
        default="num_examples", description='"num_examples" or "uniform"'
    )
    max_update_norm: Positive | None = Field(
        default=None, description="a number above 0: an update with a larger L2 norm is rejected"
    )
    options: dict[str, Any] = Field(default={}, description="a table of options for the strategy's constructor")


class Compression(Section):
    """How clients compress their updates."""

    uplink: Text = Field(default="none", description='a compressor such as "topk(density=0.01)|sign", or a policy')
    error_memory: bool = Field(default=True, description="true or false")
    momentum_correction: float = Field(
        default=0.0, ge=0, lt=1, description="a number from 0 up to, not including, 1: momentum before sparsification"
    )
    memory_dtype: Literal["float32", "float16"] = Field(
        default="float32", description='"float32" or "float16": how the error memory lies on the disk'
    )


class Devices(Section):
    """Simulated devices on a virtual clock; without a mix there is none."""

    mix: Text | dict[str, Positive] | None = Field(
        default=None, description='a device profile such as "phone-4g", or a table of profiles and their shares'
    )
    profile: dict[str, dict[str, Any]] = Field(
        default={},
        description="tables [devices.profile.NAME] with gflops, up_mbit, down_mbit, ..., or like = a profile",
    )
    compute_sigma: float = Field(default=0.0, ge=0, le=3, description="a number from 0 to 3: spread of log speeds")
    network_sigma: float = Field(default=0.0, ge=0, le=3, description="a number from 0 to 3: spread of log bandwidths")
    availability: Text = Field(
        default="always", description='when clients are there, such as "probability(p=0.8)" or "periodic(on=0.33)"'
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="a number from 0 up to, not including, 1")
    deadline: Positive | None = Field(
        default=None, description="virtual seconds above 0: what is not there by then is not accepted"
    )
    over_select: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="a number of at least 0: the fraction of clients asked beyond those wanted",
    )
    partial_work: bool = Field(
        default=False, description="true or false: slow devices take as many steps as they can before the deadline"
    )


class Evaluation(Section):
    """What is measured of the global model, and when."""

    every: PositiveInt = Field(
        default=1, description="a whole number of at least 1: rounds between evaluations; the last round always has one"
    )
    objective: bool = Field(
        default=False, description="true or false: also the regularised loss over all training examples"
    )
    iterate_average: Text = Field(
        default="none",
        description='"none", "uniform" or "quadratic(a=100)": which average of the rounds\' models counts',
    )


class Engine(Section):
    """What the clients run on."""

    name: EngineName = Field(default="ray", description=", ".join(get_args(EngineName)))
    num_cpus: Positive = Field(default=1.0, description="a number above 0: the CPUs of one client")
    num_gpus: NotNegative = Field(
        default=0.0, description="a number of at least 0: the GPUs of one client; may be a fraction"
    )
    max_workers: PositiveInt | None = Field(
        default=None, description="a whole number of at least 1: the clients that run at the same time"
    )
    address: Text | None = Field(default=None, description="the address of a running Ray cluster")
    federation: Text | None = Field(
        default=None, description="the folder of a federation of real devices, made by `fedsparse deploy init`"
    )
    min_clients: PositiveInt | None = Field(
        default=None,
        description="a whole number of at least 1: the clients that must be connected before a round begins; without "
        "it, as many as a round takes, and all of them before the first round",
    )
    timeout: Positive | None = Field(
        default=None, description="a number of seconds above 0: the longest a round may wait"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description='"auto", "cpu" or "cuda"')
    num_threads: PositiveInt = Field(
        default=1, description="a whole number of at least 1: the torch threads of one client"
    )
    max_retries: Annotated[int, Field(ge=0)] = Field(
        default=2, description="a whole number of at least 0: further tries of a client whose worker died"
    )
    checkpoint: bool = Field(
        default=True, description="true or false: write after each round what --resume needs to go on after it"
    )


class Variant(Section):
    """One of the settings that a comparison runs: a name, and the keys that differ."""

    name: str = Field(pattern=FILE_NAME, max_length=80, description="a name that is also a valid folder name")
    overrides: dict[str, Any] = Field(default={}, description="keys of the scenario, such as compression.uplink")


class Scenario(Section):
    """A whole experiment: everything that its results depend on."""

    name: str = Field(pattern=FILE_NAME, max_length=80, description="a name that is also a valid folder name")
    description: str = Field(default="", description="a sentence on what the scenario is for")
    seed: int = Field(default=0, ge=0, lt=2**63, description="a whole number of at least 0")
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...] | None, Strict(False)] = Field(
        default=None, min_length=1, description="a list of different whole numbers of at least 0, for compare"
    )
    rounds: PositiveInt = Field(description="a whole number of at least 1")
    target_accuracy: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="a number above 0, at most 1: the accuracy at which bytes and rounds are counted",
    )
    data: Data = Field(description="a table")
    model: Model = Field(description="a table")
    train: Train = Field(description="a table")
    strategy: Strategy = Field(default=Strategy(), description="a table")
    compression: Compression = Field(default=Compression(), description="a table")
    devices: Devices = Field(default=Devices(), description="a table")
    evaluation: Evaluation = Field(default=Evaluation(), description="a table")
    engine: Engine = Field(default=Engine(), description="a table")
    variant: tuple[Variant, ...] = Field(default=(), description="tables [[variant]], each with a name", strict=False)

    def job(self, **facts: Any) -> str:
        """Return what a client must know, as the JSON text that travels in every train message.

        Parameters
        ----------
        **facts
            More about the data: ``input_shape`` and ``num_classes``, for devices that bring their own.
        """
        data, train = self.data, self.train
        local = train.model_dump(exclude={"clients_per_round"})
        return json.dumps(
            {
                "seed": self.seed,
                "data": {
                    "dataset": data.dataset,
                    "data_dir": data.data_dir,
                    "num_clients": data.num_clients,
                    "partition": data.partition,
                    **facts,
                },
                "model": {"name": self.model.name},
                "train": {**local, "rounds": self.rounds},
                "device": self.engine.device,
                "num_threads": self.engine.num_threads,
            },
            sort_keys=True,
        )


def sections() -> dict[str, type[Section]]:
    """Return the tables of a scenario file by name."""
    found = {}
    for name, field in Scenario.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found[name] = field.annotation
    return found


def all_keys() -> dict[str, Any]:
    """Return every dotted key with its pydantic field: what `--set` and variants may name."""
    keys: dict[str, Any] = {}
    tables = sections()
    for name, field in Scenario.model_fields.items():
        if name in tables:
            keys.update({f"{name}.{inner}": entry for inner, entry in tables[name].model_fields.items()})
        elif name != "variant":
            keys[name] = field
    return keys
