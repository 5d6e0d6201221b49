"""What can stand between a node and its server, found out step by step; each finding says what to do."""

import json
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from fedsparse.deploy.federation import Node
from fedsparse.deploy.gateway import HELLO, KEY_HEADER
from fedsparse.deploy.keys import public_key
from fedsparse.deploy.versions import versions
from fedsparse.errors import ConfigError

Level = Literal["ok", "warn", "fix"]
TIMEOUT_S = 10.0
# Flower refuses what was signed longer ago than 300 s, or more than 5 s in the future.
BEHIND_S, AHEAD_S = 300.0, 5.0


@dataclass(frozen=True)
class Finding:
    """One line of `fedsparse doctor`.

    Parameters
    ----------
    level : {"ok", "warn", "fix"}
        Whether it is fine, might hurt, or does hurt.
    what : str
        What was looked at, and found.
    todo : str
        What to do or to type.
    """

    level: Level
    what: str
    todo: str = ""


def connection(node: Node) -> Iterator[Finding]:
    """Look at the way from a node to its server; after the first thing to fix, what lies behind it is not looked at."""
    host, port = node.host, node.port
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except OSError as error:
        yield Finding(
            "fix",
            f"DNS: {host} is not known here ({error.strerror or error})",
            f"check this device's network, or name the server by its address in {node.path / 'node.toml'}",
        )
        return
    yield Finding("ok", f"DNS: {host} is {', '.join(addresses)}")
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except OSError as error:
        yield Finding(
            "fix",
            f"port: {host}:{port} cannot be reached ({error.strerror or error})",
            "start the server with `fedsparse deploy server DIR`, open that port in its firewall; the node goes on "
            "trying",
        )
        return
    yield Finding("ok", f"port: {host}:{port} is open")
    answer = _greet(node)
    if isinstance(answer, Finding):
        yield answer
        return
    yield Finding("ok", "TLS: the server's certificate is signed by this federation's authority")
    yield from _clock(answer)
    yield from _membership(node, answer)
    yield from _versions(answer)


def first_problem(node: Node) -> Finding | None:
    """Return the first thing that keeps a node from its server."""
    return next((finding for finding in connection(node) if finding.level == "fix"), None)


def _greet(node: Node) -> dict[str, Any] | Finding:
    """Say hello to the gateway; return its answer, or why there was none."""
    try:
        context = ssl.create_default_context(cafile=str(node.ca))
        key = b64encode(public_key(node.key)).decode()
    except (ssl.SSLError, OSError) as error:
        return Finding("fix", f"TLS: {node.ca} is no certificate ({error})", "copy the node's folder again")
    except ConfigError as error:
        return Finding("fix", str(error), "copy the node's folder again")
    try:
        address = f"https://{node.file.server}{HELLO}"
        before = time.time()
        response = httpx.get(address, headers={KEY_HEADER: key}, verify=context, timeout=TIMEOUT_S)
        if response.status_code != 200:
            raise ValueError(f"HTTP {response.status_code}")
        found = json.loads(response.text)
        if not isinstance(found, dict) or not isinstance(found.get("time"), int | float):
            raise ValueError("an answer of another program")
        return {**found, "here": (before + time.time()) / 2}
    except httpx.TransportError as error:
        return _tls(error, node)
    except ValueError as error:
        return Finding(
            "fix",
            f"server: what listens at {node.file.server} is not the gateway of a fedsparse federation ({error})",
            "check host and port in node.toml against the server's federation.toml",
        )


def _tls(error: httpx.TransportError, node: Node) -> Finding:
    text, now = str(error), time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if "certificate has expired" in text:
        return Finding(
            "fix",
            f"TLS: the server's certificate has expired, by this device's clock ({now})",
            "set the clock if it is wrong; else, on the server: fedsparse deploy renew DIR, and start it again",
        )
    if "not yet valid" in text:
        return Finding(
            "fix",
            f"TLS: the server's certificate is not valid yet, by this device's clock ({now})",
            "set this device's clock: timedatectl set-ntp true",
        )
    if "IP address mismatch" in text or "Hostname mismatch" in text:
        return Finding(
            "fix",
            f"TLS: the server's certificate is for another name than {node.host}",
            "on the server, set host in federation.toml, then: fedsparse deploy renew DIR",
        )
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return Finding(
            "fix",
            "TLS: the server's certificate is signed by another authority: this is not the server of this federation",
            f"check the server's address in {node.path / 'node.toml'}; copy the node's folder from the right server",
        )
    return Finding("fix", f"TLS: no secure connection to {node.file.server} ({text or type(error).__name__})", "")


def _clock(answer: dict[str, Any]) -> Iterator[Finding]:
    ahead = answer["here"] - answer["time"]
    text = f"clock: {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    if not -BEHIND_S < ahead < AHEAD_S:
        yield Finding("fix", text, "set this device's clock, for example: timedatectl set-ntp true")
    elif not -BEHIND_S / 10 < ahead < AHEAD_S / 2:
        yield Finding("warn", text, "let the clock be set automatically: timedatectl set-ntp true")
    else:
        yield Finding("ok", text)


def _membership(node: Node, answer: dict[str, Any]) -> Iterator[Finding]:
    if answer.get("node") is None:
        yield Finding(
            "fix",
            f"key: this node's key is not registered with the federation {answer.get('federation')!r}",
            "on the server: fedsparse deploy add DIR makes a new node's folder; copy that here",
        )
    elif answer["node"] != str(node.file.node):
        yield Finding(
            "fix",
            f"key: it is registered for node {answer['node']}, node.toml says node = {node.file.node}",
            f"set node = {answer['node']} in node.toml",
        )
    else:
        yield Finding("ok", f"key: registered as node {answer['node']} of {answer.get('federation')!r}")


def _versions(answer: dict[str, Any]) -> Iterator[Finding]:
    mine = versions()
    for name in ("protocol", "flwr"):
        if answer.get(name) != mine[name]:
            yield Finding(
                "fix" if name == "protocol" else "warn",
                f"version: the server has {name} {answer.get(name)}, this device {mine[name]}",
                "install the same version of fedsparse on both sides",
            )
            return
    yield Finding("ok", f"version: fedsparse {mine['fedsparse']}, flwr {mine['flwr']} on both sides")
