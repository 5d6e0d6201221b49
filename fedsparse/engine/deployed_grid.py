"""A Grid of real devices: looks often for replies, and asks a device again that restarted before it answered."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from queue import Empty, Queue
from threading import Thread
from typing import NamedTuple

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from google.protobuf.message import DecodeError

from fedsparse.errors import cause
from fedsparse.wrapped_grid import WrappedGrid

log = logging.getLogger(__name__)

# What Flower raises where a node's bytes are no message; a SuperLink that is away raises something else.
_UNREADABLE = (DecodeError, ValueError, TypeError, KeyError)
POLL_S, LONGEST_POLL_S, NODES_EVERY_S = 0.1, 1.0, 2.0
MOST_TRIES = 5
PATIENCE_S = 60.0  # for a node that went away: as long as a small device takes to start again


@dataclass
class _Sent:
    """A message that waits for its reply."""

    message: Message
    at: float
    tries: int


@dataclass
class _Gone:
    """A message whose node went away at the moment `at`."""

    sent: _Sent
    error: Error
    at: float


class _Found(NamedTuple):
    """What a look brought: replies, replies that nobody can read, and messages whose reply, if any, is lost by that."""

    replies: list[Message]
    unreadable: dict[str, str]  # message id -> what is wrong
    lost: list[str]


class _Puller:
    """Pulls replies in threads: Flower waits for up to three minutes for a reply whose upload broke off.

    All replies are pulled at once, until one cannot be read: the others of that pull are lost with it, since the
    SuperLink hands out each once. From then on each is pulled alone.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self._alone = grid, False
        self._busy: set[str] = set()
        self._found: Queue[tuple[list[str], list[Message] | Exception]] = Queue()

    def look(self, message_ids: list[str]) -> _Found:
        """Return what has come, and look for the rest."""
        found = _Found([], {}, [])
        while True:
            try:
                asked, came = self._found.get_nowait()
            except Empty:
                break
            self._busy.difference_update(asked)
            if not isinstance(came, Exception):
                found.replies.extend(came)
            elif not isinstance(came, _UNREADABLE):
                raise came
            elif len(asked) == 1:
                found.unreadable[asked[0]] = cause(came)
            else:
                found.lost.extend(asked)
                self._alone = True
        done = {reply.metadata.reply_to_message_id for reply in found.replies} | {*found.unreadable, *found.lost}
        idle = [name for name in message_ids if name not in self._busy and name not in done]
        for names in [[name] for name in idle] if self._alone else [idle] if idle else []:
            self._busy.update(names)
            Thread(target=self._pull, args=(names,), daemon=True).start()
        return found

    def _pull(self, message_ids: list[str]) -> None:
        try:
            self._found.put((message_ids, list(self._grid.pull_messages(message_ids))))
        except Exception as error:
            self._found.put((message_ids, error))


