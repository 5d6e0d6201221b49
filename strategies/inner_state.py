"""What a Flower strategy has learnt over the rounds, taken out of it and put back: moments, momentum, clipping norms.

Flower's strategies have no such interface, so their attributes are read: numbers, texts, arrays, and dicts and lists of
them. Functions and classes are settings and stay; anything else is named, since a resumed training would miss it.
"""

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


class _Unknown(Exception):
    """A value of a type that cannot be stored."""


def capture(strategy: Strategy, prefix: str = "") -> tuple[dict[str, Any], Arrays]:
    """Return a strategy's attributes as plain JSON values, and the arrays that those refer to by name."""
    state: dict[str, Any] = {}
    arrays: Arrays = {}
    for name, value in vars(strategy).items():
        found: Arrays = {}
        try:
            state[name] = _pack(value, prefix + name, found)
        except _Unknown:
            continue
        arrays |= found
    return state, arrays


def forgotten(strategy: Strategy) -> list[str]:
    """Return the attributes that `capture` has to leave out, and that are no mere functions or classes."""
    left = sorted(set(vars(strategy)) - set(capture(strategy)[0]))
    return [name for name in left if not callable(getattr(strategy, name))]


def restore(strategy: Strategy, state: dict[str, Any], arrays: Arrays) -> None:
    """Undo `capture` on a strategy that was built in the same way."""
    for name, value in state.items():
        inner = getattr(strategy, name, None)
        if isinstance(inner, Strategy):
            restore(inner, value["strategy"], arrays)
        else:
            setattr(strategy, name, _unpack(value, arrays))


def _pack(value: Any, path: str, arrays: Arrays) -> dict[str, Any]:
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        arrays[path] = value
        return {"array": path}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        arrays[path] = np.asarray(value)
        return {"scalar": path}
    if isinstance(value, ArrayRecord):
        return {"record": _pack({name: array.numpy() for name, array in value.items()}, path, arrays)}
    if isinstance(value, Strategy):
        state, inner = capture(value, f"{path}/")
        arrays |= inner
        return {"strategy": state}
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        items = [[key, _pack(item, f"{path}/{key}", arrays)] for key, item in value.items()]
        return {"dict": items}
    if isinstance(value, list | tuple):
        packed = [_pack(item, f"{path}/{number}", arrays) for number, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": packed}
    raise _Unknown


def _unpack(node: dict[str, Any], arrays: Arrays) -> Any:
    ((kind, value),) = node.items()
    if kind == "plain":
        return value
    if kind == "array":
        return arrays[value].copy()
    if kind == "scalar":
        return arrays[value][()]
    if kind == "record":
        return ArrayRecord({name: Array(array) for name, array in _unpack(value, arrays).items()})
    if kind == "dict":
        return {key: _unpack(item, arrays) for key, item in value}
    items = [_unpack(item, arrays) for item in value]
    return tuple(items) if kind == "tuple" else items
