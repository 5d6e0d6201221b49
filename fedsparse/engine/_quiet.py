"""Environment variables that keep Ray from talking to the user, and from talking home."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Replies say when a worker died; Ray says so in ten lines.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed while executing",
}


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set yet, for as long as Ray's processes are started."""
    mine = {key: value for key, value in values.items() if key not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for key in mine:
            os.environ.pop(key, None)
