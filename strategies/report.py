"""What one round cost and did."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """What kept an update out of the model."""

    MISSING = "missing"  # no reply came
    ERROR = "error"  # the client replied with an error
    REJECTED = "rejected"  # the reply is not what was asked for
    LATE = "late"  # on the virtual clock
    DROPPED = "dropped"  # on the virtual clock


@dataclass(frozen=True)
class Failure:
    """Why a client's update does not count.

    Parameters
    ----------
    cause : Cause
        The kind of failure.
    reason : str
        In words.
    payload_bytes : int
        What the server has received of it all the same.
    """

    cause: Cause
    reason: str
    payload_bytes: int = 0

    @property
    def in_vain(self) -> bool:
        """Whether the client did its work, and simulated time or chance took it away."""
        return self.cause in (Cause.LATE, Cause.DROPPED)


@dataclass
class RoundReport:
    """Measured facts of one round; None means not known.

    Parameters
    ----------
    cohort, accepted : list of str
        Clients that were asked, and whose update went into the model.
    failed : dict
        Client -> `Failure`, for everyone else.
    uplink_bytes, downlink_bytes : int
        Payload bytes received (frames and exact arrays, also of rejected replies) and sent (the model).
    dense_bytes : int
        What the accepted updates would have taken uncompressed.
    uplink_frame_bits_formula : float
        What the papers' formulas would count for the same updates.
    nnz : int
        Coordinates sent, over all accepted updates; `density` is their mean fraction of d.
    lam : float or None
        The hard threshold of the round, in units of the model update; their mean where clients have their own.
    predicted_bytes, budget_spent, budget_predicted : float or None
        Under a byte budget: uplink bytes that this round was expected to take, bytes spent so far, and what the
        whole training is now expected to take.
    train_loss : float or None
        Mean of the clients' train-loss, weighted like their updates.
    residual_norm, residual_norm_max : float or None
        Mean and largest ``||e||_2`` over the accepted clients.
    residual_norms : dict
        Accepted client -> its ``||e||_2``.
    total_error : float or None
        Sum over the rounds so far of the mean ``||e||_2^2`` (Sahu et al. 2021, eq. 7, per client).
    update_norm : float or None
        Mean ``||Delta||_2`` before compression.
    virtual_s, virtual_round_s : float or None
        The virtual clock when the round ended, and what the round took, with simulated devices.
    memory_resets, restored : int
        Clients whose memory, damaged or gone, restarted from zero; clients that took back an update that was not
        accepted.
    """

    server_round: int
    cohort: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    failed: dict[str, Failure] = field(default_factory=dict)
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    dense_bytes: int = 0
    uplink_frame_bits_formula: float = 0.0
    nnz: int = 0
    density: float | None = None
    lam: float | None = None
    predicted_bytes: float | None = None
    budget_spent: float | None = None
    budget_predicted: float | None = None
    train_loss: float | None = None
    residual_norm: float | None = None
    residual_norm_max: float | None = None
    residual_norms: dict[str, float] = field(default_factory=dict)
    total_error: float | None = None
    update_norm: float | None = None
    virtual_s: float | None = None
    virtual_round_s: float | None = None
    memory_resets: int = 0
    restored: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values.

        The round number goes by the name `round`; of failures, `failed` has the reasons and `causes` the kinds.
        """
        values = asdict(self)
        values["failed"] = {client: failure.reason for client, failure in self.failed.items()}
        values["causes"] = {client: failure.cause.value for client, failure in self.failed.items()}
        return {"round": values.pop("server_round"), **values}
