"""The constant threshold that spends a given number of bytes over the whole training."""

from dataclasses import dataclass

from fedsparse.compression import Compressor
from strategies.policies.base import Plan, Policy, register_policy


@register_policy
@dataclass
class Budget(Policy):
    """Placeholder: being written."""

    base: Compressor
    budget: str
    per: str = "all"

    name = "hard_threshold(budget=...)"
    summary = "the constant lam that minimises the total error under a byte budget"
    source = "Sahu et al. 2021, Theorem 3"
    examples = ('hard_threshold(budget="20MB")',)

    @property
    def spec(self) -> str:
        return f'hard_threshold(budget="{self.budget}", per="{self.per}")'

    def begin(self, plan: Plan) -> None:
        """Nothing."""

    def compressor(self, client: str) -> Compressor:
        """Return it."""
        return self.base
