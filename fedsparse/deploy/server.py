"""The server of a federation: Flower's SuperLink for this machine alone, its executor, and the gateway for nodes."""

import errno
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress

import tomli_w

from fedsparse.deploy.control import Control
from fedsparse.deploy.federation import FEDERATION, Federation
from fedsparse.deploy.server_files import check_server_files
from fedsparse.deploy.supervise import QUICK, Child, Sayings, Supervisor
from fedsparse.errors import ConfigError, RunError
from fedsparse.flower_programs import flower_environment, program
from fedsparse.run.folder import write_text
from fedsparse.run.lock import exclusive

CONNECTION = "federation"
HEALTHY_S = 60.0


class Server:
    """Keeps a federation's server running.

    Parameters
    ----------
    federation : Federation
        Which.
    say : callable
        Gets what people should know.
    """

    def __init__(self, federation: Federation, say: Callable[[str], None]) -> None:
        self._federation, self._say = federation, Sayings(say)
        logs, environment = federation.server / "logs", server_environment(federation)
        ca = str(federation.ca)
        superlink = [
            program("flower-superlink"),
            *("--ssl-ca-certfile", ca, "--ssl-certfile", str(federation.certificate)),
            *("--ssl-keyfile", str(federation.key), "--enable-supernode-auth", "--isolation", "process"),
            *("--database", str(federation.database), "--disable-runtime-dependency-installation"),
            *("--host", "127.0.0.1", "--port", str(federation.file.inner_port)),
        ]
        executor = [program("flower-superexec"), "--root-certificates", ca]
        executor += ["--runtime-api-address", federation.inner]
        gateway = [sys.executable, "-m", "fedsparse.deploy.gateway", str(federation.path)]
        self.superlink = Child("superlink", superlink, environment, logs / "superlink.log")
        self.executor = Child("executor", executor, environment, logs / "executor.log")
        self.gateway = Child("gateway", gateway, environment, logs / "gateway.log")

    def run(self) -> None:
        """Start everything; register new nodes; go on until SIGINT or SIGTERM.

        Raises
        ------
        ConfigError
            Another server runs in the same folder, a port is taken, or one of its files would not do.
        """
        federation = self._federation
        for finding in check_server_files(federation):
            self._say(f"{finding.what}: {finding.todo}")
        with exclusive(federation.server, f"a server of {federation.path} runs already: stop it first."):
            _check_ports(federation)
            _write_connection(federation)
            # The executor ends with its apps when it cannot reach the SuperLink: it starts when that is there.
            supervisor = Supervisor([self.superlink], mark_of(federation), self._ended, self._tick)
            self._supervisor, self._ready, self._registered = supervisor, False, list[str]()
            self._began = time.monotonic()
            supervisor.run()

    def _tick(self) -> None:
        """Start what needs the SuperLink once that answers, and tell when nodes can come."""
        if self._ready or not self.superlink.running:
            return
        if self.gateway not in self._supervisor.children:
            if healthy(self._federation):
                with suppress(RunError):  # it has gone again: at the next tick
                    self._registered = Control(self._federation.inner, self._federation.ca).register(
                        self._federation.public_keys()
                    )
                    self._supervisor.children += [self.executor, self.gateway]
            elif time.monotonic() - self._began > HEALTHY_S:
                self._began = time.monotonic()
                self._say("the SuperLink does not answer yet; its log ends:\n" + "\n".join([*self.superlink.tail][-5:]))
        elif _listens(self._federation):
            self._ready = True
            file = self._federation.file
            self._say(f"the server of {file.name!r} listens on {file.bind}:{file.port} for {len(file.nodes)} nodes")
            if self._registered:
                self._say(f"registered the keys of {len(self._registered)} nodes: {', '.join(self._registered)}")
            self._say(f"logs are in {self._federation.server / 'logs'}; stop with Ctrl-C")

    def _ended(self, child: Child, code: int) -> None:
        self._say(child.farewell(code), f"{child.name} {code}")


def server_environment(federation: Federation) -> dict[str, str]:
    """Return the environment of the server's processes; it has the mark by which they are found."""
    return flower_environment(federation.server / "flower", FEDSPARSE_FEDERATION=mark_of(federation), **QUICK)


def mark_of(federation: Federation) -> str:
    """Return the text that marks the processes of a server."""
    return f"fedsparse-server:{federation.path}/."  # no other path's begins with it


def healthy(federation: Federation) -> bool:
    """Whether the SuperLink answers."""
    import ssl

    context = ssl.create_default_context(cafile=str(federation.ca))
    try:
        with urllib.request.urlopen(f"https://{federation.inner}/health", timeout=2, context=context):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _listens(federation: Federation) -> bool:
    host = federation.file.bind
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        socket.create_connection((host, federation.file.port), timeout=1).close()
        return True
    except OSError:
        return False


def _check_ports(federation: Federation) -> None:
    for host, port, key in (
        (federation.file.bind, federation.file.port, "port"),
        ("127.0.0.1", federation.file.inner_port, "inner_port"),
    ):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
                todo = f"free it, or change {key}" if taken else "bind must be an address of this machine: change it"
                raise ConfigError(
                    f"cannot listen on {host}:{port} ({error.strerror}): {todo} in {federation.path / FEDERATION}."
                ) from None


def _write_connection(federation: Federation) -> None:
    """Let `flwr` commands with this FLWR_HOME find the SuperLink."""
    folder = federation.server / "flower"
    folder.mkdir(mode=0o700, exist_ok=True)
    connection = {"address": federation.inner, "root-certificates": str(federation.ca)}
    write_text(folder / "config.toml", tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: connection}}))
