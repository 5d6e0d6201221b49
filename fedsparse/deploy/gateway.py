"""The federation's only open port: passes on what nodes need of the SuperLink, and nothing else.

Flower's SuperLink has the API for nodes, the one that submits code and the one of running apps on a single port, and
the second has no login. It therefore listens on this machine alone, and this process hands through to it what comes
for ``/v1/fleet/NAME`` signed by a registered node. It counts each node's bytes, and tells nodes the time.
"""

import asyncio
import json
import logging
import os
import re
import ssl
import sys
import time
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Awaitable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from google.protobuf.message import DecodeError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fedsparse.deploy.federation import Federation
from fedsparse.deploy.replay import PULL, PUSH_MESSAGES, PUSH_OBJECT, Ask, Replay
from fedsparse.deploy.versions import versions
from fedsparse.errors import FedsparseError, brief
from fedsparse.run.folder import write_text

HELLO, KEY_HEADER = "/fedsparse/hello", FLEET_HTTP_PUBLIC_KEY_HEADER
# Whole and literally: of "/v1/fleet/../control/start-run" the HTTP client below would make the control API's path.
FLEET = re.compile(r"/v1/fleet/[a-z-]+")
TRAFFIC = "traffic.json"
NODES_AT_ONCE = 4  # that may send requests of the greatest length; others are put off
LOGGED_A_MINUTE = 60  # refusals of a kind: a stranger must not hide, or push out of the log, what matters
HEARTBEAT = "/v1/fleet/send-node-heartbeat"
WRITE_EVERY_S, BACKEND_TIMEOUT_S = 2.0, 120.0
# A node that gets no message asks again after three seconds: its question is held until there is one. Nodes wait 30 s
# for an answer. With many nodes the SuperLink is asked less often for each.
HOLD = "FEDSPARSE_GATEWAY_HOLD_S"
HOLD_S, LOOK_S, LOOK_S_PER_NODE = float(os.environ.get(HOLD, "20")), 0.2, 0.01
# What concerns one connection alone.
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}

log = logging.getLogger("fedsparse.gateway")


