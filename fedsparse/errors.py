"""Errors that a user can act on; everything else is a bug and keeps its traceback."""

import os
import shlex
from collections.abc import Iterable
from difflib import get_close_matches


class FedsparseError(Exception):
    """Base of every error that fedsparse raises on purpose."""


class ConfigError(FedsparseError, ValueError):
    """A wrong name, value or combination that the user wrote; the CLI exits with code 2."""


class DataError(FedsparseError):
    """A data set is missing, unreadable or not what it claims to be; the CLI exits with code 2."""


class PayloadError(FedsparseError, ValueError):
    """A wire frame is malformed, damaged, foreign, or does not fit the receiver's own settings."""


class MemoryStoreError(FedsparseError):
    """An error-memory file is damaged, foreign, or does not fit the model."""


class FencedError(MemoryStoreError):
    """Another process took over this client's error memory; this one must not write any more."""


class RunError(FedsparseError):
    """A run cannot go on (for example: every client failed); the CLI exits with code 1."""


class AllClientsFailed(RunError):
    """No client of a round gave a usable update; names the first cause."""


def brief(text: str, most: int = 500) -> str:
    """Return text of another machine as it may be shown: no control characters, and no longer than `most`."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c.isprintable() or c == " " else "\N{REPLACEMENT CHARACTER}" for c in cut)


def shell(path: str | os.PathLike[str]) -> str:
    """Return a path as people can type it, in the commands that messages propose."""
    return shlex.quote(str(path))


def cause(error: BaseException) -> str:
    """Return an error's type and text in one line, as a message may quote it."""
    try:
        text = " ".join(str(error).split()).rstrip(".")
    except Exception:  # of a user's own class, whose text fails in turn
        text = ""
    return brief(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> ConfigError:
    """Build the error for an unknown `name`: what was wrong, the nearest valid name, all valid names."""
    names = sorted(allowed)
    near = get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"unknown {kind} {name!r}.{hint} Allowed: {', '.join(names)}.")
