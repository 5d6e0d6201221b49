"""What comes back in a round: the first reply of each client that was asked, in time, and decoded."""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedsparse.compression import Compressor, decode
from fedsparse.compression.layout import Layout
from fedsparse.errors import PayloadError, brief
from fedsparse.flower_programs import without_colours
from fedsparse.protocol import KEY, Receipt, from_record, number_metric, only, records, unpack_arrays
from strategies.aggregation import Update
from strategies.cohort import client_order
from strategies.conditions import Conditions, Turn
from strategies.report import Cause, Failure, RoundReport

log = logging.getLogger(__name__)

# No honest client has more; beyond, sums and squares overflow.
MOST_EXAMPLES, LARGEST_NORM = 1e12, 1e100
MOST_REASON = 100_000  # characters of an error that are looked at
_RAISED = re.compile(r"<class '(?:\w+\.)*(\w+)'>:<'(.*)'>\s*$", re.DOTALL)  # a SuperNode of a ClientApp's exception


@dataclass(frozen=True)
class Asked:
    """What one client of the cohort was asked for."""

    client: str
    update_id: int
    compressor: Compressor
    message: Message
    down_bytes: int


@dataclass
class Asking:
    """What the server must remember between asking a cohort and aggregating its replies."""

    base: dict[str, NDArray[np.generic]]
    layout: Layout
    asked: dict[int, Asked]  # node id -> what it was asked for
    report: RoundReport


def first_replies(state: Asking, replies: Iterable[Message]) -> dict[int, Message]:
    """Keep the first reply of each node that was asked; second and foreign ones are named in the log only."""
    received: dict[int, Message] = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if node in state.asked and node not in received:
            received[node] = reply
        else:
            log.warning("round %d: ignored a second or unasked reply of node %d", state.report.server_round, node)
    return received


def leave_out_the_late(state: Asking, received: dict[int, Message], conditions: Conditions) -> None:
    """Let the round's virtual time pass; take out the replies that come too late, or never."""
    report = state.report
    turns = [
        Turn(state.asked[node].client, state.asked[node].down_bytes, payload_bytes(reply.content), _steps(reply))
        for node, reply in sorted(received.items(), key=lambda item: client_order(state.asked[item[0]].client))
        if reply.has_content()
    ]
    verdict = conditions.finish(report.server_round, turns)
    report.virtual_s, report.virtual_round_s = conditions.now, verdict.seconds
    for node in [node for node in state.asked if node in received]:
        client = state.asked[node].client
        if client in verdict.late:
            count = payload_bytes(received.pop(node).content)
            report.uplink_bytes += count  # it was sent all the same
            report.failed[client] = Failure(Cause.LATE, verdict.late[client], count)
        elif client in verdict.dropped:
            del received[node]
            report.failed[client] = Failure(Cause.DROPPED, verdict.dropped[client])


def open_reply(
    state: Asking,
    node: int,
    reply: Message | None,
    weight_key: str,
    *,
    uniform: bool,
    max_norm: float | None = None,
) -> Update | None:
    """Decode one reply; what is wrong with it goes into the report.

    Parameters
    ----------
    weight_key : str
        The metric that says how many examples a client has.
    uniform : bool
        Whether all updates weigh the same.
    max_norm : float, optional
        The largest ``||C(p)||_2`` that is accepted.
    """
    asked, report = state.asked[node], state.report
    client = asked.client
    if reply is None:
        report.failed.setdefault(client, Failure(Cause.MISSING, "no reply in time"))
    elif reply.has_error():
        reason = f"error {reply.error.code}: {_last_line(reply.error.reason or '')}"
        report.failed[client] = Failure(Cause.ERROR, reason)
    else:
        count = payload_bytes(reply.content)
        report.uplink_bytes += count
        try:
            return _within(_decode(state.layout, asked, reply.content, weight_key, uniform), max_norm)
        except PayloadError as error:
            report.failed[client] = Failure(Cause.REJECTED, f"rejected: {brief(str(error))}", count)
    return None


def payload_bytes(content: RecordDict) -> int:
    """Count the serialized arrays of a message: what grows with the model."""
    return sum(len(array.data) for record in records(content, ArrayRecord).values() for array in record.values())


def _decode(layout: Layout, asked: Asked, content: RecordDict, weight_key: str, uniform: bool) -> Update:
    frame, exact = unpack_arrays(only(content, ArrayRecord))
    metrics = only(content, MetricRecord)
    receipt = from_record(Receipt, records(content, ConfigRecord).get(KEY, ConfigRecord()))
    examples = number_metric(metrics, weight_key)
    if not 0 <= examples <= MOST_EXAMPLES:
        raise PayloadError(f"the reply's metric {weight_key!r} must be in [0, {MOST_EXAMPLES:g}], got {examples}.")
    for name, norm in (("residual_norm", receipt.residual_norm), ("update_norm", receipt.update_norm)):
        if not 0 <= norm <= LARGEST_NORM:
            raise PayloadError(f"the receipt's {name} must be in [0, {LARGEST_NORM:g}], got {norm}.")
    update = decode(frame, asked.compressor, layout.d, bounds=layout.bounds, update_id=asked.update_id)
    weight = 1.0 if uniform else examples
    return Update(asked.client, update, layout.unpack_exact(exact), receipt, metrics, weight, len(frame) + len(exact))


def _within(update: Update, max_norm: float | None) -> Update:
    if max_norm is None:
        return update
    norm = float(np.linalg.norm(update.compressed.values.astype(np.float64)))
    if norm > max_norm:
        raise PayloadError(f"the update's norm is {norm:.4g}, at most {max_norm:.4g} is accepted.")
    return update


def _steps(reply: Message) -> float:
    """Return the local steps that an app says it took; none where it does not say, so no time either."""
    steps = [record.get("local-steps") for record in records(reply.content, MetricRecord).values()]
    return max((float(n) for n in steps if isinstance(n, int | float) and 0 <= n < 1e9), default=0.0)


def _last_line(reason: str) -> str:
    """Return what a reason says in the end: Flower's engine gives Ray's whole coloured traceback, its nodes a class."""
    plain = without_colours(reason[-MOST_REASON:])
    if found := _RAISED.match(plain):
        return brief(f"{found[1]}: {' '.join(found[2].split())}")
    return next((brief(line.strip()) for line in reversed(plain.splitlines()) if line.strip()), "no reason given")
