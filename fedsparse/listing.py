"""What `fedsparse list` knows."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from fedsparse.errors import FedsparseError, unknown_name

Table = tuple[list[str], list[list[Any]]]


def operators() -> Table:
    """Compressors, what they are made of, and policies that change them from round to round."""
    from fedsparse.compression import QUANTIZERS, SPARSIFIERS
    from strategies.policies import POLICIES

    registered: list[tuple[str, dict[str, Any]]] = [("sparsifier", {**SPARSIFIERS}), ("quantizer", {**QUANTIZERS})]
    lines = []
    for kind, registry in registered:
        for name, operator in sorted(registry.items()):
            lines.append([name, kind, operator.summary, operator.examples[0], operator.source])
    example = "piecewise(topk(density=0.01)|sign)"
    lines.append(["piecewise", "wrapper", "a compressor on each tensor by itself", example, ""])
    for name, policy in sorted(POLICIES.items()):
        lines.append([name, "policy", policy.summary, policy.examples[0], policy.source])
    return ["name", "kind", "what it does", "example", "source"], lines


def scenarios() -> Table:
    """Scenarios that can be named without a path."""
    from fedsparse.scenario import load, shipped

    lines = []
    for name, path in sorted(shipped().items()):
        try:
            scenario = load(path)
            size = ", ".join(
                [
                    _count(scenario.data.num_clients, "client"),
                    _count(scenario.rounds, "round"),
                    _count(len(scenario.variant), "variant"),
                ]
            )
            lines.append([name, size, scenario.description])
        except FedsparseError as error:
            lines.append([name, "cannot be read", str(error)])
    return ["name", "size", "what it is for"], lines


def datasets() -> Table:
    """Data sets, and whether they are on this machine."""
    from fedsparse.data import DATASETS, check_dataset

    lines = []
    for name, load in sorted(DATASETS.items()):
        try:
            check_dataset(name)
            there = "yes"
        except FedsparseError:
            there = "no (a run that names it says how to get it)"
        lines.append([name, there, _first_line(load)])
    lines.append(["package.module:callable", "", "your own: returns (x_train, y_train, x_test, y_test) or a Dataset"])
    return ["name", "on this machine", "what it is"], lines


def models() -> Table:
    """Models."""
    from fedsparse.models import MODELS

    lines = [[name, getattr(model, "summary", _first_line(model))] for name, model in sorted(MODELS.items())]
    lines.append(["package.module:callable", "your own: callable(input_shape, num_classes) returns a torch module"])
    return ["name", "what it is"], lines


def partitions() -> Table:
    """Ways to divide the training examples among clients."""
    from fedsparse.data import PARTITIONS

    return ["name", "options", "what it is"], [
        [name, _options(cls), cls.summary] for name, cls in sorted(PARTITIONS.items())
    ]


def devices() -> Table:
    """Device profiles, and when devices are there."""
    from fedsparse.devices import AVAILABILITY, PROFILES

    lines = [
        [
            p.name,
            f"{p.gflops:g}",
            f"{p.up_mbit:g} / {p.down_mbit:g}",
            f"{1000 * p.latency_s:g}",
            f"{p.memory_mb:g}",
            p.source,
        ]
        for p in PROFILES.values()
    ]
    lines += [[name, "", "", "", "", f"availability: {cls.summary}"] for name, cls in AVAILABILITY.items()]
    return ["name", "GFLOP/s", "Mbit/s up / down", "latency ms", "MB", "source"], lines


def schedules() -> Table:
    """Learning-rate schedules."""
    from clients.schedules import SCHEDULES

    return ["name", "options", "what it is"], [
        [name, _options(cls), _first_line(cls)] for name, cls in sorted(SCHEDULES.items())
    ]


def strategies() -> Table:
    """Flower strategies that a scenario may name."""
    from fedsparse.scenario.checks import strategies as known
    from fedsparse.scenario.checks import strategy_options

    return ["name", "options in [strategy.options]", "what it is"], [
        [
            name,
            ", ".join(key for key in strategy_options(name) if not key.startswith(("min_", "fraction_"))),
            _first_line(cls),
        ]
        for name, cls in sorted(known().items())
    ]


def keys() -> Table:
    """Every key of a scenario file."""
    from pydantic_core import PydanticUndefined

    from fedsparse.scenario import all_keys

    lines = []
    for name, field in all_keys().items():
        default = "" if field.default is None else "required" if field.default is PydanticUndefined else field.default
        lines.append([name, default, field.description])
    return ["key", "default", "allowed"], lines


LISTS: dict[str, Callable[[], Table]] = {
    "scenarios": scenarios,
    "operators": operators,
    "datasets": datasets,
    "partitions": partitions,
    "devices": devices,
    "models": models,
    "strategies": strategies,
    "schedules": schedules,
    "keys": keys,
}


def table(name: str) -> Table:
    """Return one list by its name."""
    if name not in LISTS:
        raise unknown_name("list", name, LISTS)
    return LISTS[name]()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _options(cls: Any) -> str:
    return ", ".join(f"{entry.name}" for entry in fields(cls) if entry.init) if is_dataclass(cls) else ""
