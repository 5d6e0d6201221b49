"""What the clients' error memories will take, said before anything is trained."""

import logging
import shutil
from math import ceil
from pathlib import Path

from fedsparse.errors import ConfigError
from fedsparse.run.folder import existing
from fedsparse.scenario import Scenario

log = logging.getLogger(__name__)

WORTH_A_WORD = 10**9  # bytes


def memory_bytes(scenario: Scenario, num_parameters: int) -> int:
    """Return the most bytes that the error memories of a run can take: N residuals of d numbers, and velocities."""
    from strategies.policies import make_policy

    compression, train = scenario.compression, scenario.train
    if not compression.error_memory or make_policy(compression.uplink).lossless:
        return 0
    cohort = ceil((train.clients_per_round or scenario.data.num_clients) * (1 + scenario.devices.over_select))
    clients = min(scenario.data.num_clients, cohort * scenario.rounds)
    vectors = 2 if compression.momentum_correction else 1
    return clients * vectors * num_parameters * (2 if compression.memory_dtype == "float16" else 4)


def check_disk(scenario: Scenario, num_parameters: int, folder: Path) -> None:
    """Refuse a run whose error memories do not fit on the disk; say what they take where it is much.

    Raises
    ------
    ConfigError
        There is not enough space.
    """
    need = memory_bytes(scenario, num_parameters)
    free = shutil.disk_usage(existing(folder)).free
    what = f"the clients' error memories take up to {_size(need)} in {folder}, {_size(free)} are free"
    if need > free:
        half = 'compression.memory_dtype = "float16", ' if scenario.compression.memory_dtype == "float32" else ""
        raise ConfigError(f"{what}: choose another disk with --out, {half}fewer clients or rounds, or a smaller model.")
    if need >= WORTH_A_WORD:
        log.warning(what)


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 10**9 else f"{count / 1e6:.3g} MB"
