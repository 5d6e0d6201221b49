"""A Flower mod that compresses the replies of any ClientApp, with error memory."""

import logging
import os
from pathlib import Path
from typing import Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedsparse.compression import Compressor, MemoryStore, encode
from fedsparse.compression.layout import Layout
from fedsparse.compression.memory import Transaction
from fedsparse.errors import ConfigError, PayloadError
from fedsparse.protocol import (
    EXACT_NAME,
    EXACT_STYPE,
    FRAME_NAME,
    FRAME_STYPE,
    KEY,
    Directive,
    Receipt,
    from_record,
    only,
    records,
    to_record,
    views,
    without_key,
)
from fedsparse.records import from_bytes, to_bytes
from fedsparse.seeding import entropy

log = logging.getLogger(__name__)

_STATE = f"{KEY}.state"


class CompressionMod:
    """Compress what a ClientApp's train function returns; put it FIRST in the app's mods.

    The app trains and replies as with plain Flower: one ArrayRecord with the new values under the names of the global
    model, one MetricRecord. Everything else (which compressor, whose turn, what was accepted) comes from the server's
    `CompressedStrategy`; to a server without it the reply passes unchanged.

    Parameters
    ----------
    memory_dir : path, optional
        Where the error memory of this machine's clients lives. Default: "memory-dir" of the node's config, then of the
        run's config, then $FEDSPARSE_MEMORY_DIR, then ~/.local/state/fedsparse/memory.
    durable : bool, optional
        Whether a commit waits for the disk. Default: "durable" of the node's config, else False.
    on_damage : {"raise", "reset"}, optional
        See `MemoryStore`. Default: "reset" where commits are durable (a device runs unattended), else "raise".

    Examples
    --------
    >>> app = ClientApp(mods=[CompressionMod()])  # doctest: +SKIP
    """

    def __init__(
        self,
        memory_dir: str | os.PathLike[str] | None = None,
        *,
        durable: bool | None = None,
        on_damage: Literal["raise", "reset"] | None = None,
    ) -> None:
        self.memory_dir, self.durable, self.on_damage = memory_dir, durable, on_damage

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Handle one message."""
        record = records(message.content, ConfigRecord).get(KEY) if message.has_content() else None
        if record is None or message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        directive = from_record(Directive, record)
        arrays = views(only(message.content, ArrayRecord))
        layout = Layout.of(arrays, directive.exact.split("\n"), directive.frozen.split("\n"))
        compressor = Compressor.from_spec(directive.spec)
        _check_momentum(directive)
        turn = None
        if directive.memory and not compressor.lossless:
            ack = directive.ack if directive.ack >= 0 else None
            turn = self._store(directive, context).begin(
                directive.client, layout.d, directive.update_id, ack, layout.bounds
            )
            if turn.resend is not None:
                log.info("client %s sends update %d again", directive.client, directive.update_id)
                rest = from_bytes(turn.resend.attachment)
                if _STATE in rest:
                    context.state = from_bytes(bytes(rest.pop(_STATE)["state"]))  # type: ignore[arg-type]
                return Message(_with_frame(rest, turn.resend.frame), reply_to=message)

        message.content = without_key(message.content)
        reply = call_next(message, context)
        if reply.has_error() or not reply.has_content():
            return reply
        new = views(only(reply.content, ArrayRecord))
        if unknown := set(new) - set(arrays):
            raise PayloadError(f"the app returned arrays that the global model lacks: {', '.join(sorted(unknown))}.")
        delta = layout.difference(new, arrays)
        seed = entropy(directive.seed, "compress", directive.server_round, directive.client) & (2**64 - 1)
        if turn is None:
            sent = compressor.compress(delta, seed, layout.bounds)
        else:
            sent = turn.compress(compressor, delta, seed, layout.bounds, directive.momentum)
        frame = encode(sent, compressor, directive.update_id)
        receipt = _receipt(directive, delta, turn)
        content = _rest(reply.content, receipt, layout.pack_exact(new, arrays))
        if turn is not None:
            turn.commit(frame, to_bytes(_with_state(content, context.state)))
        return Message(_with_frame(content, frame), reply_to=message)

    def _store(self, directive: Directive, context: Context) -> MemoryStore:
        configs = (context.node_config, context.run_config)
        chosen = self.memory_dir or next((c["memory-dir"] for c in configs if c.get("memory-dir")), None)
        default = os.environ.get("FEDSPARSE_MEMORY_DIR") or Path.home() / ".local/state/fedsparse/memory"
        durable = bool(context.node_config.get("durable", False)) if self.durable is None else self.durable
        on_damage = self.on_damage or ("reset" if durable else "raise")
        folder = Path(str(chosen or default))
        return MemoryStore(folder, directive.run, durable=durable, half=directive.half, on_damage=on_damage)


def _check_momentum(directive: Directive) -> None:
    if not 0.0 <= directive.momentum < 1.0:
        raise ConfigError(f"the momentum correction must be in [0, 1), the server asks for {directive.momentum!r}.")
    if directive.momentum and not directive.memory:
        raise ConfigError(
            "the server asks for momentum correction without error memory, but it corrects what waits there "
            "(Lin et al. 2018, Section 3.2): switch the memory on, or the correction off."
        )


def _receipt(directive: Directive, delta: np.ndarray, turn: Transaction | None) -> Receipt:
    return Receipt(
        update_id=directive.update_id,
        residual_norm=_norm(turn.residual) if turn else 0.0,
        update_norm=_norm(delta),
        restored=turn is not None and turn.restored,
        memory_reset=turn is not None and turn.reset_reason is not None,
    )


def _norm(vector: np.ndarray) -> float:
    with np.errstate(over="ignore"):
        squares = float(np.dot(vector, vector))
    # float32 squares overflow from 1e19 on and vanish below 1e-19.
    return float(np.sqrt(squares)) if 1e-30 < squares < 1e38 else float(np.linalg.norm(vector.astype(np.float64)))


def _rest(content: RecordDict, receipt: Receipt, exact: bytes) -> RecordDict:
    """Return all of the reply but the frame: what a second sending repeats."""
    rest = content.copy()
    name = next(iter(records(content, ArrayRecord)))
    rest[name] = ArrayRecord({EXACT_NAME: Array("uint8", (len(exact),), EXACT_STYPE, exact)} if exact else {})
    rest[KEY] = to_record(receipt)
    return rest


def _with_state(rest: RecordDict, state: RecordDict) -> RecordDict:
    """Add what the app keeps in its Context: where the reply is lost, the engine does not get that either."""
    if not state:
        return rest
    kept = rest.copy()
    kept[_STATE] = ConfigRecord({"state": to_bytes(state)})
    return kept


def _with_frame(rest: RecordDict, frame: bytes) -> RecordDict:
    """Put the frame beside the exact arrays, where the app's ArrayRecord was."""
    only(rest, ArrayRecord)[FRAME_NAME] = Array("uint8", (len(frame),), FRAME_STYPE, frame)
    return rest
