"""Everything that can be found wrong with a scenario before anything heavy starts."""

import inspect
import os
from functools import cache
from pathlib import Path
from typing import Any

from fedsparse.errors import ConfigError, unknown_name
from fedsparse.scenario.problems import about
from fedsparse.scenario.schema import Scenario

_SETS_BY_ITSELF = {"weighted_by_key", "arrayrecord_key", "configrecord_key"}


def validate_deep(scenario: Scenario) -> None:
    """Check names, specs, files, resources and the user's own modules, the quick checks first.

    Raises
    ------
    ConfigError, DataError
        The first thing that is wrong; the message begins with its key.
    """
    check_engine(scenario)
    check_specs(scenario)
    check_data_dir(scenario)
    from fedsparse.data import check_dataset

    with about(f"data.dataset = {scenario.data.dataset!r}"):
        check_dataset(scenario.data.dataset, scenario.data.data_dir)
    build_inner(scenario)
    from fedsparse.models import check_model
    from fedsparse.scenario.fleet import check_devices

    with about(f"model.name = {scenario.model.name!r}"):
        check_model(scenario.model.name)
    check_device(scenario)
    check_devices(scenario)


def check_data_dir(scenario: Scenario) -> None:
    """Refuse a data folder that is not there, which a data set found elsewhere would hide."""
    folder = scenario.data.data_dir
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"data.data_dir = {folder!r}: there is no such folder.")


def check_specs(scenario: Scenario) -> None:
    """Check compressor, partition and learning-rate schedule."""
    from clients.schedules import make_schedule
    from fedsparse.data.partition import make_partitioner
    from fedsparse.run.iterates import make_weights
    from strategies.policies import make_policy

    with about(f"compression.uplink = {scenario.compression.uplink!r}"):
        policy = make_policy(scenario.compression.uplink)
        if policy.needs_devices and scenario.devices.mix is None:
            raise ConfigError(f'{policy.name} needs simulated devices: set devices.mix, such as "phone-4g".')
    with about(f"data.partition = {scenario.data.partition!r}"):
        make_partitioner(scenario.data.partition)
    with about(f"train.lr_schedule = {scenario.train.lr_schedule!r}"):
        make_schedule(scenario.train.lr_schedule)
    with about(f"evaluation.iterate_average = {scenario.evaluation.iterate_average!r}"):
        make_weights(scenario.evaluation.iterate_average)
    compression = scenario.compression
    if compression.momentum_correction and not compression.error_memory:
        raise ConfigError("compression.momentum_correction needs compression.error_memory = true.")


@cache
def strategies() -> dict[str, Any]:
    """Return the Flower strategies that a scenario may name."""
    from flwr.serverapp import strategy as module

    classes = {name: getattr(module, name) for name in module.__all__}
    return {
        name: cls
        for name, cls in classes.items()
        if inspect.isclass(cls) and issubclass(cls, module.Strategy) and not inspect.isabstract(cls)
        # Wrappers around a strategy, and trees, which are no vector of parameters.
        if not name.startswith(("DifferentialPrivacy", "FedXgb"))
    }


def strategy_options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options that a scenario may give to a strategy."""
    parameters = inspect.signature(strategies()[name].__init__).parameters
    return {
        key: value
        for key, value in parameters.items()
        if key != "self" and key not in _SETS_BY_ITSELF and not key.endswith(("_fn", "_rule"))
    }


def build_inner(scenario: Scenario) -> Any:
    """Build the Flower strategy of a scenario.

    Raises
    ------
    ConfigError
        A strategy that does not exist, an option that it lacks, needs or refuses.
    """
    name, options = scenario.strategy.name, scenario.strategy.options
    if name not in strategies():
        from flwr.serverapp import strategy as module

        if name in module.__all__ and name.startswith(("DifferentialPrivacy", "FedXgb")):
            raise ConfigError(
                f"strategy.name = {name!r} cannot be used in a scenario: it wraps another strategy or exchanges trees. "
                f"Allowed: {', '.join(strategies())}."
            )
        with about(f"strategy.name = {name!r}"):
            raise unknown_name("strategy", name, strategies())
    known = strategy_options(name)
    for key in options:
        if key not in known:
            with about("strategy.options"):
                raise unknown_name(f"option of {name}:", key, known)
    needed = [
        key for key, value in known.items() if value.default is value.empty and value.kind is not value.VAR_KEYWORD
    ]
    if missing := [key for key in needed if key not in options]:
        raise ConfigError(f"strategy {name} needs strategy.options.{missing[0]}; its options: {', '.join(known)}.")
    for key, value in options.items():
        check_option(name, key, value, known[key])
    _check_sampling(scenario)
    if name == "FedProx" and scenario.train.proximal_mu and not options.get("proximal_mu"):
        raise ConfigError(
            f"train.proximal_mu = {scenario.train.proximal_mu:g} would go unheard: FedProx tells its clients its own. "
            "Set strategy.options.proximal_mu instead."
        )
    try:
        return strategies()[name](**options)
    except Exception as error:
        # The user's values, refused by Flower in whatever way it likes.
        raise ConfigError(f"strategy {name} refuses strategy.options = {options}: {error}") from error


def check_option(strategy: str, key: str, value: object, parameter: inspect.Parameter) -> None:
    """Refuse values of another type than the strategy's signature says: Flower would fail in the middle of a round."""
    wanted: Any = {int: int, float: (int, float), str: str}.get(parameter.annotation)
    if wanted is not None and (isinstance(value, bool) or not isinstance(value, wanted)):
        kind = parameter.annotation.__name__
        raise ConfigError(f"strategy.options.{key} = {value!r} of {strategy} must be of type {kind}.")


