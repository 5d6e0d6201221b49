"""Compare variants of a scenario over paired seeds."""

from fedsparse.compare.conduct import RunBegins, RunEnds, compare_scenario
from fedsparse.compare.results import Comparison, read

__all__ = ["Comparison", "RunBegins", "RunEnds", "compare_scenario", "read"]
