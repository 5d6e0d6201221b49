"""Run one message through a ClientApp: the part that all engines share, whatever process it runs in."""

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsparse.heap import keep_freed_memory
from fedsparse.records import from_bytes, to_bytes

from ._flwr import APP_RAISED, RUN_ID, ensure_identity, rebuild_message
from .transport import Packed, pack, unpack

log = logging.getLogger("fedsparse.engine")

_MEMORY_ERRORS = ("OutOfMemoryError", "MemoryError")  # torch's, and Python's


class Job(NamedTuple):
    """One message for one client, as plain values.

    Parameters
    ----------
    client : int
        Number of the client.
    fields : tuple
        The message's metadata, see `_flwr.message_fields`.
    content : list
        The packed content.
    state : bytes, optional
        The client's Context.state as Flower's protobuf message; None where it is empty.
    """

    client: int
    fields: tuple[Any, ...]
    content: Packed
    state: bytes | None


class Outcome(NamedTuple):
    """What came of a `Job`: either the packed reply, or an error's code and reason.

    `state` is the new Context.state, or the old one where the client raised.
    """

    content: Packed | None
    created_at: float
    ttl: float
    code: int
    reason: str
    state: bytes | None


class Turn(NamedTuple):
    """A `Job`, ready to be answered: what the app is given, or why it cannot be."""

    job: Job
    given: tuple[Message, Context] | None
    failed: Outcome | None = None


def out_of_memory(outcome: Outcome) -> bool:
    """Whether a client found no memory: it may find some when fewer run beside it."""
    return outcome.code == APP_RAISED and outcome.reason.startswith(tuple(f"{name}:" for name in _MEMORY_ERRORS))


class Runner:
    """A ClientApp with what its Contexts need.

    Parameters
    ----------
    app : ClientApp
        The app.
    num_clients : int
        Number of clients of the run.
    run_config, node_config : mapping
        As in `BaseGrid`.
    """

    def __init__(
        self, app: ClientApp, num_clients: int, run_config: Mapping[str, Any], node_config: Mapping[str, Any]
    ) -> None:
        keep_freed_memory()
        ensure_identity(RUN_ID)
        self.app, self.num_clients = app, num_clients
        self.run_config, self.node_config = run_config, node_config

    def run(self, jobs: Sequence[Job], shared: Any = None) -> list[Outcome]:
        """Answer messages; `shared` finds the arrays that are not in them (see `transport.unpack`)."""
        return [self.answer(turn) for turn in self.open(jobs, shared)]

    def open(self, jobs: Sequence[Job], shared: Any = None) -> list[Turn]:
        """Unpack messages that are going to be answered one after the other.

        An app may have a method ``train_ahead``: it is shown all of them, each with its Context, to do at once what is
        done faster at once.
        """
        turns = [self._open(job, shared) for job in jobs]
        ahead = getattr(self.app, "train_ahead", None)
        if ahead is not None and len(turns) > 1:
            try:
                ahead([turn.given for turn in turns if turn.given is not None])
            except Exception:  # each client's own turn shows what is wrong, and with whom
                log.debug("training ahead failed", exc_info=True)
        return turns

    def _open(self, job: Job, shared: Any) -> Turn:
        try:
            message = rebuild_message(job.fields, unpack(job.content, shared))
            return Turn(job, (message, self._context(job, message)))
        except Exception as error:
            return Turn(job, None, _failed(job, error))

    def answer(self, turn: Turn) -> Outcome:
        """Let the app answer one message."""
        if turn.given is None:
            assert turn.failed is not None
            return turn.failed
        (message, context), job = turn.given, turn.job
        try:
            answer = self.app(message, context)
            _check_reply(answer, message)
            state = to_bytes(context.state) if context.state else None
            sent = answer.metadata.created_at, answer.metadata.ttl
            if answer.has_error():
                return Outcome(None, *sent, answer.error.code, str(answer.error.reason), state)
            return Outcome(pack(answer.content), *sent, 0, "", state)
        except (Exception, SystemExit) as error:
            if type(error).__name__ in _MEMORY_ERRORS and "torch" in sys.modules:
                sys.modules["torch"].cuda.empty_cache()  # for the clients beside this one
            return _failed(job, error)

    def _context(self, job: Job, message: Message) -> Context:
        return Context(
            run_id=message.metadata.run_id,
            node_id=message.metadata.dst_node_id,
            node_config={**self.node_config, "partition-id": job.client, "num-partitions": self.num_clients},
            state=RecordDict() if job.state is None else from_bytes(job.state),
            run_config=dict(self.run_config),
        )


def _failed(job: Job, error: BaseException) -> Outcome:
    log.debug("client %d raised", job.client, exc_info=True)
    return Outcome(None, time.time(), 0.0, APP_RAISED, f"{type(error).__name__}: {error}", job.state)


def _check_reply(answer: Any, message: Message) -> None:
    if not isinstance(answer, Message):
        raise TypeError(f"the ClientApp returned a {type(answer).__name__}, not a Message.")
    if answer.metadata.reply_to_message_id != message.metadata.message_id:
        raise ValueError("the ClientApp returned a Message that is no reply: use Message(content, reply_to=message).")
