"""What the field does to a round: who is there, how long everyone takes, whose update comes too late."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from fedsparse.compression.base import check_number
from fedsparse.devices import Fleet, Member
from fedsparse.errors import AllClientsFailed, ConfigError, RunError
from strategies.cohort import client_order

log = logging.getLogger(__name__)

RETRY_S = 60.0  # virtual seconds until the server looks again where nobody is there
PATIENCE_S = 30 * 86400.0
EMPTY_ROUNDS = 10  # so many in a row are no bad luck


@dataclass(frozen=True)
class Turn:
    """What a client had to do in a round: the bytes of the messages both ways, as they were really sent, and steps."""

    client: str
    down_bytes: int
    up_bytes: int
    steps: float


@dataclass(frozen=True)
class Verdict:
    """How a round went on the virtual clock.

    Parameters
    ----------
    seconds : float
        Virtual seconds of the round.
    late, dropped : mapping
        Client -> reason, of those whose update does not count.
    members : tuple of Member
        Everyone's turn.
    """

    seconds: float
    late: Mapping[str, str]
    dropped: Mapping[str, str]
    members: tuple[Member, ...]


class Conditions:
    """A fleet of devices on a virtual clock, and the server's patience with it.

    The clock prices every message by the length that it really had. An update that comes too late, or from a device
    that went away, is not accepted: its mass returns to the client's error memory, as with any reply that is lost.

    Parameters
    ----------
    fleet : Fleet
        The clients' devices.
    deadline : float, optional
        Virtual seconds after which a round ends; what is not there by then is late.
    over_select : float
        Ask for that fraction more clients than wanted, and end the round with the first wanted number of updates
        (Bonawitz et al. 2019, Section 2.2, use 0.3).
    typical_steps : float
        Local steps that a client usually takes, for plans.
    partial_work : bool
        Give slow devices as many local steps as they can do before the deadline.

    Raises
    ------
    ConfigError
        Impossible numbers; partial work without a deadline.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        deadline: float | None = None,
        over_select: float = 0.0,
        partial_work: bool = False,
        typical_steps: float = 1.0,
    ) -> None:
        if deadline is not None:
            check_number("devices", "deadline", deadline, 0.0, float("inf"), open_low=True)
        check_number("devices", "over_select", over_select, 0.0, 10.0)
        if partial_work and deadline is None:
            raise ConfigError("devices.partial_work needs devices.deadline: it says until when the work must be done.")
        self.fleet, self.deadline, self.over_select, self.partial_work = fleet, deadline, over_select, partial_work
        self.typical_steps, self.now, self.empty_rounds = typical_steps, 0.0, 0
        self._wanted: int | None = None
        self._up_bytes: dict[str, int] = {}

    def present(self, clients: Sequence[str], server_round: int) -> list[str]:
        """Return who is there; where nobody is, the clock goes on until somebody comes.

        Raises
        ------
        RunError
            Nobody for thirty virtual days.
        """
        began, attempt = self.now, 0
        while self.now - began <= PATIENCE_S:
            there = [c for c in clients if self.fleet.there(c, self.now, f"{server_round}.{attempt}")]
            if there:
                return there
            self.now += RETRY_S
            attempt += 1
        raise RunError(
            f"round {server_round}: none of {len(clients)} clients was there for {PATIENCE_S / 86400:.0f} virtual "
            "days: see devices.availability."
        )

    def cohort_size(self, wanted: int) -> int:
        """Return how many to ask so that `wanted` are likely to answer in time."""
        self._wanted = wanted if self.over_select else None
        return ceil(wanted * (1.0 + self.over_select))

    def steps(self, client: str, down_bytes: int) -> int | None:
        """Return the most local steps that a client can do before the deadline; None where nothing limits it.

        The update's length is taken to be that of its last one, of everybody's mean, or of the model.
        """
        if not self.partial_work or self.deadline is None:
            return None
        known = self._up_bytes
        if client in known:
            up_bytes = known[client]
        else:
            up_bytes = int(sum(known.values()) / len(known)) if known else down_bytes
        device = self.fleet.device(client)
        left = self.deadline - device.download_seconds(down_bytes) - device.upload_seconds(up_bytes)
        step = device.compute_seconds(self.fleet.flop_per_step)
        return max(1, int(left / step)) if step > 0.0 else None  # a model whose operations torch cannot count

    def pace(self, client: str, down_bytes: int) -> tuple[float, float]:
        """Return the seconds until a client begins to send, and the bytes a second that it sends then."""
        device = self.fleet.device(client)
        compute = device.compute_seconds(self.typical_steps * self.fleet.flop_per_step)
        return device.download_seconds(down_bytes) + compute + device.latency_s, device.up_mbit * 1e6 / 8

    def finish(self, server_round: int, turns: Sequence[Turn]) -> Verdict:
        """Let the round's time pass, and say whose update does not count."""
        members = [self.fleet.turn(t.client, server_round, t.down_bytes, t.steps, t.up_bytes) for t in turns]
        self._up_bytes.update({turn.client: turn.up_bytes for turn in turns})
        arrivals = sorted(
            (member for member in members if not member.dropped), key=lambda m: (m.seconds, client_order(m.client))
        )
        end = max((member.seconds for member in members), default=0.0)
        if self._wanted is not None and len(arrivals) >= self._wanted:
            end = arrivals[self._wanted - 1].seconds
        if self.deadline is not None:
            end = min(end, self.deadline)
        counted = {member.client for member in arrivals[: self._wanted] if member.seconds <= end}
        self.now += end
        return Verdict(
            seconds=end,
            late={
                m.client: f"late: {m.seconds:.4g} s, the round ended after {end:.4g} s"
                for m in arrivals
                if m.client not in counted
            },
            dropped={m.client: f"dropped out after {m.seconds:.4g} s" for m in members if m.dropped},
            members=tuple(members),
        )

    def nobody_came(self, server_round: int, rounds: int | None) -> None:
        """Count a round without any update in time: it costs time, and the model stays as it is.

        Raises
        ------
        AllClientsFailed
            The tenth in a row, or the last of `rounds` that were all so.
        """
        self.empty_rounds += 1
        log.warning("round %d: no update came in time; the model stays as it is", server_round)
        if self.empty_rounds >= min(EMPTY_ROUNDS, rounds or EMPTY_ROUNDS):
            limit = f"devices.deadline = {self.deadline:g} s" if self.deadline is not None else "devices.dropout"
            raise AllClientsFailed(
                f"round {server_round}: no update came in time for {self.empty_rounds} rounds in a row; rounds.jsonl "
                f"has the reasons. Change {limit}, the devices of devices.mix, or the model and local steps."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a restarted server needs; plain JSON values."""
        return {"now": self.now, "up_bytes": dict(self._up_bytes), "empty_rounds": self.empty_rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`."""
        self.now = float(state["now"])
        self._up_bytes = {str(client): int(count) for client, count in state["up_bytes"].items()}
        self.empty_rounds = int(state.get("empty_rounds", 0))
