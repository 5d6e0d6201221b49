"""A device's own data: examples and labels from a file, a folder, or the user's function."""

import os.path
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsparse.data.csvfile import read_csv
from fedsparse.data.dataset import MOST_CLASSES, Dataset, from_user
from fedsparse.data.idx import mapped
from fedsparse.errors import ConfigError, DataError, brief, cause
from fedsparse.userobject import load_object, names_object

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
    try:
        return _fit(_load(source), f"data.source = {source!r}", input_shape, num_classes)
    except (ConfigError, DataError) as error:
        # Names of files and the words of the user's function may hold anything, even what cannot be printed or sent.
        raise type(error)(brief(str(error), 2000)) from error.__cause__


def _load(source: str) -> Dataset:
    kind = "data.source ="
    # os.path.exists, unlike that of Path, raises nothing.
    if names_object(source) and not os.path.exists(source):
        return from_user(source, load_object(source, kind), kind, own=True)
    x, y = _read(Path(source), f"{kind} {source!r}")
    dataset = from_user(source, lambda: (x, y), kind, own=True)
    return replace(dataset, scale=1 / 255 if x.dtype == np.uint8 else 1.0)


def _read(path: Path, name: str) -> tuple[Array, Array]:
    try:
        if not path.exists():
            dead = f"it is a link to {path.readlink()}, where there is nothing" if path.is_symlink() else ""
            raise DataError(f"{name}: {dead or 'there is no such file or folder'}. Allowed: {_KINDS}.")
        if path.is_dir():
            return _idx(path, name) or _images(path, name)
        if not path.is_file():
            raise DataError(f"{name}: it is neither a file nor a folder. Allowed: {_KINDS}.")
        if path.suffix.lower() == ".npz":
            return _npz(path, name)
        if path.suffix.lower() == ".csv":
            return read_csv(path, name)
    except OSError as error:
        raise DataError(f"{name}: cannot read {error.filename or path}: {error.strerror or error}.") from None
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
    with path.open("rb") as raw:  # NumPy leaves its own open where the archive is damaged
        try:
            file = np.load(raw, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise DataError(f"{name}: {path} is one array, no .npz file: np.savez(path, x=x, y=y) makes one.")
            if missing := {"x", "y"} - set(file.files):
                has = ", ".join(file.files) or "nothing"
                raise DataError(f"{name}: {path.name} lacks {', '.join(sorted(missing))}; it has: {has}.")
            x, y = file["x"], file["y"]
        except DataError:
            raise
        except Exception as error:  # of zipfile, zlib and NumPy, which advises to unpickle it
            why = "" if "pickle" in str(error) else f" ({cause(error)})"
            raise DataError(f"{name}: it is no .npz file, damaged, or holds Python objects{why}.") from None
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        raise DataError(f"{name}: {path} holds something else than arrays: np.savez(path, x=x, y=y) makes a right one.")
    return x, y


def _images(folder: Path, name: str) -> tuple[Array, Array]:
    """Read images in one folder for each class, which is a number, or stands in classes.txt, in order."""
    try:
        from PIL import Image
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
                    wide = image.mode.startswith("I")  # of 16 or 32 bits
                    deep = wide and int(np.asarray(image).max()) > 255
                    pixels = np.asarray(image.convert("L" if image.mode in ("1", "L") or wide else "RGB"))
            except Exception as error:  # the decoders' errors are of many kinds
                raise DataError(f"{name}: {path} is no image that can be read: {cause(error)}.") from None
            if deep:
                raise DataError(f"{name}: {path} has numbers beyond 255: bring all images to 8 bits.")
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
        names = _class_names(listed, name)
        if unknown := [path.name for path in inner if path.name not in names]:
            raise DataError(f"{name}: {listed} does not list the folder {unknown[0]!r}.")
        return [(names.index(path.name), path) for path in inner]
    # isdecimal() alone is true for the digits of all scripts.
    if not inner or not all(path.name.isascii() and path.name.isdecimal() for path in inner):
        raise DataError(
            f"{name}: {folder} holds none of what is allowed: {_KINDS}. The class folders must be named by the class's "
            "number, in digits 0 to 9, or classes.txt must list the names of ALL classes in their order, the same on "
            "every device."
        )
    numbered: dict[int, Path] = {}
    for path in inner:
        digits = path.name.lstrip("0") or "0"
        if len(digits) >= len(str(MOST_CLASSES)):
            raise DataError(
                f"{name}: the folder {path.name!r} is no class: classes are numbered from 0, to {MOST_CLASSES - 1} at "
                "most. To name them otherwise, list the names of all classes in classes.txt."
            )
        other = numbered.setdefault(int(digits), path)
        if other is not path:
            raise DataError(f"{name}: the folders {other.name!r} and {path.name!r} are both class {digits}: leave one.")
    return list(numbered.items())


def _class_names(listed: Path, name: str) -> list[str]:
    try:
        lines = [line.strip() for line in listed.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: {listed} is no text in UTF-8: {error}.") from None
    names = lines if len(lines) > 1 else " ".join(lines).split()
    if twice := [each for each, times in Counter(names).items() if times > 1]:
        raise DataError(f"{name}: {listed} lists {twice[0]!r} more than once: each class has one name and one place.")
    return names


def _fit(dataset: Dataset, name: str, shape: tuple[int, ...] | None, classes: int | None) -> Dataset:
    """Bring the examples into the model's shape, and refuse what it could not learn from."""
    own = dataset.input_shape
    if shape is not None and own != shape:
        # Other than these, the same numbers in another shape are in another order, such as channels that come last.
        alike = 1 in (len(own), len(shape)) or [n for n in own if n > 1] == [n for n in shape if n > 1]
        if prod(own) != prod(shape) or not alike:
            hint = ": bring its axes into this order with np.moveaxis" if prod(own) == prod(shape) else ""
            raise DataError(f"{name}: an example is {own}, the model takes {shape}{hint}.")
        x, x_test = (part.reshape(-1, *shape) for part in (dataset.x_train, dataset.x_test))
        dataset = replace(dataset, x_train=x, x_test=x_test)
    top = int(max(dataset.y_train.max(), dataset.y_test.max()))
    if classes is not None and top >= classes:
        raise DataError(f"{name}: a label is {top}, the model tells {classes} classes apart: 0 to {classes - 1}.")
    return replace(dataset, num_classes=classes or dataset.num_classes)
