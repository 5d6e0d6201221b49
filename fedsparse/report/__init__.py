"""Reports: one HTML page for a run or a comparison, readable offline."""

from fedsparse.report.findings import findings
from fedsparse.report.page import build, render

__all__ = ["build", "findings", "render"]
