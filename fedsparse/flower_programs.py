"""Flower's programs: where they are, what they are to find around them, and their words without colours."""

import os
import re
import shutil
import socket
import sys
from pathlib import Path

from fedsparse.errors import RunError

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def program(name: str) -> str:
    """Return the path of a program of the package flwr: beside this Python, or else anywhere on the PATH.

    Raises
    ------
    RunError
        It is not installed.
    """
    found = shutil.which(name, path=_search_path())
    if found is None:
        raise RunError(f"the program {name!r} of the package flwr is not installed next to {sys.executable}.")
    return found


def flower_environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of Flower's processes: quiet, with modules as importable as they are here.

    Parameters
    ----------
    home : path
        Flower's own folder.
    **more
        More variables.
    """
    modules = [str(Path(entry or os.getcwd()).absolute()) for entry in sys.path if os.path.exists(entry or ".")]
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(modules),
        "PATH": _search_path(),
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        **more,
    }


def reach_loopback_directly() -> None:
    """Let no proxy of the environment stand between this process, or its children, and this machine's own servers."""
    for name in ("NO_PROXY", "no_proxy"):
        there = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*there, "localhost", "127.0.0.1", "::1"]))


def free_port() -> int:
    """Return a port of this machine that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def without_colours(text: str) -> str:
    """Return what a terminal would show, in one colour."""
    return _COLOURS.sub("", text)


def _search_path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
