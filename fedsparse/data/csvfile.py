"""A .csv file of numbers with a column 'label': read fast, and searched for the line at fault only where one is."""

import csv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np
from numpy.typing import NDArray

from fedsparse.data.dataset import MOST_CLASSES
from fedsparse.errors import DataError, brief, cause

Array = NDArray[Any]
_LARGEST = float(np.finfo(np.float32).max)


def read_csv(path: Path, name: str) -> tuple[Array, Array]:
    """Read examples, one a line; the first line names the columns, empty lines do not count.

    Parameters
    ----------
    path : Path
    name : str
        What an error begins with.

    Returns
    -------
    x : array of float32, shape (n, columns - 1)
    y : array of int64, shape (n,)

    Raises
    ------
    OSError
        It cannot be read.
    DataError
        It is no text in UTF-8, has no column 'label' or no examples, or a cell is not what its column needs.
    """
    where = f"{name}: {path.name}"
    try:
        with _opened(path) as file:
            lines = _filled(file)
            head = _head(lines, where)
            first = next(lines, None)
            if first is None:
                raise DataError(f"{where} holds no examples: lines of numbers must follow the first.")
            try:
                table = np.loadtxt(
                    chain([first], lines), delimiter=",", quotechar='"', comments=None, ndmin=2, encoding=None
                )
            except UnicodeDecodeError:
                raise
            except ValueError as error:
                _blame(path, head, where, cause(error))
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: {path} is no .csv file in UTF-8: {error}. Save it as CSV in UTF-8.") from None
    if table.shape[1] != len(head):
        _blame(path, head, where, f"its lines have {table.shape[1]} cells")
    at = head.index("label")
    labels = table[:, at]
    with np.errstate(over="ignore"):
        x = np.delete(table, at, axis=1).astype(np.float32)
    # NaN fails the comparisons.
    if not (np.isfinite(x).all() and ((labels >= 0) & (labels < MOST_CLASSES) & (labels == np.floor(labels))).all()):
        _blame(path, head, where, "it holds numbers that cannot be used")
    return x, labels.astype(np.int64)


def _opened(path: Path) -> TextIO:
    return path.open(encoding="utf-8-sig")  # spreadsheets begin their files with a byte order mark


def _filled(file: TextIO) -> Iterator[str]:
    return (line for line in file if line.strip())


def _head(lines: Iterator[str], where: str) -> list[str]:
    try:
        head = [cell.strip() for cell in next(csv.reader(lines), [])]
    except csv.Error as error:
        raise DataError(f"{where} is no .csv file: {error}.") from None
    if head.count("label") != 1:
        found = brief(", ".join(map(repr, head)), 200) or "nothing"
        raise DataError(
            f"{where}: the first line must name the columns, separated by commas, one of them 'label' "
            f"({'it names several so' if 'label' in head else 'there is none'}): found {found}."
        )
    if len(head) == 1:
        raise DataError(f"{where} has the column 'label' only: all others are the example, and there are none.")
    return head


def _blame(path: Path, head: list[str], where: str, otherwise: str) -> NoReturn:
    """Raise the error that names the first line at fault; `otherwise` is said where none is found."""
    with _opened(path) as file:
        numbered = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        next(csv.reader(line for _, line in numbered))  # the names, which may take several lines
        for number, line in numbered:
            try:
                wrong = _wrong(next(csv.reader([line])), head)
            except csv.Error as error:
                wrong = str(error)
            if wrong:
                raise DataError(f"{where}, line {number}: {wrong}.")
    raise DataError(f"{where} cannot be read as numbers: {otherwise}.")


def _wrong(cells: list[str], head: list[str]) -> str | None:
    if len(cells) != len(head):
        return f"{len(cells)} cells, but the first line names {len(head)} columns"
    for at, (cell, column) in enumerate(zip(cells, head, strict=True), 1):
        wrong = _wrong_cell(cell.strip(), column == "label")
        if wrong:
            return f"column {at} ({brief(column, 40)!r}) {wrong}"
    return None


def _wrong_cell(cell: str, is_label: bool) -> str | None:
    if not cell:
        return "is empty: every cell must hold a number"
    try:
        # float() takes 1_000 and the digits of all scripts, which no other program writes for numbers.
        value = float(cell) if cell.isascii() and "_" not in cell else None
    except ValueError:
        value = None
    if value is None:
        return f"is {brief(cell, 40)!r}, which is no number; numbers look like 3, -1.5 or 2e-3"
    if is_label and not (0 <= value < MOST_CLASSES and value == int(value)):
        return f"is {brief(cell, 40)!r}, but labels must be whole numbers from 0 to {MOST_CLASSES - 1}"
    if not abs(value) <= _LARGEST:
        return f"is {brief(cell, 40)!r}: numbers must be finite, and within float32"
    return None
