"""What every benchmark shares: medians of interleaved runs, a table, and a small file that says where it came from."""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def interleaved(tasks: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each task, all run in turn so that a slow moment of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(repeats + 1):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            if turn:  # the first turn warms caches and allocators
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> str:
    """Describe this machine in a few words."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def save(name: str, rows: Sequence[dict[str, Any]], notes: str = "") -> None:
    """Print the rows and keep them under benchmarks/results/ with date, machine and command."""
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    RESULTS.mkdir(exist_ok=True)
    given = " ".join("FOLDER" if Path(arg).is_dir() else arg for arg in sys.argv[1:])
    command = f"python -m benchmarks.{Path(sys.argv[0]).stem} {given}".rstrip()
    body = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "load_average": [round(value, 1) for value in os.getloadavg()],  # high: others were at work, too
        "command": command,
        "notes": notes,
        "rows": list(rows),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(body, indent=1) + "\n")
    print(f"written: benchmarks/results/{name}.json")
