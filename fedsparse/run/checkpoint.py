"""What a run needs to go on after it was killed: one file, complete or not there.

The clients' error memories may be one round ahead of it, when the process died within a round. That round is asked for
again under the same update ids, and a client that has answered it already sends the very same bytes.
"""

import json
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.memory import sync
from fedsparse.compression.memory_vectors import digest
from fedsparse.errors import RunError
from fedsparse.run.folder import CHECKPOINT, suppress_disk_errors

VERSION = 1
_NAME = "round-{:09d}.safetensors"

Arrays = dict[str, NDArray[Any]]


@dataclass
class Checkpoint:
    """A run after a complete round.

    Parameters
    ----------
    server_round : int
        The round.
    wall_s : float
        Seconds that the run has taken so far, in all its parts.
    scenario : str
        Whose run it is, as TOML.
    strategy, inner : dict
        What `CompressedStrategy.state_dict` and `strategies.inner_state.capture` gave; plain JSON values.
    model, inner_arrays, average : dict of arrays
        The global model, the arrays that `inner` refers to, the state of the average of the rounds' models.
    contexts : dict
        Client number -> what Flower's Context of that client holds.
    """

    server_round: int
    wall_s: float
    scenario: str
    strategy: dict[str, Any]
    inner: dict[str, Any]
    model: Arrays
    inner_arrays: Arrays = field(default_factory=dict)
    average: Arrays = field(default_factory=dict)
    contexts: dict[int, bytes] = field(default_factory=dict)

    def save(self, run_folder: Path, *, durable: bool = False) -> None:
        """Write it below a run's folder, then remove the one before.

        Never over an older file: ext4 then waits for the disk, longer than a small round takes. What is to be durable
        waits for it, so that it outlives the power of the machine and not only the process.

        Raises
        ------
        RunError
            The disk is full or gone; the checkpoint before is still there.
        """
        from safetensors.numpy import save

        parts = self._parts()
        arrays = _named(parts)
        # safetensors sorts by name, but the order of a model's arrays is that of its coordinates.
        names = {part: list(group) for part, group in parts.items()}
        facts = {"version": VERSION, "round": self.server_round, "wall_s": self.wall_s, "names": names}
        facts |= {"scenario": self.scenario, "checksum": _checksum(arrays)}
        text = json.dumps(facts | {"strategy": self.strategy, "inner": self.inner})
        folder = run_folder / CHECKPOINT
        target = folder / _NAME.format(self.server_round)
        partial = target.with_suffix(".partial")
        with suppress_disk_errors(folder):
            folder.mkdir(exist_ok=True)
            try:
                partial.write_bytes(save(arrays, {"fedsparse": text}))
                if durable:
                    sync(partial)
                os.rename(partial, target)
                if durable:
                    sync(folder)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            for old in folder.iterdir():
                if old != target:
                    old.unlink(missing_ok=True)

    def _parts(self) -> dict[str, Arrays]:
        contexts: Arrays = {str(client): np.frombuffer(state, np.uint8) for client, state in self.contexts.items()}
        return {"model": self.model, "inner": self.inner_arrays, "average": self.average, "context": contexts}

    @classmethod
    def load(cls, run_folder: Path) -> Self | None:
        """Return the newest checkpoint of a run's folder, or None where there is none.

        Raises
        ------
        RunError
            It is damaged, or of another version.
        """
        files = sorted((run_folder / CHECKPOINT).glob("round-*.safetensors"))
        if not files:
            return None
        from safetensors import SafetensorError, safe_open

        path = files[-1]
        try:
            with safe_open(path, framework="np") as file:
                facts = json.loads(file.metadata()["fedsparse"])
                if facts["version"] != VERSION:
                    raise RunError(
                        f"{path} is a checkpoint of version {facts['version']}, this fedsparse reads {VERSION}: start "
                        "over with --overwrite."
                    )
                parts = {
                    part: {name: file.get_tensor(f"{part}:{name}") for name in names}
                    for part, names in facts["names"].items()
                }
            if facts["checksum"] != _checksum(_named(parts)):
                raise ValueError("its checksum does not match")
            return cls(
                server_round=int(facts["round"]),
                wall_s=float(facts["wall_s"]),
                scenario=str(facts["scenario"]),
                strategy=facts["strategy"],
                inner=facts["inner"],
                model=parts["model"],
                inner_arrays=parts["inner"],
                average=parts["average"],
                contexts={int(client): state.tobytes() for client, state in parts["context"].items()},
            )
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"the checkpoint {path} cannot be read ({error}): start over with --overwrite.") from None


def remove(run_folder: Path) -> None:
    """Forget a run's checkpoint: it is complete."""
    folder = run_folder / CHECKPOINT
    for path in folder.glob("round-*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _checksum(arrays: Arrays) -> int:
    """Return a CRC-32 over the sums of all arrays; safetensors itself has none."""
    checksum = 0
    for name in sorted(arrays):
        checksum = zlib.crc32(digest(arrays[name].reshape(-1)), zlib.crc32(name.encode(), checksum))
    return checksum


def _named(parts: dict[str, Arrays]) -> Arrays:
    """Return the arrays of all parts, laid out as they are written."""
    return {f"{part}:{name}": np.asarray(a, order="C") for part, group in parts.items() for name, a in group.items()}
