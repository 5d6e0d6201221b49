"""Stand-ins for the LIBSVM sets of the papers: what they are like, made of MNIST or of random numbers.

Each is a table of rows, train before test, with the label as its last column, made once and kept in the cache. Two
machines get the same table; a matrix product may differ in its last bit.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsparse.data.cache import cache_folder, cached
from fedsparse.data.dataset import Array, Dataset
from fedsparse.data.idx import mapped
from fedsparse.errors import DataError
from fedsparse.seeding import generator

Table = NDArray[Any]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]

# The text of the recipes as they were imported; a program may run while somebody edits them.
_RECIPE = Path(__file__).read_bytes()


def kept_table(name: str, make: Callable[[], Table], recipe: bytes, source: str = "") -> Table:
    """Return the table ``make()``, kept in the cache under a key of the code that makes it and of what it is made of.

    A changed recipe is so never answered with an old file, whoever forgot to say that it changed.
    """
    key = hashlib.blake2b(recipe + b"\0" + source.encode(), digest_size=8).hexdigest()
    return cached(cache_folder() / f"{name}-{key}.npy", make)


def split_table(name: str, table: Table, num_train: int, scale: float = 1.0) -> Dataset:
    """Return the data set of two classes whose first `num_train` rows are for training."""
    # Plain arrays over the map, as for images.
    x, y = np.asarray(table[:, :-1]), np.asarray(table[:, -1]).astype(np.int64)
    return Dataset(name, x[:num_train], y[:num_train], x[num_train:], y[num_train:], 2, scale)


def _joined(x: Array, y: Array, dtype: type[np.generic]) -> Table:
    table = np.empty((len(y), x.shape[1] + 1), dtype)
    table[:, :-1], table[:, -1] = x, y
    return table


# --- madelon -----------------------------------------------------------------------------------------------------

_MADELON = {"train": 2_000, "test": 600, "informative": 5, "redundant": 15, "probes": 480}


def madelon_like() -> Dataset:
    """Like madelon: 2,600 x 500 random numbers, clusters on the corners of a 5-cube, labelled at random."""
    return split_table("madelon-like", kept_table("madelon-like", make_madelon, _RECIPE), _MADELON["train"])


def make_madelon() -> Table:
    """Return the table, float32 of shape (2600, 501).

    After Guyon's Madelon (NIPS 2003 feature selection challenge): a cloud of spread 0.5 around each of the 32 corners
    of the cube [-1, 1]^5, 16 corners of each class; 15 random linear combinations of the 5 coordinates; 480 columns
    of noise. Columns are in random order, with mean 0 and variance 1 over the training rows.
    """
    rng = generator(0, "madelon-like")
    n, k = _MADELON["train"] + _MADELON["test"], _MADELON["informative"]
    corners = 2.0 * (np.arange(2**k)[:, None] >> np.arange(k) & 1) - 1
    class_of_corner = rng.permutation(2**k) % 2
    corner = rng.permutation(np.arange(n) % 2**k)
    informative = corners[corner] + 0.5 * rng.standard_normal((n, k))
    redundant = informative @ rng.standard_normal((k, _MADELON["redundant"]))
    x = np.hstack([informative, redundant, rng.standard_normal((n, _MADELON["probes"]))])
    train = x[: _MADELON["train"]]
    x = (x - train.mean(axis=0)) / train.std(axis=0)
    return _joined(x[:, rng.permutation(x.shape[1])], class_of_corner[corner], np.float32)


# --- epsilon -----------------------------------------------------------------------------------------------------

_EPSILON = {"train": 10_000, "test": 2_000, "features": 2_000}
_SHARPNESS = 5.0  # standard deviation of the true log-odds, so that one label in nine goes against them


def epsilon_like() -> Dataset:
    """Like epsilon: 12,000 x 2,000 random numbers, dense rows of length 1, labels from a noisy linear model."""
    return split_table("epsilon-like", kept_table("epsilon-like", make_epsilon, _RECIPE), _EPSILON["train"])


def make_epsilon(n: int = _EPSILON["train"] + _EPSILON["test"]) -> Table:
    """Return the table, float32 of shape (n, 2001).

    Row i is ``x_i = R z_i / ||z_i||``, where z_i is normal with variance 1/j in direction j, as the spectra of real
    data decay, and R is a dense rotation, so that no coordinate says much and every gradient is dense. Its label is 1
    with probability ``sigmoid(<w, x_i>)`` for a fixed w, which leans on the main directions. With lambda = 1/n the best
    regularised logistic loss is 0.29, that of epsilon 0.28; for the softmax of two outputs, on which the same lambda
    weighs half, it is 0.265.
    """
    rng, d = generator(0, "epsilon-like"), _EPSILON["features"]
    spread = np.arange(1, d + 1) ** -0.5
    flips, w = rng.choice([-1.0, 1.0], (2, d)), rng.standard_normal(d) * spread**0.5
    x, y = np.empty((n, d), np.float32), np.empty(n)
    log_odds_scale = _SHARPNESS / np.sqrt(np.sum((w * spread) ** 2) / np.sum(spread**2))
    for start in range(0, n, 1000):  # so that a shorter table is the start of a longer one
        z = rng.standard_normal((min(1000, n - start), d)) * spread
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        rows = slice(start, start + len(z))
        chance = 1 / (1 + np.exp(-log_odds_scale * np.sum(z * w, axis=1)))
        y[rows] = rng.random(len(z)) < chance
        x[rows] = _rotated(z, flips)
    return _joined(x, y, np.float32)


def _rotated(z: Floats, flips: Floats) -> Floats:
    """Rotate rows by two rounds of random signs and a cosine transform: dense, without a d x d matrix."""
    from scipy.fft import dct  # type: ignore[import-untyped]

    for signs in flips:
        z = dct(z * signs, norm="ortho")
    return z


# --- gisette -----------------------------------------------------------------------------------------------------

_GISETTE = {"train": 3_000, "test": 500, "pixels": 500, "products": 2_000, "probes": 2_500}


def gisette_like(paths: Sequence[Path]) -> Dataset:
    """Like gisette: MNIST's 4 against 9, 7,000 x 5,000: pixels, their products, as many columns that say nothing.

    Parameters
    ----------
    paths : sequence of 4 paths
        MNIST's train images, train labels, test images and test labels.

    Raises
    ------
    DataError
        Where these are not MNIST's: images of another size, or too few of a digit.
    """
    try:
        stats = [(str(path.resolve()), path.stat()) for path in paths]
    except OSError as error:
        raise DataError(f"cannot read MNIST: {error}.") from None
    source = "|".join(f"{place} {stat.st_size} {stat.st_mtime_ns}" for place, stat in stats)
    table = kept_table("gisette-like", _gisette_from(paths), _RECIPE, source)
    return split_table("gisette-like", table, 2 * _GISETTE["train"], scale=1 / 255)


def _gisette_from(paths: Sequence[Path]) -> Callable[[], Table]:
    def make() -> Table:
        x, y, x_test, y_test = (mapped(path) for path in paths)
        for images in (x, x_test):
            if images.shape[1:] != (28, 28):
                raise DataError(f"{paths[0].parent}: images are {images.shape[1:]}, MNIST's are (28, 28).")
        rng = generator(0, "gisette-like")
        train = _of_each(y, _GISETTE["train"], rng, paths[1])
        test = _of_each(y_test, _GISETTE["test"], rng, paths[3])
        images = np.concatenate([x[train], x_test[test]]).reshape(-1, 784)
        labels = np.concatenate([y[train], y_test[test]]) == 9
        return _joined(gisette_columns(images, train.size, rng), labels, np.uint8)

    return make


def _of_each(labels: Array, count: int, rng: np.random.Generator, path: Path) -> NDArray[np.int64]:
    """Return the places of `count` fours and as many nines, mixed."""
    chosen = []
    for digit in (4, 9):
        places = np.flatnonzero(labels == digit)
        if places.size < count:
            raise DataError(f"{path}: {places.size} images of the digit {digit}, gisette-like takes {count}.")
        chosen.append(rng.permutation(places)[:count])
    return rng.permutation(np.concatenate(chosen))


def gisette_columns(images: Bytes, num_train: int, rng: np.random.Generator) -> Bytes:
    """Return the features of flat images, bytes of shape (n, 5000).

    After Guyon's Gisette (NIPS 2003 feature selection challenge): the 500 pixels that most training images use; 2,000
    products ``p q / 255`` of two of them, where one training image in a thousand uses both; and 2,500 probes, which
    are these columns with their rows permuted: they look like the others and say nothing. Columns are in random order.
    Features are 0 to 1 after the scale of 1/255; LIBSVM's file of gisette goes from -1 to 1.
    """
    in_use = np.count_nonzero(images[:num_train], axis=0)
    pixels = images[:, np.argsort(-in_use, kind="stable")[: _GISETTE["pixels"]]]
    lit = (pixels[:num_train] > 0).astype(np.float32)
    first, second = np.triu_indices(pixels.shape[1], k=1)
    order = rng.permutation(first.size)
    often = (lit.T @ lit)[first, second][order] >= num_train / 1000  # counts, so exact
    chosen = order[np.argsort(~often, kind="stable")[: _GISETTE["products"]]]
    first, second = first[chosen], second[chosen]
    products = (pixels[:, first].astype(np.uint16) * pixels[:, second] + 127) // 255
    real = np.hstack([pixels, products.astype(np.uint8)])
    probes = np.empty((len(real), _GISETTE["probes"]), np.uint8)
    for part in (slice(None, num_train), slice(num_train, None)):
        probes[part] = rng.permuted(real[part, rng.permutation(real.shape[1])[: _GISETTE["probes"]]], axis=0)
    x = np.hstack([real, probes])
    return x[:, rng.permutation(x.shape[1])]
