"""A hard threshold that follows the step size."""

from dataclasses import dataclass, field, replace

from fedsparse.compression import Compressor
from fedsparse.compression.operators.hard_threshold import HardThreshold
from fedsparse.errors import ConfigError
from strategies.policies.base import Plan, Policy, register_policy


@register_policy
@dataclass
class StepAware(Policy):
    """``lam_t = lam eta_t / eta_1``: with a decaying step size, a fixed threshold would send less and less.

    In units of the model update the residual shrinks with the step size (Basu et al. 2019, Lemma 4: the memory is
    O(eta_t^2)), so a threshold that does not shrink with it cuts off ever more of the update.

    Parameters
    ----------
    base : Compressor
        With a hard threshold of a fixed lam, which is that of the first round.
    """

    base: Compressor
    _lam: float = field(init=False, repr=False)
    _now: Compressor = field(init=False, repr=False)

    name = "step_aware"
    summary = "hard threshold whose lam follows the learning-rate schedule"
    source = "gamma-FedHT (INFOCOM 2025)"
    examples = ("step_aware(hard_threshold(lam=0.01))", "step_aware(hard_threshold(lam=0.01)|sign)")

    def __post_init__(self) -> None:
        sparsifier = self.base.sparsifier
        lam = sparsifier.lam if isinstance(sparsifier, HardThreshold) and sparsifier.at_most is None else ""
        if isinstance(lam, str):
            raise ConfigError(
                f"{self.name} scales a hard threshold of a given lam, as in {self.examples[0]}; got {self.base}."
            )
        self._lam, self._now = lam, self.base

    @property
    def spec(self) -> str:
        return f"{self.name}({self.base})"

    def begin(self, plan: Plan) -> None:
        """Scale lam."""
        factor = plan.step_size(plan.server_round) / plan.step_size(1)
        # A cosine ends at zero, where a threshold cannot follow it.
        lam = max(self._lam * factor, 1e-30)
        self._now = replace(self.base, sparsifier=HardThreshold(lam))

    def compressor(self, client: str) -> Compressor:
        """Return the compressor with the round's lam."""
        return self._now
