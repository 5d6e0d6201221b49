"""The papers that fedsparse builds on: their experiments run again, and a verdict on each claim."""

from fedsparse.reproduce.claims import Claim, Outcome, Paper, Part, Verdict
from fedsparse.reproduce.conduct import Finding, Reproduction, reproduce
from fedsparse.reproduce.papers import PAPERS, find_paper

__all__ = [
    "PAPERS",
    "Claim",
    "Finding",
    "Outcome",
    "Paper",
    "Part",
    "Reproduction",
    "Verdict",
    "find_paper",
    "reproduce",
]