class Gateway:
    """An ASGI application in front of a SuperLink.

    Parameters
    ----------
    federation : Federation
        Whose nodes may come in.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._nodes = federation.public_keys()
        self._limit = federation.file.max_request_mb << 20
        context = ssl.create_default_context(cafile=str(federation.ca))
        self._backend = httpx.AsyncClient(
            base_url=f"https://{federation.inner}", verify=context, timeout=BACKEND_TIMEOUT_S
        )
        self._path = federation.server / TRAFFIC
        self._counts: dict[str, dict[str, Any]] = defaultdict(lambda: {"requests": 0, "up": 0, "down": 0})
        self._counts.update(read_traffic(federation))
        self._written, self._held, self._replay = 0.0, 0, Replay()
        self._later: asyncio.TimerHandle | None = None
        self._in_flight: dict[str, int] = defaultdict(int)  # node -> bytes of its requests that are being worked on
        self._minute, self._refused = 0, Counter[str]()  # reason -> how often in this minute
        routes = [
            Route(HELLO, self.hello, methods=["GET"]),
            Route("/{path:path}", self.forward, methods=["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"]),
        ]
        self.app = Starlette(routes=routes)

    async def hello(self, request: Request) -> Response:
        """Tell who this is, what time it is, and whether the caller's key is known."""
        node = self._node(request)
        answer = {"federation": self._federation.file.name, "time": time.time(), "node": node, **versions()}
        return JSONResponse(answer)

    async def forward(self, request: Request) -> Response:
        """Pass on a node's request; refuse all else."""
        peer = request.client.host if request.client else "?"
        node = self._node(request)
        if not FLEET.fullmatch(request.url.path) or request.method != "POST":
            self._refuse(peer, request.url.path, "it is not for nodes")
            return PlainTextResponse("not found\n", status_code=404)
        if node is None:
            self._refuse(peer, request.url.path, "its key is not registered")
            return PlainTextResponse("this node's key is not registered with the federation\n", status_code=401)
        # Before anything that concerns the node: its public key is no secret.
        if not is_signed(request.headers):
            self._refuse(peer, request.url.path, f"it is not signed with the key of node {node}, or at another time")
            return PlainTextResponse("the request is not signed with this key, now\n", status_code=401)
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                self._in_flight[node] += len(part)
                if (refusal := self._room(node, peer, request.url.path, len(body))) is not None:
                    return refusal
            return await self._pass_on(node, peer, request, bytes(body))
        finally:
            self._in_flight[node] -= len(body)

    def _room(self, node: str, peer: str, path: str, size: int) -> Response | None:
        """Refuse a request that is too long by itself, or with all others."""
        if size > self._limit:
            self._refuse(f"{peer} (node {node})", path, "it is too large")
            return PlainTextResponse("the request is too large\n", status_code=413)
        if self._in_flight[node] > self._limit or sum(self._in_flight.values()) > NODES_AT_ONCE * self._limit:
            self._refuse(f"{peer} (node {node})", path, "too much comes at once")
            return PlainTextResponse("too much comes at once\n", status_code=503)  # nodes try again
        return None

    async def _pass_on(self, node: str, peer: str, request: Request, body: bytes) -> Response:
        if request.url.path == PUSH_MESSAGES and not is_own(body):
            self._refuse(f"{peer} (node {node})", request.url.path, "it is in the name of another node")
            return PlainTextResponse("a node may send its own messages only\n", status_code=403)
        headers = [(key, value) for key, value in request.headers.items() if key not in _HOP]
        try:
            answer = await self._ask(node, request, body, headers)
        except httpx.HTTPError as error:
            # Nodes try again after 502 to 504.
            log.warning("the SuperLink does not answer (%s)", type(error).__name__)
            return PlainTextResponse("the SuperLink is away\n", status_code=503)
        self._count(node, peer, len(body), len(answer.content))
        kept = {key: value for key, value in answer.headers.items() if key not in _HOP and key != "content-encoding"}
        return Response(answer.content, status_code=answer.status_code, headers=kept)

    async def _ask(self, node: str, request: Request, body: bytes, headers: list[tuple[str, str]]) -> httpx.Response:
        """Ask the SuperLink, or give again what may not have arrived."""
        path = request.url.path

        def ask() -> Awaitable[httpx.Response]:
            return self._backend.post(path, content=body, headers=headers)

        if path == PULL:
            return await self._message(node, request, ask)
        if path != HEARTBEAT:  # that comes from another thread
            self._replay.moved_on(node)
        if path in (PUSH_MESSAGES, PUSH_OBJECT):
            return await self._replay.push(node, path, body, ask)
        return await ask()

    async def _message(self, node: str, request: Request, ask: Ask) -> httpx.Response:
        """Get a node's next message; if there is none yet, wait for it."""
        if (again := self._replay.not_taken(node)) is not None:
            return again
        until = time.monotonic() + HOLD_S
        answer = await ask()
        self._held += 1
        try:
            while answer.status_code == 200 and not _has_message(answer.content) and time.monotonic() < until:
                await asyncio.sleep(max(LOOK_S, LOOK_S_PER_NODE * self._held))
                if await request.is_disconnected():
                    return answer
                answer = await ask()
        finally:
            self._held -= 1
        if answer.status_code == 200 and _has_message(answer.content):
            self._replay.hand(node, answer)
        return answer

    def _node(self, request: Request) -> str | None:
        try:
            return self._nodes.get(b64decode(request.headers.get(KEY_HEADER, ""), validate=True))
        except ValueError:
            return None

    def _count(self, node: str, peer: str, up: int, down: int) -> None:
        entry = self._counts[node]
        entry["requests"] += 1
        entry["up"] += up
        entry["down"] += down
        entry["address"], entry["seen"] = peer, time.time()
        self._write()

    def _refuse(self, peer: str, path: str, reason: str) -> None:
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            for kind, count in self._refused.items():
                if count > LOGGED_A_MINUTE:
                    log.warning("refused %d more in that minute: %s", count - LOGGED_A_MINUTE, kind)
            self._minute, self._refused = minute, Counter()
        self._refused[reason] += 1
        if self._refused[reason] <= LOGGED_A_MINUTE:
            log.warning("refused %s from %s: %s", brief(path, 100), peer, reason)
        self._counts["refused"]["requests"] += 1
        self._write()

    def _write(self) -> None:
        """Write the counts, now or when it is time."""
        wait = self._written + WRITE_EVERY_S - time.monotonic()
        if wait > 0:
            if self._later is None:
                self._later = asyncio.get_running_loop().call_later(wait, self._write)
        else:
            self._written, self._later = time.monotonic(), None
            try:
                write_text(self._path, json.dumps(self._counts))
            except OSError as error:
                log.warning("cannot write %s: %s", self._path, error.strerror)


def is_signed(headers: Mapping[str, str]) -> bool:
    """Whether the owner of the public key in the headers signed the time in them, which is now; as Flower has it."""
    try:
        key = bytes_to_public_key(b64decode(headers[KEY_HEADER], validate=True))
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        timestamp = headers[TIMESTAMP_HEADER]
        age = time.time() - datetime.fromisoformat(timestamp).timestamp()
        recent = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        return recent and verify_signature(key, timestamp.encode("ascii"), signature)
    except (KeyError, ValueError, OverflowError):
        return False


def is_own(body: bytes) -> bool:
    """Whether all messages that a node pushes name it as their sender; Flower does not look."""
    try:
        pushed = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    return all(message.metadata.src_node_id == pushed.node.node_id for message in pushed.messages_list)


def _has_message(answer: bytes) -> bool:
    try:
        return len(PullMessagesResponse.FromString(answer).messages_list) > 0
    except DecodeError:
        return True  # not for us to judge


def read_traffic(federation: Federation) -> dict[str, dict[str, Any]]:
    """Return what has been counted so far: node -> requests, bytes up and down, address, when it was last seen."""
    try:
        found = json.loads((federation.server / TRAFFIC).read_text(encoding="utf-8"))
        return {name: entry for name, entry in found.items() if isinstance(entry, dict)}
    except (OSError, ValueError, AttributeError):
        return {}


def main() -> int:
    """Serve until killed; the argument is the federation's folder."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.ERROR)
    try:
        federation = Federation.open(Path(sys.argv[1]))
        gateway = Gateway(federation)
    except FedsparseError as error:
        print(error, file=sys.stderr)
        return 2
    config = uvicorn.Config(
        gateway.app,
        host=federation.file.bind,
        port=federation.file.port,
        ssl_certfile=str(federation.certificate),
        ssl_keyfile=str(federation.key),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
    )
    uvicorn.Server(config).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
