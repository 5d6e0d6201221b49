"""Engines for runs: one for a run alone, or one that the runs of a comparison share."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from fedsparse.run.lock import LOCK
from fedsparse.scenario import Scenario

if TYPE_CHECKING:
    from fedsparse.engine import BaseGrid


class Grids:
    """Opens the engine that a scenario asks for.

    Parameters
    ----------
    shared : path, optional
        A folder of links from the one memory folder that a shared engine's clients know to the folders of the runs.
        Without it every run gets an engine of its own. Engines on a cluster elsewhere are not shared.
    verbose : bool
        Let the engine log.
    """

    def __init__(self, shared: Path | None = None, *, verbose: bool = False) -> None:
        self._shared, self._verbose = shared, verbose
        self._key: Any = None
        self._grid: BaseGrid | None = None

    @contextmanager
    def open(self, scenario: Scenario, memory: Path) -> Iterator["BaseGrid"]:
        """Yield an engine whose clients keep their error memory below `memory`, once `link` has been called."""
        if self._shared is None or scenario.engine.address is not None:
            with _make(scenario, memory, self._verbose) as grid:
                yield grid
            return
        key = (scenario.engine, scenario.data.num_clients)
        if key != self._key:
            self.close()
            self._grid = _make(scenario, self._shared, self._verbose)
            self._key = key
        assert self._grid is not None
        self._grid.states.clear()
        yield self._grid

    def link(self, memory: Path, run: str) -> None:
        """Let the clients of a shared engine find the error memory of `run` below `memory`."""
        if self._shared is None:
            return
        name = quote(run, safe="")
        target = memory.absolute() / name
        for folder in (self._shared, target):
            folder.mkdir(parents=True, exist_ok=True)
        link = self._shared / name
        link.unlink(missing_ok=True)
        os.symlink(target, link)

    def close(self) -> None:
        """Stop the engine."""
        if self._grid is not None:
            self._grid.close()
        self._grid = self._key = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._shared is not None:
            shutil.rmtree(self._shared, ignore_errors=True)


def _make(scenario: Scenario, memory: Path, verbose: bool) -> "BaseGrid":
    from fedsparse.engine import make_grid

    engine = scenario.engine
    return make_grid(
        engine.name,
        num_clients=scenario.data.num_clients,
        run_config={"memory-dir": str(memory.absolute())},
        timeout=engine.timeout,
        num_cpus=engine.num_cpus,
        num_gpus=engine.num_gpus,
        num_workers=engine.max_workers,
        address=engine.address,
        max_retries=engine.max_retries,
        # Of the output folder, whose lock is held: a node that does not see it would keep memories of its own.
        shared=[str(memory.parent / LOCK)] if engine.address is not None else [],
        verbose=verbose,
    )
