"""Processes are found by their mark, and end with all that they start."""

import os
import subprocess
import time
from uuid import uuid4

from fedsparse.processes import marked, stop_all


def test_what_a_process_starts_on_its_way_out_is_told_to_end_as_well():
    mark = f"mark-{uuid4().hex}"
    script = "trap 'sleep 1000 & exit' TERM; echo ready; while :; do sleep 0.1; done"
    child = subprocess.Popen(["bash", "-c", script], env={**os.environ, "MARK": mark}, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    began = time.monotonic()
    stop_all(mark, None, patience=60)
    assert marked(mark) == []
    assert time.monotonic() - began < 50, "it was asked to, and not killed when patience was over"
    child.communicate()