def _check_sampling(scenario: Scenario) -> None:
    options, total = scenario.strategy.options, scenario.data.num_clients
    for key in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
        if options.get(key, 0) > total:
            raise ConfigError(f"strategy.options.{key} = {options[key]} is more than data.num_clients = {total}.")
    for key in ("fraction_train", "fraction_evaluate"):
        if not 0.0 <= options.get(key, 1.0) <= 1.0:
            raise ConfigError(f"strategy.options.{key} = {options[key]} must be from 0 to 1.")


def check_engine(scenario: Scenario) -> None:
    """Check that the engine exists and that this machine has what it asks for."""
    from fedsparse.engine.resources import check_resources

    engine, clients = scenario.engine, scenario.data.num_clients
    if engine.min_clients is not None and engine.min_clients > clients:
        raise ConfigError(
            f"engine.min_clients = {engine.min_clients} is above data.num_clients = {clients}: no round could begin."
        )
    if engine.name == "deployment":
        from fedsparse.run.on_deployment import check_federation

        check_federation(scenario)
        return
    if engine.federation is not None:
        raise ConfigError(
            f"engine.federation is for engine 'deployment' only, not {engine.name!r}: add --engine deployment."
        )
    with about("engine"):
        check_resources(engine.num_cpus, engine.num_gpus)
    if engine.name == "flower" and engine.num_cpus != int(engine.num_cpus):
        raise ConfigError(f"engine.num_cpus = {engine.num_cpus}: engine 'flower' gives a client whole CPUs only.")
    if engine.address is not None and engine.name != "ray":
        raise ConfigError(f"engine.address = {engine.address!r} is for engine 'ray' only, not {engine.name!r}.")
    here = os.cpu_count() or 1
    if engine.name != "inline" and engine.address is None and engine.num_cpus > here:
        raise ConfigError(f"engine.num_cpus = {engine.num_cpus:g} is more than this machine has: {here} CPUs.")
    workers = min(engine.max_workers or 1, scenario.data.num_clients)
    if engine.name == "ray" and engine.address is None and workers * engine.num_cpus > here:
        raise ConfigError(
            f"engine.max_workers = {engine.max_workers} with engine.num_cpus = {engine.num_cpus:g} each are more than "
            f"this machine has: {here} CPUs. Lower one of them."
        )


def check_device(scenario: Scenario) -> None:
    """Check that a GPU is there where one is asked for."""
    import torch

    engine = scenario.engine
    if engine.address is not None or engine.name == "deployment":
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if engine.device == "cuda" and not gpus:
        raise ConfigError("engine.device = 'cuda': torch sees no GPU on this machine. Allowed here: auto, cpu.")
    if engine.name != "inline" and engine.num_gpus > gpus:
        raise ConfigError(f"engine.num_gpus = {engine.num_gpus:g} is more than this machine has: {gpus} GPUs.")
    if engine.device == "cuda" and engine.name != "inline" and engine.num_gpus == 0:
        raise ConfigError(
            "engine.device = 'cuda' needs a share of a GPU for each client: set engine.num_gpus, for example to 0.25."
        )
