"""How many clients run at the same time with what each of them asks for."""

import time
from collections.abc import Mapping

from fedsparse.errors import ConfigError

SETTLE_S = 5.0


def workers_that_fit(num_cpus: float, num_gpus: float, asked: int | None, most: int) -> int:
    """Return how many workers with these resources run at the same time: `asked`, or all that fit, at most `most`.

    A worker lives on one node, and a fraction of a GPU on one GPU.

    Raises
    ------
    ConfigError
        Where not even one, or not the number asked, fits: what was asked and what is free.
    """
    from ._ray import ray

    nodes = [node["Resources"] for node in ray.nodes() if node.get("Alive")]  # type: ignore[no-untyped-call]
    total = min(sum(_fit(node, num_cpus, num_gpus) for node in nodes), asked or most, most)
    deadline = time.monotonic() + SETTLE_S
    while True:
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        fit = min(total, _fit(free, num_cpus, num_gpus))
        # What an engine before this one gave back shows up a moment later.
        if fit == total or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if fit < min(asked or 1, most):
        have = "; ".join(f"{node.get('CPU', 0.0):g} CPUs and {node.get('GPU', 0.0):g} GPUs" for node in nodes)
        raise ConfigError(
            f"{asked or 1} client(s) at a time with {num_cpus:g} CPUs and {num_gpus:g} GPUs each do not fit: Ray has "
            f"{have} (per node), of which {free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs are free. "
            "Lower num_cpus or num_gpus, or the number of workers."
        )
    return fit


def check_resources(num_cpus: float, num_gpus: float) -> None:
    """Refuse resource requests that no machine could meet."""
    for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"{name} must be a number of at least 0, got {value!r}.")
        if value > 1 and value != int(value):
            raise ConfigError(f"{name} must be a fraction up to 1 or a whole number, got {value!r}.")
    if num_cpus == 0:
        raise ConfigError("num_cpus must be above 0; a fraction such as 0.5 lets more clients run at once.")


def _fit(resources: Mapping[str, float], num_cpus: float, num_gpus: float) -> int:
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    by_cpu = int(cpus / num_cpus + 1e-9)
    if num_gpus == 0:
        return by_cpu
    by_gpu = int(gpus) * int(1 / num_gpus + 1e-9) if num_gpus < 1 else int(gpus / num_gpus)
    return min(by_cpu, by_gpu)
