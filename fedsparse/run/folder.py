"""The folder that a run leaves behind; every file in it is complete or not there."""

import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from fedsparse.errors import ConfigError, RunError
from fedsparse.run.lock import LOCK, SERVERAPP_LOCK
from fedsparse.scenario import Scenario, from_toml, to_toml

SCENARIO, ROUNDS, SUMMARY = "scenario.toml", "rounds.jsonl", "summary.json"
MODEL, PARTITION, REPORT = "model.safetensors", "partition.json", "report.html"
TABLE, RUNS, CHECKPOINT = "summary.csv", "runs.csv", "checkpoint"
DEPLOYMENT = "deployment.json"  # which run of which federation wrote the folder
_FILES = (SCENARIO, ROUNDS, SUMMARY, MODEL, PARTITION, REPORT, TABLE, RUNS, DEPLOYMENT)
_FOLDERS = ("memory", CHECKPOINT, ".memory")


class RunFolder:
    """One run's folder.

    Parameters
    ----------
    path : path
        Where it is.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | os.PathLike[str], scenario: Scenario, *, overwrite: bool = False) -> Self:
        """Make the folder and write the resolved scenario into it.

        Raises
        ------
        ConfigError
            Where it belongs to another run, or cannot be written.
        """
        check_output(path, overwrite=overwrite)
        folder = cls(path)
        try:
            if overwrite:
                clear(folder.path)
            folder.path.mkdir(parents=True, exist_ok=True)
            write_text(folder.path / SCENARIO, to_toml(scenario))
            write_text(folder.path / ROUNDS, "")
        except OSError as error:
            raise ConfigError(f"cannot write into the output folder {folder.path}: {error.strerror}.") from None
        return folder

    def reopen(self, scenario: Scenario, server_round: int) -> None:
        """Get ready to go on after a round: later ones do not count, nor does the word on how the run had ended."""
        lines = [line for line in self.rounds() if line["round"] <= server_round]
        with suppress_disk_errors(self.path):
            _remove_partial(self.path)
            for name in (SUMMARY, REPORT):
                (self.path / name).unlink(missing_ok=True)
            write_text(self.path / SCENARIO, to_toml(scenario))
            write_text(self.path / ROUNDS, "".join(map(_written, lines)))

    @property
    def memory(self) -> Path:
        """Where the clients of this run keep their error memory."""
        return self.path / "memory"

    def add_round(self, line: dict[str, Any], *, durable: bool = False) -> None:
        """Append one round; it is on its way to the disk when this returns, or there if it is to be durable."""
        with suppress_disk_errors(self.path), open(self.path / ROUNDS, "a", encoding="utf-8") as file:
            file.write(_written(line))
            if durable:
                file.flush()
                os.fsync(file.fileno())

    def rounds(self) -> list[dict[str, Any]]:
        """Return the rounds written so far; a last line that a killed process left unfinished does not count."""
        return read_rounds(self.path / ROUNDS)

    def scenario(self) -> Scenario:
        """Return the scenario that was run."""
        path = self.path / SCENARIO
        try:
            return from_toml(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise ConfigError(f"{self.path} is no folder of a run: cannot read {path}: {error.strerror}.") from None

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file; numbers that are not finite become null."""
        with suppress_disk_errors(self.path):
            write_text(self.path / name, json.dumps(finite(content), indent=1, allow_nan=False) + "\n")

    def read_json(self, name: str) -> Any:
        """Return a JSON file's content, or None where it does not exist."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunError(f"{self.path / name} is damaged ({error}): start over with --overwrite.") from None

    def write_model(self, arrays: dict[str, Any]) -> None:
        """Write the model's arrays; equal arrays give equal bytes."""
        from safetensors.numpy import save

        with suppress_disk_errors(self.path):
            write_bytes(self.path / MODEL, save(arrays))


def check_output(path: str | os.PathLike[str], *, overwrite: bool = False, resume: bool = False) -> None:
    """Refuse an output folder that is in use or cannot be written, without creating anything.

    With `resume` one that is ours is let through, whatever it holds.
    """
    folder = Path(path)
    if resume and is_ours(folder):
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"the output {folder} is a file: choose a folder with --out.")
    if folder.is_dir() and any(not _is_partial(path) for path in folder.iterdir()):
        if _only_begun(folder):
            if not overwrite:
                raise ConfigError(
                    f"the output folder {folder} holds {SCENARIO} alone, of a run that was killed at its very start "
                    "or of your own: say --overwrite to replace it, or choose another folder with --out."
                )
        elif not is_ours(folder):
            raise ConfigError(
                f"the output folder {folder} is not empty and holds no run of fedsparse: choose another with --out."
            )
        elif not overwrite:
            go_on = "--resume to go on with it, " if (folder / CHECKPOINT).is_dir() else ""
            raise ConfigError(
                f"the output folder {folder} already holds a run. Say {go_on}--overwrite to replace it, or choose "
                "another folder with --out."
            )
    nearest = existing(folder)
    try:
        # Permissions do not tell of read-only disks, and mean nothing to root.
        tempfile.TemporaryDirectory(prefix=".fedsparse-", dir=nearest).cleanup()
    except OSError as error:
        raise ConfigError(
            f"cannot write the output folder {folder}: {nearest}: {error.strerror}. Choose another folder with --out."
        ) from None


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())


def is_ours(folder: Path) -> bool:
    """Whether a folder holds a run or a comparison."""
    return (folder / SCENARIO).is_file() and ((folder / ROUNDS).exists() or (folder / SUMMARY).exists())


def _only_begun(folder: Path) -> bool:
    """Whether nothing but a scenario is there."""
    return [path.name for path in folder.iterdir() if not _is_partial(path)] == [SCENARIO]


def _is_partial(path: Path) -> bool:
    """Whether this is no result: what a killed process left, or the lock of a live one."""
    return path.name in (LOCK, SERVERAPP_LOCK) or (path.name.startswith(".") and path.name.endswith(".partial"))


def _remove_partial(folder: Path) -> None:
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Remove what runs and comparisons write, and nothing else, so that a wrong --out cannot cost other files."""
    _remove_partial(folder)
    if not folder.is_dir() or not is_ours(folder):
        return
    for inner in folder.glob("*/seed-*"):
        if inner.is_dir():
            clear(inner)
            for empty in (inner, inner.parent):
                with suppress(OSError):
                    empty.rmdir()
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a rounds file."""
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line]
        if all(isinstance(line, dict) and isinstance(line.get("round"), int) for line in lines):
            return lines
        raise ValueError("a line is no round")
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}): start over with --overwrite.") from None


def _written(line: dict[str, Any]) -> str:
    return json.dumps(finite(line), allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a whole file, or nothing."""
    write_bytes(path, text.encode())


def save_text(path: Path, text: str) -> None:
    """Write a whole file, or raise a RunError that says why not."""
    with suppress_disk_errors(path.parent):
        write_text(path, text)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file, or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


class suppress_disk_errors:
    """Turn a full or vanished disk into a RunError that says so."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise RunError(f"cannot write into {self.path}: {error.strerror}.") from None


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by None."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
