"""What the deployment tests share."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fleet import Fleet


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Make federations that end with the test."""
    made: list[Fleet] = []

    def make(nodes: int, host: str = "127.0.0.1", name: str = "fleet") -> Fleet:
        made.append(Fleet(tmp_path / name, nodes, host))
        return made[-1]

    yield make
    for fleet in made:
        fleet.stop()
