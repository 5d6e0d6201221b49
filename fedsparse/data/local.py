"""A device's own data: examples and labels from a file, a folder, or the user's function."""

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsparse.data.dataset import Dataset, from_user
from fedsparse.data.idx import mapped
from fedsparse.errors import ConfigError, DataError
from fedsparse.userobject import load_object

Array = NDArray[Any]

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
_KINDS = (
    "a folder with two IDX files (*-images-idx3-ubyte and *-labels-idx1-ubyte, plain or .gz), an .npz file with arrays "
    "x and y, a .csv file with a column 'label', a folder of images with one folder for each class, or "
    '"package.module:callable" that returns (x, y) or a Dataset'
)


def load_local(source: str, input_shape: tuple[int, ...] | None = None, num_classes: int | None = None) -> Dataset:
    """Load what one device trains on; every example counts for training, none for testing.

    Parameters
    ----------
    source : str
        A path, or ``package.module:callable``.
    input_shape : tuple of int, optional
        What the model takes; rows of a .csv file, and single images without a channel, are brought into this shape.
    num_classes : int, optional
        What the model tells apart.

    Raises
    ------
    ConfigError, DataError
        Nothing there, not one of the known kinds, damaged, or not what the model takes.
    """
    name, scale = f"data.source = {source!r}", None
    if ":" in source and not Path(source).exists():
        made = load_object(source, "data source")
        dataset = from_user(source, lambda: _as_dataset(made))
    else:
        x, y = _read(Path(source), name)
        scale = 1 / 255 if x.dtype == np.uint8 else 1.0
        dataset = from_user(source, lambda: (x, y, x[:1], y[:1]))
        dataset = replace(dataset, scale=scale)
    return _fit(dataset, name, input_shape, num_classes)


def _as_dataset(made: Callable[[], object]) -> object:
    found = made()
    if isinstance(found, tuple | list) and len(found) == 2:
        x, y = (np.asarray(part) for part in found)
        return x, y, x[:1], y[:1]
    return found


def _read(path: Path, name: str) -> tuple[Array, Array]:
    if not path.exists():
        raise DataError(f"{name}: there is no such file or folder. Allowed: {_KINDS}.")
    try:
        if path.is_dir():
            return _idx(path, name) or _images(path, name)
        if path.suffix == ".npz":
            return _npz(path, name)
        if path.suffix == ".csv":
            return _csv(path, name)
    except OSError as error:
        raise DataError(f"{name}: cannot read {path}: {error.strerror or error}.") from None
    raise DataError(f"{name}: {path.suffix or 'a file without a suffix'} is not known. Allowed: {_KINDS}.")


def _idx(folder: Path, name: str) -> tuple[Array, Array] | None:
    images = sorted(folder.glob("*-images-idx3-ubyte*"))
    if not images:
        return None
    if len(images) > 1:
        raise DataError(f"{name}: {folder} has {len(images)} files of images ({images[0].name}, ...): leave one.")
    labels = images[0].with_name(images[0].name.replace("-images-idx3-", "-labels-idx1-"))
    if not labels.exists():
        raise DataError(f"{name}: {labels} is missing.")
    return np.asarray(mapped(images[0]))[:, None], np.asarray(mapped(labels)).astype(np.int64)


def _npz(path: Path, name: str) -> tuple[Array, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if missing := {"x", "y"} - set(file.files):
                raise DataError(f"{name}: {path.name} lacks {', '.join(sorted(missing))}; it has: {', '.join(file)}.")
            return file["x"], file["y"]
    except ValueError as error:
        raise DataError(f"{name}: {path} is damaged, or holds Python objects: {error}.") from None
    except Exception as error:
        # zipfile's own errors are no ValueError.
        if isinstance(error, DataError | OSError):
            raise
        raise DataError(f"{name}: {path} is no .npz file: {error}.") from None


def _csv(path: Path, name: str) -> tuple[Array, Array]:
    with path.open(newline="", encoding="utf-8") as file:
        try:
            rows = list(csv.reader(file))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{name}: {path} is no .csv file: {error}.") from None
    head = [cell.strip() for cell in rows[0]] if rows else []
    if "label" not in head:
        raise DataError(f"{name}: the first line of {path.name} must name the columns, one of them 'label'.")
    at = head.index("label")
    try:
        table = np.array(rows[1:], dtype=np.float64).reshape(-1, len(head))
    except ValueError:
        raise DataError(f"{name}: {path.name} must hold numbers only, and as many in each line as columns.") from None
    labels = table[:, at]
    if not np.array_equal(labels, np.floor(labels)):
        raise DataError(f"{name}: the column 'label' of {path.name} must hold whole numbers.")
    return np.delete(table, at, axis=1).astype(np.float32), labels.astype(np.int64)


def _images(folder: Path, name: str) -> tuple[Array, Array]:
    """Read images in one folder for each class, which is a number, or stands in classes.txt, in order."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ConfigError(f"{name}: a folder of images needs Pillow: pip install pillow.") from None
    classes = _class_folders(folder, name)
    x: list[Array] = []
    y: list[int] = []
    for number, inside in classes:
        for path in sorted(inside.iterdir()):
            if path.suffix.lower() not in IMAGES:
                continue
            try:
                with Image.open(path) as image:
                    pixels = np.asarray(image.convert("L" if image.mode in ("1", "L", "I", "I;16") else "RGB"))
            except (UnidentifiedImageError, OSError, ValueError) as error:
                raise DataError(f"{name}: {path} is no image that can be read: {error}.") from None
            if x and pixels.shape != x[0].shape:
                raise DataError(f"{name}: {path} is {pixels.shape}, others are {x[0].shape}: bring all to one size.")
            x.append(pixels)
            y.append(number)
    if not x:
        raise DataError(f"{name}: {folder} holds no images ({', '.join(IMAGES)}) in its class folders.")
    stacked = np.stack(x)
    return (stacked[:, None] if stacked.ndim == 3 else np.moveaxis(stacked, -1, 1)), np.array(y, dtype=np.int64)


def _class_folders(folder: Path, name: str) -> list[tuple[int, Path]]:
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    listed = folder / "classes.txt"
    if listed.is_file():
        names = listed.read_text(encoding="utf-8").split()
        if unknown := [path.name for path in inner if path.name not in names]:
            raise DataError(f"{name}: {listed} does not list the folder {unknown[0]!r}.")
        return [(names.index(path.name), path) for path in inner]
    if not inner or not all(path.name.isdecimal() for path in inner):
        raise DataError(
            f"{name}: {folder} holds none of what is allowed: {_KINDS}. The class folders must be named by the class's "
            "number, or classes.txt must list the names of ALL classes in their order, the same on every device."
        )
    return [(int(path.name), path) for path in inner]


def _fit(dataset: Dataset, name: str, shape: tuple[int, ...] | None, classes: int | None) -> Dataset:
    """Bring the examples into the model's shape, and refuse what it could not learn from."""
    if shape is not None and dataset.input_shape != shape:
        if np.prod(dataset.input_shape) != np.prod(shape):
            raise DataError(f"{name}: an example is {dataset.input_shape}, the model takes {shape}.")
        x = dataset.x_train.reshape(-1, *shape)
        dataset = replace(dataset, x_train=x, x_test=x[:1])
    top = int(dataset.y_train.max())
    if classes is not None and top >= classes:
        raise DataError(f"{name}: a label is {top}, the model tells {classes} classes apart: 0 to {classes - 1}.")
    return replace(dataset, num_classes=classes or dataset.num_classes)
