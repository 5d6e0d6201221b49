"""Ray, imported with its notices off: about some of them it decides only once."""

from ._quiet import QUIET, environment

with environment(QUIET):
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError, RayTaskError

__all__ = ["RayError", "RayTaskError", "cloudpickle", "ray"]
