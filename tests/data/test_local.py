"""A device's own data: every format, and what is wrong with each."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from fedsparse.data.local import load_local
from fedsparse.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 4, 4), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        file.write(head + array.astype(np.uint8).tobytes())


def test_idx_files_plain_and_gzipped(tmp_path):
    for suffix in ("", ".gz"):
        folder = tmp_path / f"idx{suffix}"
        folder.mkdir()
        idx(folder / f"own-images-idx3-ubyte{suffix}", IMAGES)
        idx(folder / f"own-labels-idx1-ubyte{suffix}", LABELS)
        data = load_local(str(folder), (1, 4, 4), 10)
        assert np.array_equal(data.x_train[:, 0], IMAGES)
        assert data.y_train.tolist() == LABELS.tolist()
        assert (data.scale, data.num_classes) == (1 / 255, 10)


def test_npz_in_the_models_shape(tmp_path):
    np.savez(tmp_path / "own.npz", x=IMAGES.reshape(6, 16).astype(np.float32), y=LABELS)
    data = load_local(str(tmp_path / "own.npz"), (1, 4, 4), 3)
    assert data.x_train.shape == (6, 1, 4, 4)
    assert data.scale == 1.0


@pytest.mark.parametrize(
    "content",
    [
        "a,label,b\n1.5,0,2\n-1,2,3e2\n",
        "\ufeffa,label,b\r\n1.5,0,2\r\n\r\n-1,2,3e2\r\n \r\n\r\n",
        '\n"a", label ,"the\nrest"\n"1.5",0, 2\n-1,2.0,300',
    ],
)
def test_csv_with_the_label_anywhere(tmp_path, content):
    (tmp_path / "own.CSV").write_bytes(content.encode())
    data = load_local(str(tmp_path / "own.CSV"))
    assert data.x_train.tolist() == [[1.5, 2.0], [-1.0, 300.0]]
    assert data.y_train.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x,1", r"line 4: column 1 \('a'\) is 'x', which is no number"),
        ("1_0,1", "is '1_0', which is no number"),
        ("٣,1", "is '٣', which is no number"),
        ("1, ", r"line 4: column 2 \('label'\) is empty"),
        ("1", "line 4: 1 cells, but the first line names 2 columns"),
        ("1,1,", "line 4: 3 cells, but"),
        ('"1,1', "line 4: 1 cells, but"),
        ("nan,1", "line 4: .* is 'nan': numbers must be finite"),
        ("-inf,1", "is '-inf': numbers must be finite"),
        ("1e300,1", "within float32"),
        ("1,nan", "is 'nan', but labels must be whole numbers from 0"),
        ("1,0.5", "is '0.5', but labels"),
        ("1,-1", r"line 4: column 2 \('label'\) is '-1', but labels"),
        ("1,1e30", "is '1e30', but labels must be whole numbers from 0 to 9999999"),
        (f"{'z' * 200_000},1", "line 4: field larger than field limit"),
    ],
)
def test_a_bad_line_of_a_csv_file_is_named(tmp_path, line, words):
    (tmp_path / "x.csv").write_text(f"a,label\n1,0\n\n{line}\n2,3\n", encoding="utf-8")
    with pytest.raises(DataError, match=words) as caught:
        load_local(str(tmp_path / "x.csv"))
    assert str(caught.value).startswith(f"data.source = '{tmp_path}/x.csv': x.csv, line 4: ")
    assert len(str(caught.value)) < 500


def test_a_folder_of_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for number, name in ((0, "0"), (2, "2")):
        (tmp_path / "gray" / name).mkdir(parents=True)
        image.fromarray(IMAGES[number]).save(tmp_path / "gray" / name / "a.png")
        (tmp_path / "rgb" / ("cat", "", "dog")[number]).mkdir(parents=True)
        colour = np.stack([IMAGES[number]] * 3, axis=-1)
        image.fromarray(colour).save(tmp_path / "rgb" / ("cat", "", "dog")[number] / "a.png")
    gray = load_local(str(tmp_path / "gray"), (1, 4, 4), 3)
    assert np.array_equal(gray.x_train[:, 0], IMAGES[[0, 2]])
    assert gray.y_train.tolist() == [0, 2]
    with pytest.raises(DataError, match=r"classes\.txt must list"):
        load_local(str(tmp_path / "rgb"))
    (tmp_path / "rgb" / "classes.txt").write_text("cat\ncow\ndog\n")
    rgb = load_local(str(tmp_path / "rgb"), (3, 4, 4), 3)
    assert rgb.x_train.shape == (2, 3, 4, 4)
    assert rgb.y_train.tolist() == [0, 2]


def test_class_folders_are_numbers_or_listed_once(tmp_path):
    image = pytest.importorskip("PIL.Image")

    def folder(name: str, classes: tuple[str, ...], listed: bytes | None = None, pixels: np.ndarray = IMAGES[0]) -> str:
        for each in classes:
            (tmp_path / name / each).mkdir(parents=True)
            image.fromarray(pixels).save(tmp_path / name / each / "a.png")
        if listed is not None:
            (tmp_path / name / "classes.txt").write_bytes(listed)
        return str(tmp_path / name)

    assert load_local(folder("padded", ("00", "10"))).y_train.tolist() == [0, 10]
    spaces = folder("spaces", ("big dog", "cat"), "\ufeffcat\n\nbig dog\n".encode())
    assert load_local(spaces).y_train.tolist() == [1, 0]
    for source, words in (
        (folder("a", ("0", "9" * 30)), "is no class: classes are numbered from 0, to 9999999"),
        (folder("b", ("99999999999",)), "'99999999999' is no class"),
        (folder("c", ("٣",)), "in digits 0 to 9"),
        (folder("d", ("1", "01")), "'01' and '1' are both class 1"),
        (folder("e", ("cat",), b"cat\ncat\n"), "lists 'cat' more than once"),
        (folder("f", ("cat",), b"c\xff\n"), "no text in UTF-8"),
        (folder("g", ("0",), pixels=IMAGES[0].astype(np.uint16) * 256), "bring all images to 8 bits"),
    ):
        with pytest.raises(DataError, match=words):
            load_local(source)


OWN_MODULE = """
import numpy as np
from fedsparse.data import Dataset
x, y = np.ones((3, 4), np.float32), np.array([0, 1, 1])
def load(): return x, y
def dataset(): return Dataset("mine", x, y, x[:2], y[:2], 2)
def nothing(): return None
def one(): return (x,)
def scalars(): return 1, 2
def ragged(): return [[1, 2], [3]], [0, 1]
def broken(): raise OSError("the camera\\nis off")
def needs(path): return x, y
thing = 3
"""


def test_a_function_of_the_users(tmp_path, monkeypatch):
    (tmp_path / "own_sensor.py").write_text(OWN_MODULE)
    (tmp_path / "own_broken.py").write_text("1 +\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_local("own_sensor:load", (4,), 2).x_train.shape == (3, 4)
    data = load_local("own_sensor:dataset", (1, 2, 2), 2)
    assert (data.x_train.shape, data.x_test.shape) == ((3, 1, 2, 2), (2, 1, 2, 2))
    call = r"It is called without arguments and must return \(x, y\) or a Dataset"
    for name, words in {
        "own_sensor:nothing": r"must return \(x, y\) or a Dataset, got a NoneType",
        "own_sensor:one": r"must return \(x, y\) or a Dataset, got a tuple of 1",
        "own_sensor:scalars": r"features \(\) and labels \(\) do not fit",
        "own_sensor:ragged": "a list is no array: ValueError",
        "own_sensor:broken": rf"raised OSError: the camera is off\. {call}",
        "own_sensor:needs": rf"raised TypeError: needs\(\) missing 1 required .* {call}",
        "own_sensor:thing": "is a int, not a callable",
        "own_sensor:none": r"own_sensor \(.*own_sensor.py\) has no 'none'",
        ".own_sensor:load": "must be written package.module:callable",
        "own_sensor:": "must be written package.module:callable",
        "own_broken:load": r"importing own_broken failed: SyntaxError: invalid syntax \(own_broken.py, line 1\)",
        "own_absent.module:load": "ModuleNotFoundError: No module named 'own_absent'. It must be installed",
    }.items():
        with pytest.raises((ConfigError, DataError), match=words) as caught:
            load_local(name)
        assert str(caught.value).startswith(f"data.source = '{name}'")
        assert "\n" not in str(caught.value)


def npz(**arrays: np.ndarray):
    return lambda path: np.savez(path / "x.npz", **arrays)


def text(name: str, content: str | bytes):
    return lambda path: (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (lambda path: None, "gone", "no such file"),
        (lambda path: None, "", "none of what is allowed"),
        (text("x.txt", "hello"), "x.txt", r"\.txt is not known"),
        (text("x.npz", b"no zip"), "x.npz", "damaged|no .npz"),
        (text("x.npz", b"PK\x05\x06" + b"\x00" * 8 + b"\xff" * 4 + bytes(6)), "x.npz", "damaged"),
        (npz(a=IMAGES), "x.npz", "lacks x, y"),
        (npz(x=IMAGES, y=LABELS[:3]), "x.npz", "do not fit together"),
        (npz(x=IMAGES[:0], y=LABELS[:0]), "x.npz", "wanted are an example at least"),
        (npz(x=IMAGES[:, :0], y=LABELS), "x.npz", r"features are \(6, 0, 4\): wanted are"),
        (npz(x=np.float32(1), y=np.int64(1)), "x.npz", "do not fit together"),
        (npz(x=IMAGES, y=LABELS[:, None]), "x.npz", r"\(6, 1\) do not fit together.* y\[:, 0\]"),
        (npz(x=IMAGES, y=LABELS.astype(float)), "x.npz", r"whole labels, got uint8 and float64.*astype\(np.int64\)"),
        (npz(x=IMAGES, y=LABELS > 0), "x.npz", "whole labels, got uint8 and bool"),
        (npz(x=IMAGES, y=LABELS.astype(np.uint64) - 1), "x.npz", "to 9999999 at most, one is 18446744073709551615"),
        (npz(x=IMAGES.astype(str), y=LABELS), "x.npz", "needs numbers"),
        (
            lambda path: np.save(path / "x.npy", IMAGES) or (path / "x.npy").rename(path / "x.npz"),
            "x.npz",
            "is one array",
        ),
        (npz(x=np.full((2, 4), np.nan), y=LABELS[:2]), "x.npz", "NaN"),
        (npz(x=np.array([None, 1], dtype=object), y=LABELS[:2]), "x.npz", "Python objects"),
        (text("x.csv", ""), "x.csv", "must name the columns"),
        (text("x.csv", "a,b\n1,2\n"), "x.csv", "one of them 'label'"),
        (text("x.csv", "a;label\n1;2\n"), "x.csv", "separated by commas, .* found 'a;label'"),
        (text("x.csv", "label,a,label\n1,2,1\n"), "x.csv", "names several"),
        (text("x.csv", "label\n1\n"), "x.csv", "'label' only"),
        (text("x.csv", "a,label\n\n"), "x.csv", "holds no examples"),
        (text("x.csv", "a,label\n1,2,3\n"), "x.csv", "line 2: 3 cells"),
        (text("x.csv", '"' + "a" * 200_000), "x.csv", r"no \.csv file"),
        (text("x.csv", b"\xff\xfe\x00"), "x.csv", r"no \.csv file in UTF-8"),
        (text("x.csv", b"a,label\n1,2\n\xe4,1\n"), "x.csv", r"no \.csv file in UTF-8"),
        (lambda path: (path / "x.csv").symlink_to("away.csv"), "x.csv", "a link to away.csv, where there is nothing"),
        (lambda path: (path / "x.csv").symlink_to("x.csv"), "x.csv", "a link to x.csv"),
        (lambda path: os.mkfifo(path / "x.csv"), "x.csv", "neither a file nor a folder"),
        (lambda path: None, "n" * 300, "File name too long"),
        (lambda path: None, "n" * 300 + ":x", "File name too long"),
        (lambda path: os.mkdir(os.fsencode(path / "a") + b"\xfc"), "a\udcfc", "a� holds none"),
        (lambda path: None, "a\0b", "no such file"),
        (lambda path: None, "a\ud800b", "no such file"),
        (text("x-images-idx3-ubyte", b"junk"), "", "is missing"),
    ],
)
def test_what_is_no_data_is_refused_with_a_reason(tmp_path, make, name, words):
    make(tmp_path)
    with pytest.raises(DataError, match=words):
        load_local(str(tmp_path / name))


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "int16", ">i4"])
def test_labels_of_any_integers(tmp_path, dtype):
    np.savez(tmp_path / "own.npz", x=IMAGES, y=LABELS.astype(dtype))
    (tmp_path / "own.npz").rename(tmp_path / "own.NPZ")
    data = load_local(str(tmp_path / "own.NPZ"))
    assert data.y_train.dtype == np.int64
    assert data.y_train.tolist() == LABELS.tolist()


def test_what_may_not_be_read_is_named(tmp_path, monkeypatch):
    def denied(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "0").mkdir()
    monkeypatch.setattr(Path, "iterdir", denied)
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(DataError, match=f"cannot read {tmp_path}: Permission denied"):
        load_local(str(tmp_path))
    (tmp_path / "x.csv").touch()
    with pytest.raises(DataError, match=r"x\.csv: Permission denied"):
        load_local(str(tmp_path / "x.csv"))


def test_what_the_model_cannot_take_is_refused(tmp_path):
    np.savez(tmp_path / "own.npz", x=IMAGES, y=LABELS)
    with pytest.raises(DataError, match=r"an example is \(4, 4\), the model takes \(3,\)"):
        load_local(str(tmp_path / "own.npz"), (3,), 3)
    with pytest.raises(DataError, match="a label is 2, the model tells 2 classes apart"):
        load_local(str(tmp_path / "own.npz"), (1, 4, 4), 2)
    np.savez(tmp_path / "last.npz", x=IMAGES.reshape(6, 8, 2), y=LABELS)
    with pytest.raises(DataError, match=r"is \(8, 2\), the model takes \(2, 8\): bring its axes into this order"):
        load_local(str(tmp_path / "last.npz"), (2, 8), 3)
    assert load_local(str(tmp_path / "last.npz"), (16,), 3).input_shape == (16,)
