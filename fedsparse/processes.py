"""Find and stop processes by a mark in their environment: Flower and Ray put theirs into sessions of their own."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path


def marked(mark: str) -> list[int]:
    """Return the ids of the live processes, other than this one, whose environment contains `mark`."""
    found: list[int] = []
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and not _is_zombie(entry):
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def stop_all(mark: str, child: "subprocess.Popen[bytes] | None", patience: float = 8.0) -> None:
    """End a child and all marked processes: ask them to, and kill those that go on after `patience` seconds."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if child is not None and child.poll() is None:
            child.send_signal(kind)
        told: set[int] = set()
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            there = set(marked(mark))
            for pid in there - told:  # also those that one of them started before it heard
                with suppress(ProcessLookupError):
                    os.kill(pid, kind)
            told |= there
            if not there and (child is None or child.poll() is not None):
                return
            time.sleep(0.05)


def _is_zombie(entry: Path) -> bool:
    try:
        return (entry / "stat").read_text().rsplit(")", 1)[-1].split()[0] == "Z"
    except (OSError, IndexError):
        return True
