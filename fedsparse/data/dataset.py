"""What a data set is, and the checks that the user's own must pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsparse.errors import ConfigError, DataError, cause

Array = NDArray[Any]
MOST_CLASSES = 10_000_000  # a label beyond is an id or a measurement; a model for so many does not fit anywhere
_LARGEST = float(np.finfo(np.float32).max)
_NUMBER = (int, float, np.integer, np.floating)
_CHUNK = 4096  # examples that are checked at once: a memory map larger than RAM must pass, too


@dataclass(frozen=True)
class Dataset:
    """A classification data set.

    Parameters
    ----------
    name : str
    x_train, x_test : arrays, shape (n, ...)
        Features; images are channel first. Kept in their own type and, where they are memory maps, on disk; a model's
        input is ``float32(x) * scale``.
    y_train, y_test : arrays of int64, shape (n,)
        Labels 0 .. num_classes - 1.
    num_classes : int
    scale : float
    groups : array, shape (n,), optional
        The natural client of each training example, for the partition `natural`.
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    num_classes: int
    scale: float = 1.0
    groups: Array | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.x_train.shape[1:])


def from_user(name: str, load: Callable[[], object], kind: str = "data set", *, own: bool = False) -> Dataset:
    """Call the user's function and refuse data that would fail later, far from its cause.

    Parameters
    ----------
    name : str
    load : callable
    kind : str
        What an error calls it.
    own : bool
        Whether (x, y), too, is a data set: a device's own, with its first example in place of those for testing.

    Raises
    ------
    ConfigError
        Where the function raises, or returns something else than a data set.
    DataError
        Where the arrays are no data set for classification.
    """
    where = f"{kind} {name!r}"
    wanted = "(x, y) or a Dataset" if own else "a Dataset or (x_train, y_train, x_test, y_test)"
    try:
        made = load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{where} raised {cause(error)}. It is called without arguments and must return {wanted}."
        ) from error
    scale, groups, classes = 1.0, None, None
    if isinstance(made, Dataset):
        scale, groups, classes = made.scale, made.groups, made.num_classes
        parts: tuple[Any, ...] = (made.x_train, made.y_train, made.x_test, made.y_test)
    elif isinstance(made, tuple | list) and len(made) in ((2, 4) if own else (4,)):
        parts = tuple(made)
    else:
        found = f"a {type(made).__name__}" + (f" of {len(made)}" if isinstance(made, tuple | list) else "")
        raise ConfigError(f"{where} must return {wanted}, got {found}.")
    x, y, *rest = (_as_array(where, part) for part in parts)
    _check_part(where, "train", x, y)
    x_test, y_test = rest or (x[:1], y[:1])
    _check_part(where, "test", x_test, y_test)
    if x.shape[1:] != x_test.shape[1:]:
        raise DataError(f"{where}: train examples {x.shape[1:]} and test examples {x_test.shape[1:]} differ.")
    classes = _check_classes(where, classes, int(max(y.max(), y_test.max())))
    if isinstance(scale, bool) or not isinstance(scale, _NUMBER) or not abs(scale) <= _LARGEST:
        raise DataError(f"{where}: scale must be a finite number, got {scale!r}.")
    if groups is not None:
        groups = _as_array(where, groups)
        if groups.shape != y.shape:
            raise DataError(f"{where}: groups {groups.shape} must name a client for each of {y.size} examples.")
    return Dataset(name, x, y.astype(np.int64), x_test, y_test.astype(np.int64), classes, float(scale), groups)


def _as_array(where: str, part: object) -> Array:
    try:
        return np.asarray(part)
    except Exception as error:  # whatever the user's own type raises
        raise DataError(f"{where}: a {type(part).__name__} is no array: {cause(error)}") from None


def _check_part(where: str, which: str, x: Array, y: Array) -> None:
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y):
        hint = " A single column of labels is y[:, 0], one-hot ones are y.argmax(axis=1)." if y.ndim == 2 else ""
        raise DataError(
            f"{where}: {which} features {x.shape} and labels {y.shape} do not fit together; wanted are "
            f"(n, ...) and (n,), with n at least 1.{hint}"
        )
    if not x.size:
        raise DataError(f"{where}: {which} features are {x.shape}: wanted are an example at least, and a number in it.")
    if x.dtype.kind not in "fiub" or y.dtype.kind not in "iu":
        hint = " Labels become integers with y.astype(np.int64)." if y.dtype.kind in "fb" else ""
        raise DataError(f"{where}: {which} needs numbers and whole labels, got {x.dtype} and {y.dtype}.{hint}")
    if int(y.min()) < 0:
        raise DataError(f"{where}: {which} labels must be 0 to num_classes - 1, one is {int(y.min())}.")
    if int(y.max()) >= MOST_CLASSES:
        raise DataError(f"{where}: {which} labels must be 0 to {MOST_CLASSES - 1} at most, one is {int(y.max())}.")
    if x.dtype.kind == "f":
        for start in range(0, len(x), _CHUNK):
            with np.errstate(over="ignore"):
                finite = np.isfinite(x[start : start + _CHUNK].astype(np.float32)).all()
            if not finite:
                raise DataError(f"{where}: {which} features hold NaN, infinity or numbers beyond float32.")


def _check_classes(where: str, classes: object, top: int) -> int:
    if classes is None:
        return top + 1
    if isinstance(classes, bool) or not isinstance(classes, int | np.integer) or not 1 <= classes <= MOST_CLASSES:
        raise DataError(f"{where}: num_classes must be a whole number from 1 to {MOST_CLASSES}, got {classes!r}.")
    if top >= classes:
        raise DataError(f"{where}: labels must be 0 to {classes - 1}, one is {top}.")
    return int(classes)
