"""Which compressor a client gets in a round: decided by the server, from what the rounds before have shown."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from fedsparse.compression import Compressor
from strategies.aggregation import Update
from strategies.report import RoundReport


@dataclass(frozen=True)
class Plan:
    """What is known when a round begins.

    Parameters
    ----------
    server_round : int
        From 1.
    rounds : int or None
        Rounds of the whole training, where that is known.
    d : int
        Length of the compressed update.
    cohort : sequence of str
        Clients that are asked in this round.
    num_clients : int
        Clients that are online.
    exact_bytes : int
        Of arrays that travel exactly with each update.
    step_size : callable
        Round -> eta of that round over eta of the first; constant 1 where nobody told.
    pace : callable, optional
        Client -> seconds until its device begins to send, and the bytes a second that it sends then; with simulated
        devices.
    """

    server_round: int
    rounds: int | None
    d: int
    cohort: Sequence[str]
    num_clients: int
    exact_bytes: int = 0
    step_size: Callable[[int], float] = field(default=lambda server_round: 1.0)
    pace: Callable[[str], tuple[float, float]] | None = None


class Policy(ABC):
    """Decides the compressor of each round; one object serves one training.

    Subclasses are dataclasses whose ``init`` fields are the options in the spec; `base` is the compressor that they
    change.
    """

    base: Compressor
    needs_devices: ClassVar[bool] = False
    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def spec(self) -> str:
        """The policy as text."""

    @property
    def lossless(self) -> bool:
        """Whether nothing is ever left over."""
        return False

    @abstractmethod
    def begin(self, plan: Plan) -> None:
        """Decide for the round that begins."""

    @abstractmethod
    def compressor(self, client: str) -> Compressor:
        """Return the compressor of one client of the cohort of the round that `begin` was told of."""

    def observe(self, report: RoundReport, updates: Sequence[Update]) -> None:  # noqa: B027  (most learn nothing)
        """Learn from a finished round; may add to its report."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a restarted server needs to go on; plain JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Undo `state_dict`."""


POLICIES: dict[str, type[Policy]] = {}

P = TypeVar("P", bound=type[Policy])


def register_policy(cls: P) -> P:
    """Class decorator: make a policy known by its `name`."""
    POLICIES[cls.name] = cls
    return cls
