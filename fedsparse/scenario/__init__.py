"""Scenarios: what an experiment is, read from TOML and checked before anything starts."""

from fedsparse.scenario.checks import validate_deep
from fedsparse.scenario.loading import (
    apply_overrides,
    choose_variant,
    expand,
    find,
    from_dict,
    from_toml,
    load,
    shipped,
    to_toml,
)
from fedsparse.scenario.schema import Scenario, all_keys

__all__ = [
    "Scenario",
    "all_keys",
    "apply_overrides",
    "choose_variant",
    "expand",
    "find",
    "from_dict",
    "from_toml",
    "load",
    "shipped",
    "to_toml",
    "validate_deep",
]
