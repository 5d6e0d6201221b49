"""Flower strategies for compressed client updates."""

from strategies.compressed import CompressedStrategy
from strategies.conditions import Conditions
from strategies.report import RoundReport

__all__ = ["CompressedStrategy", "Conditions", "RoundReport"]
