"""Run a scenario on Flower's own Simulation Engine: `flwr run`, with a SuperLink of its own that goes away again."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedsparse.errors import ConfigError, RunError
from fedsparse.flower_programs import flower_environment, free_port, program, without_colours
from fedsparse.processes import stop_all

from ._quiet import QUIET
from ._workspace import Workspace
from .resources import check_resources

SERVER_APP, CLIENT_APP = "fedsparse.flower_app:server_app", "clients.client_app:app"
HEALTHY_S = 60.0
TAIL = 40  # lines of the log that an error shows


def run_with_flower(
    scenario_json: str,
    *,
    out: Path,
    num_clients: int,
    client_cpus: float = 1,
    client_gpus: float = 0.0,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    memory_dir: Path | None = None,
    run_config: Mapping[str, str | int | float | bool] | None = None,
    server_app: str = SERVER_APP,
    client_app: str = CLIENT_APP,
    on_line: Callable[[str], None] | None = None,
) -> int:
    """Run a scenario through `flwr run` and wait until it is finished.

    Flower gets a temporary app whose components are installed modules, a SuperLink of its own on a free port, and a
    home and a Ray instance of its own; no other run on this machine sees or disturbs them, and nothing of them is left
    afterwards. Paths in the scenario must be absolute.

    Parameters
    ----------
    scenario_json : str
        The scenario; the apps find it in their run config as ``scenario``.
    out : Path
        Folder of the run, in the run config as ``out``.
    num_clients : int
        Number of simulated SuperNodes.
    client_cpus, client_gpus : float
        What one client needs. Flower knows only whole CPUs.
    num_cpus, num_gpus : int, optional
        What all clients may use together; by default all there is.
    memory_dir : Path, optional
        Where clients keep their error memory, in the run config as ``memory-dir``.
    run_config : mapping, optional
        More entries of the run config.
    server_app, client_app : str
        The components, as ``"package.module:attribute"`` of modules that can be imported here.
    on_line : callable, optional
        Gets each line of the log.

    Returns
    -------
    int
        0.

    Raises
    ------
    ConfigError
        Where the resources cannot be asked of Flower.
    RunError
        Where the run failed, with the end of the log.
    """
    check_resources(client_cpus, client_gpus)
    if client_cpus != int(client_cpus):
        raise ConfigError(
            f"engine 'flower' gives a client whole CPUs only, got num_cpus={client_cpus!r}. Use 1, or engine 'ray'."
        )
    config = {"scenario": scenario_json, "out": str(Path(out).resolve()), "memory-dir": "", **(run_config or {})}
    if memory_dir is not None:
        config["memory-dir"] = str(Path(memory_dir).resolve())
    federation = {
        "num-supernodes": num_clients,
        "client-resources-num-cpus": int(client_cpus),
        "client-resources-num-gpus": float(client_gpus),
        "init-args-num-cpus": num_cpus,
        "init-args-num-gpus": num_gpus,
    }
    overrides = " ".join(f"{key}={value}" for key, value in federation.items() if value is not None)
    with Workspace() as workspace:
        folder = workspace.path
        for name in ("home", "cwd", "app"):
            (folder / name).mkdir()
        write_app(folder / "app", config, server_app, client_app)
        environment = _environment(folder)
        superlink = None
        try:
            superlink = _start_superlink(folder, environment)
            _follow(folder, environment, overrides, on_line)
        finally:
            stop_all(str(folder), superlink)
    return 0


def write_app(folder: Path, config: Mapping[str, Any], server_app: str, client_app: str) -> None:
    """Write a Flower app whose components are installed modules, so that nothing of them travels."""
    components = {"serverapp": server_app, "clientapp": client_app}
    document = {
        "project": {"name": "fedsparse-run", "version": "0.1.0", "description": "A run", "license": "Apache-2.0"},
        "tool": {"flwr": {"app": {"publisher": "fedsparse", "components": components, "config": dict(config)}}},
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(document), encoding="utf-8")


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of all processes; each value with `folder` in it also marks them as ours."""
    return {
        **QUIET,
        **flower_environment(folder / "home"),
        "RAY_ADDRESS": "local",
        # Its ports have no login; on this machine alone they need none.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_TMPDIR": str(folder),
        "COLUMNS": "200",
    }


def _start_superlink(folder: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    log = folder / "superlink.log"
    for _ in range(3):
        port = free_port()
        command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
        with log.open("wb") as stream:
            process = _spawn(command, folder, environment, stdout=stream, stderr=subprocess.STDOUT)
        if _healthy(port, process):
            connection = {"address": f"127.0.0.1:{port}", "insecure": True}
            text = tomli_w.dumps({"superlink": {"default": "here", "here": connection}})
            (folder / "home" / "config.toml").write_text(text, encoding="utf-8")
            return process
    raise RunError(f"Flower's SuperLink does not start:\n{_tail(log.read_text(errors='replace').splitlines())}")


def _healthy(port: int, process: "subprocess.Popen[bytes]") -> bool:
    deadline = time.monotonic() + HEALTHY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return process.poll() is None
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    process.kill()
    process.wait()
    return False


def _follow(
    folder: Path, environment: Mapping[str, str], overrides: str, on_line: Callable[[str], None] | None
) -> None:
    """Submit the run, pass its log on until the end, and raise if it failed."""
    lines: deque[str] = deque(maxlen=TAIL)
    command = ["flwr", "run", str(folder / "app"), "here", "--stream", "--federation-config", overrides]
    with _spawn(command, folder, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        try:
            for raw in process.stdout:
                line = without_colours(raw.decode(errors="replace")).rstrip()
                lines.append(line)
                if on_line is not None:
                    on_line(line)
        except BaseException:
            process.kill()
            raise
    status, details = _status(folder, environment)
    while status is not None and not status.startswith("finished"):
        time.sleep(0.5)
        status, details = _status(folder, environment)
    if status != "finished:completed":
        raise RunError(
            f"Flower's run failed ({details or status or 'it was not accepted'}). Its log ends:\n{_tail(lines)}"
        )


def _status(folder: Path, environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Ask for the status of the only run; the exit code of `flwr run --stream` says nothing about it."""
    with _spawn(["flwr", "ls", "here", "--format", "json"], folder, environment, stdout=subprocess.PIPE) as process:
        text = process.communicate()[0].decode(errors="replace")
    try:
        runs = json.loads(text[text.index("{") :])["runs"]
        return str(runs[0]["status"]), str(runs[0]["status-details"])
    except (ValueError, KeyError, IndexError):
        return None, ""


def _spawn(
    command: list[str], folder: Path, environment: Mapping[str, str], **streams: Any
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [program(command[0]), *command[1:]],
        cwd=folder / "cwd",
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        **streams,
    )


def _tail(lines: Any) -> str:
    return "\n".join(list(lines)[-TAIL:])
