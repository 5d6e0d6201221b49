"""What a data set is, and the checks that the user's own must pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsparse.errors import ConfigError, DataError

Array = NDArray[Any]
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


def from_user(name: str, load: Callable[[], object]) -> Dataset:
    """Call the user's function and refuse data that would fail later, far from its cause.

    Raises
    ------
    ConfigError
        Where the function raises, or returns something else than a data set.
    DataError
        Where the arrays are no data set for classification.
    """
    try:
        made = load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"data set {name!r} raised {type(error).__name__}: {error}") from error
    if isinstance(made, Dataset):
        raw, scale, groups, classes = made, made.scale, made.groups, made.num_classes
        parts: tuple[Any, ...] = (raw.x_train, raw.y_train, raw.x_test, raw.y_test)
    elif isinstance(made, tuple | list) and len(made) == 4:
        parts, scale, groups, classes = tuple(made), 1.0, None, None
    else:
        found = f"a {type(made).__name__}" + (f" of {len(made)}" if isinstance(made, tuple | list) else "")
        raise ConfigError(
            f"data set {name!r} must return a Dataset or (x_train, y_train, x_test, y_test), got {found}."
        )
    x, y, x_test, y_test = (_as_array(name, part) for part in parts)
    for which, features, labels in (("train", x, y), ("test", x_test, y_test)):
        _check_part(name, which, features, labels)
    if x.shape[1:] != x_test.shape[1:]:
        raise DataError(f"data set {name!r}: train examples {x.shape[1:]} and test examples {x_test.shape[1:]} differ.")
    top = int(max(y.max(), y_test.max()))
    classes = _check_classes(name, classes, top)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not np.isfinite(scale):
        raise DataError(f"data set {name!r}: scale must be a finite number, got {scale!r}.")
    if groups is not None and np.shape(groups) != y.shape:
        raise DataError(
            f"data set {name!r}: groups {np.shape(groups)} must name a client for each of {y.size} examples."
        )
    groups = None if groups is None else _as_array(name, groups)
    return Dataset(name, x, y.astype(np.int64), x_test, y_test.astype(np.int64), classes, float(scale), groups)


def _as_array(name: str, part: object) -> Array:
    try:
        return np.asarray(part)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"data set {name!r}: a {type(part).__name__} is no array: {error}") from None


def _check_part(name: str, which: str, x: Array, y: Array) -> None:
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or not x.size:
        raise DataError(
            f"data set {name!r}: {which} features {x.shape} and labels {y.shape} do not fit together; wanted are "
            "(n, ...) and (n,), with n at least 1."
        )
    if x.dtype.kind not in "fiub" or y.dtype.kind not in "iu":
        raise DataError(f"data set {name!r}: {which} needs numbers and whole labels, got {x.dtype} and {y.dtype}.")
    if int(y.min()) < 0:
        raise DataError(f"data set {name!r}: {which} labels must be 0 to num_classes - 1, one is {int(y.min())}.")
    if x.dtype.kind == "f":
        for start in range(0, len(x), _CHUNK):
            with np.errstate(over="ignore"):
                finite = np.isfinite(x[start : start + _CHUNK].astype(np.float32)).all()
            if not finite:
                raise DataError(f"data set {name!r}: {which} features hold NaN, infinity or numbers beyond float32.")


def _check_classes(name: str, classes: object, top: int) -> int:
    if classes is None:
        return top + 1
    if isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 1:
        raise DataError(f"data set {name!r}: num_classes must be a whole number of at least 1, got {classes!r}.")
    if top >= classes:
        raise DataError(f"data set {name!r}: labels must be 0 to {classes - 1}, one is {top}.")
    return int(classes)
