"""The one place that touches what Flower keeps private.

Flower's `Message` reads a process-wide `TaskIdentity` that its own runtime fills in, and only its SuperLink gives
messages their ids. An engine of our own has to do both. And its records check each value on its way in, which takes
longer than all the rest of a small message's way; what was in such a record before need not be checked again.
"""

from collections.abc import Mapping
from secrets import token_hex
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = [
    "APP_RAISED",
    "EXPIRED",
    "RUN_ID",
    "UNKNOWN",
    "NodeInfo",
    "Run",
    "empty_run",
    "ensure_identity",
    "error_reply",
    "filled",
    "message_fields",
    "rebuild_message",
    "reply",
    "stamp",
]

RUN_ID = 1
UNKNOWN = ErrorCode.UNKNOWN
APP_RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
EXPIRED = ErrorCode.MESSAGE_UNAVAILABLE

R = TypeVar("R", bound=ArrayRecord | ConfigRecord | MetricRecord | RecordDict)


def ensure_identity(run_id: int) -> None:
    """Let this process build messages, unless Flower's own runtime already gave it an identity."""
    private = vars(TaskIdentity)
    if private["_run_id"] is None:
        TaskIdentity.run_id = run_id
    if private["_node_id"] is None:
        TaskIdentity.node_id = SUPERLINK_NODE_ID
    if private["_task_id"] is None:
        TaskIdentity.task_id = 1


def empty_run(run_id: int) -> Run:
    """Return the run information of a run that no SuperLink knows."""
    return Run.create_empty(run_id)


def stamp(message: Message, run_id: int) -> str:
    """Give an instruction message a fresh id and this run's id; return the message id."""
    message_id = token_hex(16)
    message.metadata.__dict__.update(_message_id=message_id, _run_id=run_id)
    return message_id


def message_fields(message: Message) -> tuple[Any, ...]:
    """Return an instruction's metadata as plain values, for `rebuild_message`."""
    meta = message.metadata
    return (
        meta.run_id,
        meta.message_id,
        meta.src_node_id,
        meta.dst_node_id,
        meta.reply_to_message_id,
        meta.group_id,
        meta.created_at,
        meta.ttl,
        meta.message_type,
        meta.src_task_id,
        meta.dst_task_id,
    )


def rebuild_message(fields: tuple[Any, ...], content: RecordDict) -> Message:
    """Build the instruction again, in the process of the client."""
    return make_message(metadata=Metadata(*fields), content=content)


def filled(record: R, values: Mapping[str, Any]) -> R:
    """Put values that come out of a record of the same kind into an empty one, as they are; return it."""
    record.__dict__["_data"].update(values)
    return record


def reply(instruction: Message, content: RecordDict, created_at: float, ttl: float) -> Message:
    """Build a client's reply in the process of the server, as if it had come through a SuperLink."""
    asked = instruction.metadata
    metadata = Metadata(
        run_id=asked.run_id,
        message_id=token_hex(16),
        src_node_id=asked.dst_node_id,
        dst_node_id=asked.src_node_id,
        reply_to_message_id=asked.message_id,
        group_id=asked.group_id,
        created_at=created_at,
        ttl=ttl,
        message_type=asked.message_type,
        src_task_id=asked.dst_task_id,
        dst_task_id=asked.src_task_id,
    )
    return make_message(metadata=metadata, content=content)


def error_reply(instruction: Message, code: int, reason: str) -> Message:
    """Build the reply for a client that could not answer."""
    message = Message(Error(code=code, reason=reason), reply_to=instruction)
    message.metadata.__dict__["_message_id"] = token_hex(16)
    return message
