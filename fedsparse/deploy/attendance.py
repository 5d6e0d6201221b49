"""For how many nodes a run waits: said where people look, since the ServerApp waits elsewhere."""

import logging
import time

from fedsparse.deploy.control import Control
from fedsparse.deploy.federation import Federation
from fedsparse.scenario import Scenario

LOOK_EVERY_S = 5.0

log = logging.getLogger(__name__)


class Attendance:
    """Says who is missed whenever fewer nodes are connected than a round needs.

    Parameters
    ----------
    federation, scenario
        Whose nodes, and what runs on them.
    first : int
        Nodes that the run waits for before its first round, or before it goes on.
    """

    def __init__(self, federation: Federation, scenario: Scenario, first: int) -> None:
        self._nodes, self._first = set(federation.file.nodes), first
        self._least, self._cohort = scenario.engine.min_clients, scenario.train.clients_per_round or 1
        self._said, self._looked = "", time.monotonic()

    def look(self, control: Control, began: bool) -> None:
        """Look from time to time, and say what has changed.

        Parameters
        ----------
        control : Control
        began : bool
            Whether a round is done since the run was started.
        """
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        there = {node.name for node in control.nodes() if node.status == "online"} & self._nodes
        wanted = self._least or max(1 if began else self._first, self._cohort)
        text = ""
        if len(there) < wanted:
            away = ", ".join(sorted(self._nodes - there, key=int))
            text = f"waiting for nodes: {len(there)} of {wanted} are connected (not there: {away})"
            text += "; engine.min_clients lets fewer begin" if there and self._least is None else ""
        if text != self._said:
            log.warning(text or "all nodes that a round needs are connected")
        self._said = text
