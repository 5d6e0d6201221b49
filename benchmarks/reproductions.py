"""Keep the outcome of `fedsparse reproduce` as small files, and write docs/reproductions.md from them.

fedsparse reproduce sahu2021 --out FOLDER/sahu2021     # and stich2018, basu2019
python -m benchmarks.reproductions FOLDER
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks._report import RESULTS

PAPERS = ("sahu2021", "stich2018", "basu2019")
PAGE = Path(__file__).parents[1] / "docs" / "reproductions.md"
HEAD = """# The papers' results, measured again

`fedsparse reproduce sahu2021|stich2018|basu2019` trains everything anew and writes a page with plots. What follows is
what those commands gave. Each claim is judged by a rule fixed in `fedsparse/reproduce/`, on paired seeds with 95 %
intervals; one that does not hold says so. All figures, losing pairs included, are in
`benchmarks/results/reproduction_*.json`.

The data are stand-ins: "-like" sets have the size and kind of LIBSVM's gisette, madelon, epsilon and RCV1, which is why
losses are compared with our own baselines and never with the papers' numbers. "By formula" counts bits as the papers
do, "by frames" the bytes really sent.
"""


def keep(folder: Path) -> None:
    """Copy what `reproduce` found, without paths of this machine."""
    for paper in PAPERS:
        source = folder / paper / "reproduction.json"
        if not source.is_file():
            continue
        found = json.loads(source.read_text(encoding="utf-8"))
        found["command"] = re.sub(r" --out \S+", "", re.sub(r"^\S*cli\.py", "fedsparse", found["command"]))
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        (RESULTS / f"reproduction_{paper}.json").write_text(text, encoding="utf-8")


def page() -> str:
    """Return docs/reproductions.md."""
    parts = [HEAD]
    for paper in PAPERS:
        path = RESULTS / f"reproduction_{paper}.json"
        if path.is_file():
            parts.append(_paper(json.loads(path.read_text(encoding="utf-8"))))
    return "\n".join(parts)


def _paper(found: dict[str, Any]) -> str:
    lines = [f"## {found['paper']}", "", f"{found['reference']}.", ""]
    minutes = sum(part["run_s"] for part in found["parts"]) / 60
    where = f"{found['date'][:10]}, {found['machine']}"
    lines += [f"`{found['command']}`, {where}; all runs together took {minutes:.0f} minutes.", ""]
    for part in found["parts"]:
        lines += [f"### {part['dataset']}: {part['part']}", ""]
        lines += [f"{part['rounds']} rounds, seeds {', '.join(map(str, part['seeds']))}.", ""]
        lines += ["| claim | verdict | what came out | why |", "|---|---|---|---|"]
        lines += [
            "| " + " | ".join(_cell(claim[key]) for key in ("title", "verdict", "ours", "reason")) + " |"
            for claim in part["claims"]
        ]
        lines += ["", "What differs from the paper:", "", *(f"- {change}" for change in part["changes"]), ""]
    lines += ["Not tried: " + " ".join(f"{out['claim']} ({out['reason']})" for out in found["out_of_reach"]), ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    keep(Path(sys.argv[1]))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE}")
