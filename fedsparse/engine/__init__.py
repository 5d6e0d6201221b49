"""Engines that run the clients: implementations of Flower's `Grid`, and a starter for Flower's own engine.

``inline`` runs clients in this process, ``ray`` on Ray actors; both give the same bits for the same seed.
`run_with_flower` runs a scenario on Flower's Simulation Engine.
"""

from typing import TYPE_CHECKING, Any

from fedsparse.errors import unknown_name

from .base import DEFAULT_CLIENT_APP, FIRST_NODE_ID, BaseGrid
from .inline import InlineGrid

if TYPE_CHECKING:
    from .flower import run_with_flower
    from .ray_grid import RayGrid

__all__ = [
    "DEFAULT_CLIENT_APP",
    "ENGINES",
    "FIRST_NODE_ID",
    "BaseGrid",
    "InlineGrid",
    "RayGrid",
    "make_grid",
    "run_with_flower",
]

ENGINES = ("inline", "ray")


def make_grid(name: str, client_app: Any = DEFAULT_CLIENT_APP, *, num_clients: int, **options: Any) -> BaseGrid:
    """Build an engine by its name.

    Parameters
    ----------
    name : str
        ``"inline"`` or ``"ray"``.
    client_app, num_clients
        As in `BaseGrid`.
    **options
        More arguments of `BaseGrid` and `RayGrid`; those that only concern Ray are left out for ``"inline"``.
    """
    if name == "ray":
        from .ray_grid import RayGrid

        return RayGrid(client_app, num_clients=num_clients, **options)
    if name == "inline":
        common = {key: options[key] for key in ("run_config", "node_config", "timeout") if key in options}
        return InlineGrid(client_app, num_clients=num_clients, **common)
    raise unknown_name("engine", name, ENGINES)


def __getattr__(name: str) -> Any:
    # Ray takes a quarter of a second to import, and not every use of an engine needs it.
    if name == "RayGrid":
        from .ray_grid import RayGrid

        return RayGrid
    if name == "run_with_flower":
        from .flower import run_with_flower

        return run_with_flower
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
