"""The same compressor in every round."""

from dataclasses import dataclass

from fedsparse.compression import Compressor
from strategies.policies.base import Plan, Policy


@dataclass
class Constant(Policy):
    """One compressor for everybody, always.

    Parameters
    ----------
    base : Compressor
    """

    base: Compressor

    name = "constant"
    summary = "the same compressor in every round"
    source = ""
    examples = ("topk(density=0.01)",)

    @property
    def spec(self) -> str:
        return self.base.spec

    @property
    def lossless(self) -> bool:
        return self.base.lossless

    def begin(self, plan: Plan) -> None:
        """Nothing to decide."""

    def compressor(self, client: str) -> Compressor:
        """Return the compressor."""
        return self.base
