"""What is wrong with a scenario, in words: the key, the value, what is allowed, the nearest valid name."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from fedsparse.errors import ConfigError, DataError
from fedsparse.scenario.schema import Scenario, Variant, all_keys, sections


def describe(error: ValidationError, values: Any, where: str) -> ConfigError:
    """Turn pydantic's report into one ConfigError that names every problem."""
    lines = list(dict.fromkeys(_line(item, values) for item in error.errors(include_url=False)))
    return several(where, lines)


def several(where: str, lines: list[str]) -> ConfigError:
    """Join the problems of one scenario into one error."""
    if len(lines) == 1:
        return ConfigError(f"{where}: {lines[0]}")
    return ConfigError(f"{where} has {len(lines)} problems:\n" + "\n".join(f"  - {line}" for line in lines))


@contextmanager
def about(key: str) -> Iterator[None]:
    """Name the key in whatever goes wrong while its value is checked."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"{key}: {error}") from error.__cause__


def unknown_key(key: str, allowed: set[str]) -> str:
    """Say that a key does not exist, which one was probably meant, and what its table has."""
    table, _, last = key.rpartition(".")
    leaves = {name: name.rpartition(".")[2] for name in sorted(all_keys())}
    near = [name for name, leaf in leaves.items() if leaf == last and name != key]
    near = near or get_close_matches(key, sorted(allowed), n=1, cutoff=0.6)
    near = near or [name for name, leaf in leaves.items() if get_close_matches(last, [leaf], cutoff=0.7)]
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if table in sections():
        allowed = {name for name in allowed if name.startswith(f"{table}.")}
    listed = ", ".join(sorted(allowed)) if len(allowed) < 20 else "see `fedsparse list keys`"
    return f"unknown key {key!r}.{hint} Allowed: {listed}."


def _line(item: Any, values: Any) -> str:
    path = tuple(part for part in item["loc"] if isinstance(part, int) or not _is_union_tag(part))
    given = item["input"]
    if len(path) > 2 and path[0] in sections() and item["type"] != "extra_forbidden":
        path = path[:2]  # a table of the user's own names: all of it is shown
        given = values[path[0]][path[1]]
    key = _dotted(path, values)
    if item["type"] == "extra_forbidden":
        return unknown_key(key, _siblings(path))
    if item["type"] == "missing":
        return f"{key} is missing: it must be {_allowed(path)}."
    if item["type"] == "literal_error":
        choices = _choices(path)
        near = get_close_matches(str(given), choices, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{key} = {given!r} is not allowed.{hint} Allowed: {', '.join(choices)}."
    return f"{key} = {given!r} is not allowed: it must be {_allowed(path)}."


def _is_union_tag(part: str) -> bool:
    """Whether pydantic put the name of a type between the keys, as in ('seeds', 'tuple[int, ...]', 0)."""
    known = {*Scenario.model_fields, *Variant.model_fields, *(key.rpartition(".")[2] for key in all_keys())}
    return part not in known and (
        "[" in part or part in ("int", "float", "str", "nullable", "constrained-float", "constrained-str")
    )


def _dotted(path: tuple[int | str, ...], values: Any) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    if len(path) > 1 and path[0] == "variant" and isinstance(path[1], int):
        name = values["variant"][path[1]].get("name")
        text += f" (variant {name!r})" if name else ""
    return text


def _field(path: tuple[int | str, ...]) -> Any:
    names = [part for part in path if isinstance(part, str)]
    if names[0] == "variant" and len(names) > 1:
        return Variant.model_fields[names[1]]
    if names[0] in sections() and len(names) > 1:
        return sections()[names[0]].model_fields[names[1]]
    return Scenario.model_fields[names[0]]


def _allowed(path: tuple[int | str, ...]) -> str:
    return str(_field(path).description)


def _choices(path: tuple[int | str, ...]) -> list[str]:
    annotation = _field(path).annotation
    options = get_args(annotation) if get_origin(annotation) is not None else ()
    return sorted(str(option) for option in options)


def _siblings(path: tuple[int | str, ...]) -> set[str]:
    table = str(path[0])
    if len(path) > 1 and table in sections():
        return {f"{table}.{name}" for name in sections()[table].model_fields}
    return set(Scenario.model_fields)