class DeployedGrid(WrappedGrid):
    """Flower's own Grid, with a `send_and_receive` for devices that come and go.

    Flower asks for replies every three seconds, and hands a message to a device once: a device that is started again
    before it has answered never answers. Here it gets the message again. Its error memory knows the update by its id,
    so that it either sends again what it had sent, or trains again what was lost; nothing counts twice.

    Parameters
    ----------
    grid : Grid
        Flower's.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._names: dict[int, str] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for their replies, each the first that comes.

        Parameters
        ----------
        messages : iterable of Message
        timeout : float, optional
            Seconds; what has not come by then is left out.
        """
        waiting, gone = self._send(list(messages), tries=1), list[_Gone]()
        replies, puller = list[Message](), _Puller(self._grid)
        began = looked = time.monotonic()
        pause = POLL_S
        while (waiting or gone) and (timeout is None or time.monotonic() - began < timeout):
            found = puller.look(list(waiting))
            for name in found.lost:
                if (sent := waiting.pop(name, None)) is not None:
                    waiting |= self._again(sent, "its reply, if there was one, came with one that cannot be read")
            for name, reason in found.unreadable.items():
                if (sent := waiting.pop(name, None)) is not None:
                    error = Error(ErrorCode.UNKNOWN, f"the node's reply cannot be read ({reason})")
                    replies.append(Message(error, reply_to=sent.message))
            for reply in found.replies:
                sent = waiting.pop(reply.metadata.reply_to_message_id, None)
                if sent is None:
                    continue
                if not reply.has_error():
                    replies.append(reply)
                elif sent.tries < MOST_TRIES and reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE:
                    waiting |= self._again(sent, "its reply was lost on the way")
                elif sent.tries < MOST_TRIES and reply.error.code == ErrorCode.NODE_UNAVAILABLE:
                    gone.append(_Gone(sent, reply.error, time.monotonic()))
                else:
                    replies.append(Message(reply.error, reply_to=sent.message))  # Flower's own names no sender
                pause = POLL_S
            if time.monotonic() - looked > NODES_EVERY_S:
                looked = time.monotonic()
                nodes = list(self._grid.get_nodes())
                self._names |= {node.node_id: node.name for node in nodes if node.name}
                since = {node.node_id: _seconds(node.last_activated_at) for node in nodes}
                waiting |= self._restarted(waiting, since)
                waiting |= self._back(gone, since, replies)
            time.sleep(pause)
            pause = min(1.2 * pause, LONGEST_POLL_S)
        return [*replies, *(Message(each.error, reply_to=each.sent.message) for each in gone)]

    def _send(self, messages: list[Message], tries: int) -> dict[str, _Sent]:
        at = time.time()
        for left in range(MOST_TRIES - 1, -1, -1):
            try:
                ids = self._grid.push_messages(messages)
                break
            except ObjectPushError as error:
                # The SuperLink died after it had stored an object and before it said so, and refuses the second try.
                # Nodes that have the first message all the same know the update by its id.
                if not left:
                    raise
                log.warning("messages are sent anew: %s", error)
                messages = [_anew(message) for message in messages]
        return {name: _Sent(message, at, tries) for name, message in zip(ids, messages, strict=True) if name}

    def _again(self, sent: _Sent, reason: str) -> dict[str, _Sent]:
        meta = sent.message.metadata
        log.warning("node %s is asked again: %s", self._names.get(meta.dst_node_id, meta.dst_node_id), reason)
        return self._send([_anew(sent.message)], sent.tries + 1)

    def _restarted(self, waiting: dict[str, _Sent], since: dict[int, float]) -> dict[str, _Sent]:
        """Ask those nodes again that have been activated since they were asked."""
        asked: dict[str, _Sent] = {}
        for name, sent in list(waiting.items()):
            if sent.tries < MOST_TRIES and since.get(sent.message.metadata.dst_node_id, 0.0) > sent.at:
                del waiting[name]
                asked |= self._again(sent, "it was started again before it had answered")
        return asked

    def _back(self, gone: list[_Gone], since: dict[int, float], replies: list[Message]) -> dict[str, _Sent]:
        """Ask those nodes again that went away and came back; give up on those that stay away.

        Not while nobody is there: then it is the network or the power that is gone, and the round waits for it.
        """
        asked: dict[str, _Sent] = {}
        for each in list(gone):
            if not since:
                each.at = time.monotonic()
            if each.sent.message.metadata.dst_node_id in since:
                gone.remove(each)
                asked |= self._again(each.sent, "it went away, and is back")
            elif time.monotonic() - each.at > PATIENCE_S:
                gone.remove(each)
                replies.append(Message(each.error, reply_to=each.sent.message))
        return asked


def _anew(message: Message) -> Message:
    """Return a message of the same content under an id of its own."""
    meta = message.metadata
    return Message(message.content, meta.dst_node_id, meta.message_type, ttl=meta.ttl, group_id=meta.group_id)


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
