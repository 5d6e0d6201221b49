"""Compressors that the server changes from round to round."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import cast

from fedsparse.compression import QUANTIZERS, SPARSIFIERS, Compressor
from fedsparse.compression.operators.hard_threshold import HardThreshold
from fedsparse.errors import ConfigError, unknown_name
from fedsparse.spec import Stage, build, format_pipeline, parse_pipeline
from strategies.policies.base import POLICIES, Plan, Policy, register_policy
from strategies.policies.budget import Budget
from strategies.policies.constant import Constant
from strategies.policies.density import Accordion, Warmup
from strategies.policies.step_aware import StepAware

__all__ = [
    "POLICIES",
    "Accordion",
    "Budget",
    "Constant",
    "Plan",
    "Policy",
    "StepAware",
    "Warmup",
    "make_policy",
    "register_policy",
]


def make_policy(spec: str) -> Policy:
    """Build what a compressor spec stands for on the server.

    Parameters
    ----------
    spec : str
        A compressor, which is then the same in every round; or a policy around one, such as
        ``"warmup(topk(density=0.001), rounds=4)"``; or ``"hard_threshold(budget='20MB')"``.

    Raises
    ------
    ConfigError
        Unknown names or options, impossible values.
    """
    stages = parse_pipeline(spec)
    first = stages[0]
    if first.name == "hard_threshold" and "budget" in first.options:
        return _budget(first, stages[1:])
    wrappers = {name: cls for name, cls in POLICIES.items() if cls is not Budget}
    if first.name not in wrappers:
        _check_names(first, wrappers)
        return Constant(Compressor.from_spec(spec))
    example = wrappers[first.name].examples[0]
    if len(stages) > 1:
        raise ConfigError(f"a quantizer belongs inside {first.name}(...), as in {example}; got {spec!r}.")
    if len(first.args) != 1:
        raise ConfigError(f"{first.name} takes one compressor and its options, as in {example}; got {spec!r}.")
    base = Compressor.from_spec(format_pipeline(first.args[0]))
    factories = cast(Mapping[str, Callable[..., Policy]], wrappers)
    return build(Stage(first.name, options=first.options), factories, "policy", base=base)


def _check_names(first: Stage, wrappers: Mapping[str, object]) -> None:
    """Name the nearest valid name among compressors and policies together, which a compressor alone cannot know of."""
    names = [*SPARSIFIERS, *QUANTIZERS, "piecewise", *wrappers]
    if first.name not in names:
        raise unknown_name("operator or policy", first.name, names)
    if first.name == "hard_threshold":
        options = [entry.name for cls in (HardThreshold, Budget) for entry in fields(cls) if entry.init]
        options.remove("base")
        for key in first.options:
            if key not in options:
                raise unknown_name("option of hard_threshold(...):", key, options)


def _budget(first: Stage, rest: tuple[Stage, ...]) -> Policy:
    tail = Compressor.from_spec(format_pipeline((Stage("hard_threshold", options={"lam": 1.0}), *rest)))
    factories = cast(Mapping[str, Callable[..., Policy]], {"hard_threshold": Budget})
    return build(first, factories, "policy", base=tail)
