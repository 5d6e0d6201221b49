"""The ClientApp of the deployment tests: real training, with faults at chosen moments and a record of what happened.

``$FEDSPARSE_TEST_DIR`` has plan.json: "client:round" -> what is to go wrong there, once. It gets, for each client and
round, delta-*.npy (the update before compression) and frame-*.bin (what was committed to the error memory).
"""

import json
import os
import signal
import struct
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

from clients import CompressionMod
from clients.client_app import make_app
from fedsparse import protocol
from fedsparse.compression import Compressor, encode
from fedsparse.compression.frame import decode_own
from fedsparse.compression.layout import Layout
from fedsparse.processes import marked
from fedsparse.protocol import FRAME_NAME, FRAME_STYPE, KEY, Directive, from_record, only, records, views

HERE = Path(os.environ.get("FEDSPARSE_TEST_DIR", "."))
_now: dict[str, Directive] = {}


def due(directive: Directive) -> str | None:
    """Return what is to go wrong now; each thing goes wrong once."""
    try:
        plan = json.loads((HERE / "plan.json").read_text())
    except OSError:
        return None
    kind = plan.get(f"{directive.client}:{directive.server_round}")
    return None if kind is None or fired(directive).exists() else kind


def fired(directive: Directive) -> Path:
    return HERE / f"fired-{directive.client}-{directive.server_round}"


def die(directive: Directive) -> None:
    """Kill this node: its SuperNode, its executor, and this process."""
    fired(directive).touch()
    for pid in marked(os.environ["FEDSPARSE_NODE"]):
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def outermost(message: Message, context: Context, call_next) -> Message:
    """Outside of the compression: what a hostile or dying node does to a finished reply."""
    record = records(message.content, ConfigRecord).get(KEY)
    if record is None:
        return call_next(message, context)
    directive = _now["directive"] = from_record(Directive, record)
    kind = due(directive)
    if kind == "before":
        die(directive)
    if kind == "old":
        fired(directive).touch()
        protocol.PROTOCOL = 1
    if kind == "hang":
        fired(directive).touch()
        time.sleep(3600)
    reply = call_next(message, context)
    if not reply.has_content():
        return reply
    frame = bytes(only(reply.content, ArrayRecord)[FRAME_NAME].data)
    (HERE / f"frame-{directive.client}-{directive.server_round}.bin").write_bytes(frame)
    if kind == "stored":
        die(directive)
    if kind == "no message":  # each time that it is asked in this round
        MetricRecord.deflate = lambda self: add_header_to_object_body(object_body=b"\xff\xfe", obj=self)
    if kind in TAMPER:
        fired(directive).touch()
        frame = TAMPER[kind](frame, directive)
        reply.content["arrays"] = ArrayRecord({FRAME_NAME: Array("uint8", (len(frame),), FRAME_STYPE, frame)})
    return reply


def innermost(message: Message, context: Context, call_next) -> Message:
    """Inside of the compression: the plain update."""
    arrays = views(only(message.content, ArrayRecord))
    reply = call_next(message, context)
    directive = _now.get("directive")
    if directive is not None and reply.has_content():
        layout = Layout.of(arrays, directive.exact.split("\n"), directive.frozen.split("\n"))
        delta = layout.difference(views(only(reply.content, ArrayRecord)), arrays)
        np.save(HERE / f"delta-{directive.client}-{directive.server_round}.npy", delta)
        if due(directive) == "trained":
            die(directive)
    return reply


def _signed(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def _patched(frame: bytes, old: bytes, new: bytes) -> bytes:
    assert old in frame
    return _signed(frame[:-4].replace(old, new, 1))


def _numbers(frame: bytes, now: Directive, value: float) -> bytes:
    """Send the same positions with another first value."""
    d = np.load(HERE / f"delta-{now.client}-{now.server_round}.npy").size
    update = decode_own(frame, d)
    codes = np.array(update.codes)
    codes[0] = value
    return encode(replace(update, codes=codes, values=codes), Compressor.from_spec(now.spec), now.update_id)


def _bomb(frame: bytes, _: Directive) -> bytes:
    """A frame that promises 2^62 coordinates in a few bytes."""
    at = 4 + 1 + frame[4]
    return _signed(frame[:at] + b"\xff" * 8 + b"\x3f" + b"\xff" * 8 + b"\x3f" + frame[at + 4 : -4])


TAMPER = {
    "garbage": lambda frame, _: os.urandom(len(frame)),
    "cut": lambda frame, _: frame[: len(frame) // 2],
    "nan": lambda frame, now: _numbers(frame, now, float("nan")),
    "huge": lambda frame, now: _numbers(frame, now, 1e30),
    "bomb": _bomb,
    "wrong spec": lambda frame, _: _patched(frame, b"topk", b"TOPK"),
    "replay": lambda _, now: (HERE / f"frame-{now.client}-{now.server_round - 1}.bin").read_bytes(),
}

app = make_app(mods=[outermost, CompressionMod(), innermost])
