"""A device's own data: every format, and what is wrong with each."""

import gzip
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


def test_csv_with_the_label_anywhere(tmp_path):
    (tmp_path / "own.csv").write_text("a,label,b\n1.5,0,2\n-1,2,3e2\n")
    data = load_local(str(tmp_path / "own.csv"))
    assert data.x_train.tolist() == [[1.5, 2.0], [-1.0, 300.0]]
    assert data.y_train.tolist() == [0, 2]


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


def test_a_function_of_the_users(tmp_path, monkeypatch):
    (tmp_path / "own_sensor.py").write_text(
        "import numpy as np\ndef load():\n    return np.ones((3, 4), np.float32), np.array([0, 1, 1])\n"
        "def nothing():\n    return None\ndef broken():\n    raise OSError('the camera is off')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_local("own_sensor:load", (4,), 2).x_train.shape == (3, 4)
    for name, words in (("nothing", "must return"), ("broken", "the camera is off"), ("none", "none")):
        with pytest.raises(ConfigError, match=words):
            load_local(f"own_sensor:{name}")


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
        (npz(a=IMAGES), "x.npz", "lacks x, y"),
        (npz(x=IMAGES, y=LABELS[:3]), "x.npz", "do not fit together"),
        (npz(x=IMAGES[:0], y=LABELS[:0]), "x.npz", "do not fit together"),
        (npz(x=np.full((2, 4), np.nan), y=LABELS[:2]), "x.npz", "NaN"),
        (npz(x=np.array([None, 1], dtype=object), y=LABELS[:2]), "x.npz", "Python objects"),
        (text("x.csv", ""), "x.csv", "must name the columns"),
        (text("x.csv", "a,b\n1,2\n"), "x.csv", "one of them 'label'"),
        (text("x.csv", "a,label\n"), "x.csv", "do not fit together"),
        (text("x.csv", "a,label\n1\n"), "x.csv", "numbers only"),
        (text("x.csv", "a,label\nx,1\n"), "x.csv", "numbers only"),
        (text("x.csv", "a,label\n1,0.5\n"), "x.csv", "whole numbers"),
        (text("x.csv", "a,label\n1,-1\n"), "x.csv", "labels must be"),
        (text("x.csv", b"\xff\xfe\x00"), "x.csv", r"no \.csv"),
        (text("x-images-idx3-ubyte", b"junk"), "", "is missing"),
    ],
)
def test_what_is_no_data_is_refused_with_a_reason(tmp_path, make, name, words):
    make(tmp_path)
    with pytest.raises(DataError, match=words):
        load_local(str(tmp_path / name))


def test_what_the_model_cannot_take_is_refused(tmp_path):
    np.savez(tmp_path / "own.npz", x=IMAGES, y=LABELS)
    with pytest.raises(DataError, match=r"an example is \(4, 4\), the model takes \(3,\)"):
        load_local(str(tmp_path / "own.npz"), (3,), 3)
    with pytest.raises(DataError, match="a label is 2, the model tells 2 classes apart"):
        load_local(str(tmp_path / "own.npz"), (1, 4, 4), 2)
