"""What the engine tests share: the client apps on the path, one Ray instance, and messages."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedsparse.engine import FIRST_NODE_ID, InlineGrid, _workspace

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _identity() -> None:
    """Messages can be built once this process has had an engine."""
    InlineGrid("engine_apps:app", num_clients=1).close()


@pytest.fixture(scope="module")
def ray_instance() -> Iterator[None]:
    """A Ray instance of this process that believes in 4 CPUs and 2 GPUs."""
    from fedsparse.engine.ray_session import RaySession

    session = RaySession(options={"num_cpus": 4, "num_gpus": 2}, object_store_memory=200 * 2**20)
    yield
    session.close()


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test alone for temporary folders; its path is short, as sockets need it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(_workspace, "BASE", Path(folder))
        yield Path(folder)


@pytest.fixture
def model() -> ArrayRecord:
    """Big enough for the object store, with an array that is not."""
    return ArrayRecord({"w": Array(np.arange(50_000, dtype=np.float32)), "v": Array(np.ones((2, 3), order="F"))})


def ask(kind: str, clients: Any, arrays: ArrayRecord | None = None, **config: Any) -> list[Message]:
    """One message for each client; all carry the same content, as Flower's strategies do it."""
    content = RecordDict({"config": ConfigRecord({"list": [1, 2], **config})})
    if arrays is not None:
        content["arrays"] = arrays
    return [Message(content, FIRST_NODE_ID + client, kind) for client in clients]
