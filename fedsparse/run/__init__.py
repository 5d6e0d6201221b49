"""Run one scenario: the round loop, and the folder that it leaves behind."""

from fedsparse.run.conduct import RoundDone, Started, run_scenario
from fedsparse.run.folder import RunFolder
from fedsparse.run.grids import Grids
from fedsparse.run.summary import Summary

__all__ = ["Grids", "RoundDone", "RunFolder", "Started", "Summary", "run_scenario"]
