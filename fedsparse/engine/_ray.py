"""Ray, imported with its notices off: about some of them it decides only once."""

from collections.abc import Iterator
from contextlib import contextmanager

from ._quiet import QUIET, environment

with environment(QUIET):
    import ray
    from ray import cloudpickle
    from ray._private import ray_constants
    from ray.exceptions import RayError, RayTaskError

__all__ = ["RayError", "RayTaskError", "cloudpickle", "loopback_only", "ray"]


@contextmanager
def loopback_only() -> Iterator[None]:
    """Let a Ray instance that is started meanwhile listen to this machine alone, as Ray does on macOS and Windows.

    Its ports have no login: whoever reaches them can run code. Ray reads the switch for this when it is imported, and
    the processes that it starts read it from their environment.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
