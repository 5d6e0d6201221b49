"""Keep the figures of `fedsparse compare fashion-noniid` (or another comparison) as a small file.

Run: ``fedsparse compare fashion-noniid`` (about ten minutes on two idle cores), then
``python -m benchmarks.fashion_noniid runs/fashion-noniid``
"""

import json
import sys
from pathlib import Path
from statistics import geometric_mean

from benchmarks._report import save
from fedsparse.run import RunFolder


def to_target(lines: list[dict], target: float) -> tuple[int, int] | None:
    """Return (round, uplink bytes so far) of the first round that reached `target`."""
    spent = 0
    for line in lines:
        spent += line["uplink_bytes"]
        if line["eval_accuracy"] >= target:
            return line["round"], spent
    return None


def rows(folder: Path) -> list[dict]:
    facts = json.loads((folder / "summary.json").read_text())
    target, seeds = facts["target_accuracy"], facts["seeds"]
    reached: dict[str, list] = {}
    table = []
    for variant in facts["variants"]:
        name = variant["name"]
        lines = [RunFolder(folder / name / f"seed-{seed}").rounds() for seed in seeds]
        reached[name] = [to_target(run, target) for run in lines]
        first = reached[facts["variants"][0]["name"]]
        pairs = [(a[1], b[1]) for a, b in zip(first, reached[name], strict=True) if a and b]
        table.append(
            {
                "variant": name,
                "uplink": variant["uplink"],
                "seeds": seeds,
                "target_accuracy": target,
                "final_accuracy": [round(run[-1]["eval_accuracy"], 4) for run in lines],
                "rounds_to_target": [hit and hit[0] for hit in reached[name]],
                "uplink_bytes_to_target": [hit and hit[1] for hit in reached[name]],
                "times_fewer_bytes_than_first": [round(a / b, 1) for a, b in pairs],
                "geometric_mean": round(geometric_mean([a / b for a, b in pairs]), 1) if pairs else None,
                "uplink_bytes_total": [sum(line["uplink_bytes"] for line in run) for run in lines],
            }
        )
    return table


if __name__ == "__main__":
    save("fashion_noniid", rows(Path(sys.argv[1])), "fedsparse compare fashion-noniid")
