"""Compressors that the server changes from round to round."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import cast

from fedsparse.compression import QUANTIZERS, SPARSIFIERS, Compressor
from fedsparse.compression.operators.hard_threshold import HardThreshold
from fedsparse.errors import ConfigError, unknown_name
from fedsparse.spec import Stage, build, format_pipeline, parse_pipeline
from strategies.policies.balanced import Balanced
from strategies.policies.base import POLICIES, Plan, Policy, register_policy
from strategies.policies.budget import Budget
from strategies.policies.constant import Constant
from strategies.policies.density import Accordion, Warmup
from strategies.policies.step_aware import StepAware

__all__ = [
    "POLICIES",
    "Accordion",
    "Balanced",
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
    _refuse_nested(stages, spec)
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


def _refuse_nested(stages: Sequence[Stage], spec: str) -> None:
    """Refuse a policy inside a policy or inside `piecewise`: one thing decides for the whole update."""
    inner = [stage for outer in stages for pipeline in outer.args for stage in pipeline]
    if any(stage.name == "hard_threshold" and "budget" in stage.options for stage in inner):
        raise ConfigError(f"hard_threshold(budget=...) decides for the whole update and stands alone; got {spec!r}.")
    for stage in inner:
        if stage.name in POLICIES and stage.name != Budget.name:
            example = POLICIES[stage.name].examples[0]
            raise ConfigError(f"{stage.name} is a policy and must be outermost, as in {example}; got {spec!r}.")


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
    if double := {"lam", "density", "k", "at_most"} & set(first.options):
        raise ConfigError(
            f"hard_threshold(budget=...) finds the threshold itself: leave out {', '.join(sorted(double))}."
        )
    tail = Compressor.from_spec(format_pipeline((Stage("hard_threshold", options={"lam": 1.0}), *rest)))
    factories = cast(Mapping[str, Callable[..., Policy]], {"hard_threshold": Budget})
    return build(first, factories, "policy", base=tail)
