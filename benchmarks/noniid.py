"""The non-IID benchmark: learning rates from one small grid for everybody, then `fedsparse compare` on every split.

Run on an idle machine (hours; each step goes on where it stopped)::

    python -m benchmarks.noniid tune FOLDER             # every variant with every learning rate of GRID, one seed
    python -m benchmarks.noniid run FOLDER cnn 'dirichlet(alpha=0.1)' [PATTERN] [SEEDS]  # one model and split
    python -m benchmarks.noniid longer FOLDER cnn 'dirichlet(alpha=0.1)' [PATTERN] [SEEDS]  # the same, more rounds
    python -m benchmarks.noniid save FOLDER             # keep the figures under benchmarks/results/

The seed that tunes is none of those that are reported. PATTERN, such as ``FedAvg-*``, leaves out other variants.
FedProx, FedAvg with one more term, takes over FedAvg's learning rates. `longer` keeps the target, that of the dense
variant after the scenario's rounds, and gives every variant LONGER times as many: where bytes are scarce and rounds are
not, that is what sparse updates are for. Dense updates get them as well.
"""

import json
import os
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks._report import RESULTS, save
from fedsparse.compare import compare_scenario, read
from fedsparse.compare.results import POINT
from fedsparse.scenario import apply_overrides, load
from fedsparse.scenario.schema import Scenario, Variant

JOBS = os.cpu_count() or 1
GRID = (0.1, 0.3, 0.6)
TUNING_SEED, TUNING_ROUNDS = 100, 20
LONGER = 3
TUNED = RESULTS / "noniid_tuning.json"


def tune(folder: Path, pattern: str = "*") -> None:
    """Train every variant with every learning rate, and keep the one of the best final accuracy."""
    scenario = inline(load("noniid-benchmark"))
    grid = tuple(
        Variant(name=f"{variant.name}-lr{lr}", overrides={**variant.overrides, "train.lr": lr})
        for variant in scenario.variant
        for lr in GRID
        if fnmatch(variant.name, pattern)
    )
    trial = scenario.model_copy(update={"rounds": TUNING_ROUNDS, "variant": grid})
    result = compare_scenario(trial, folder / f"tune-{slug(pattern)}", seeds=[TUNING_SEED], on_event=tell, jobs=JOBS)
    found: dict[str, dict[str, float]] = {}
    for variant in result.variants:
        name, _, lr = variant.name.rpartition("-lr")
        accuracy = variant.accuracy
        found.setdefault(name, {})[lr] = round(accuracy.mean, 4) if accuracy else 0.0
    before = {row["variant"]: row for row in _rows(TUNED)}
    for name, tried in found.items():
        best = max(tried, key=lambda lr: tried[lr])
        before[name] = {"variant": name, "lr": float(best), "accuracy_by_lr": tried}
    notes = f"final test accuracy after {TUNING_ROUNDS} rounds, seed {TUNING_SEED}, dirichlet(alpha=0.1), cnn"
    save("noniid_tuning", list(before.values()), notes)


def inline(scenario: Scenario) -> Scenario:
    """Take one process for each run, the fastest way with this many runs; every engine gives the same bits."""
    return apply_overrides(scenario, ["engine.name=inline"])


def tuned(scenario: Scenario, pattern: str) -> Scenario:
    """Give every variant its learning rate."""
    rates = {row["variant"]: row["lr"] for row in _rows(TUNED)}
    rates |= {name.replace("FedAvg", "FedProx", 1): lr for name, lr in rates.items() if name.startswith("FedAvg")}
    chosen = [variant for variant in scenario.variant if fnmatch(variant.name, pattern) and variant.name in rates]
    variants = tuple(Variant(name=v.name, overrides={**v.overrides, "train.lr": rates[v.name]}) for v in chosen)
    return scenario.model_copy(update={"variant": variants})


def run(folder: Path, model: str, split: str, pattern: str = "*", seeds: str = "") -> None:
    """Compare all variants on one model and split."""
    scenario = tuned(inline(load("noniid-benchmark")), pattern)
    _compare(scenario, folder / slug(f"{model}-{split}-{pattern}"), model, split, seeds)


def longer(folder: Path, model: str, split: str, pattern: str = "*", seeds: str = "") -> None:
    """Compare all variants with LONGER times as many rounds, beside the dense one with as many as ever."""
    scenario = tuned(inline(load("noniid-benchmark")), pattern)
    more = {"rounds": LONGER * scenario.rounds}
    variants = tuple(Variant(name=f"{v.name}-longer", overrides={**v.overrides, **more}) for v in scenario.variant)
    scenario = scenario.model_copy(update={"variant": (scenario.variant[0], *variants)})
    _compare(scenario, folder / slug(f"{model}-{split}-{pattern}-longer"), model, split, seeds)


def _compare(scenario: Scenario, out: Path, model: str, split: str, seeds: str) -> None:
    scenario = apply_overrides(scenario, [f"model.name={model}", f"data.partition={split}"])
    chosen = [int(seed) for seed in seeds.split(",")] if seeds else None
    compare_scenario(scenario, out, seeds=chosen, on_event=tell, jobs=JOBS)


def keep(folder: Path) -> None:
    """Write down what all comparisons in the folder found."""
    rows = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("tune") or not (path / "summary.json").is_file():
            continue
        comparison = read(path)
        data, model = comparison.scenario.data, comparison.scenario.model
        target, base = comparison.target, comparison.first
        longer = next((v for v in comparison.variants if v.name == f"{base.name}-longer" and v.done), None)
        for variant in comparison.variants:
            if not variant.done:
                continue
            reached = variant.reaching(target)
            more: dict[str, Any] = {"times_fewer_bytes_than_dense": comparison.savings(variant)}
            if longer is not None and longer.accuracy is not None:
                far = longer.accuracy.mean - POINT
                more = {
                    "rounds": variant.scenario.rounds,
                    "times_fewer_bytes_than_dense": _ratios(longer.reaching(target), reached),
                    "far_target_accuracy": round(far, 4),
                    "uplink_bytes_to_far_target": [entry and entry[1] for entry in variant.reaching(far)],
                    "times_fewer_bytes_to_far_target": _ratios(longer.reaching(far), variant.reaching(far)),
                }
            rows.append(
                {
                    "model": model.name,
                    "partition": data.partition,
                    "variant": variant.name,
                    "uplink": variant.scenario.compression.uplink,
                    "lr": variant.scenario.train.lr,
                    "seeds": [done.seed for done in variant.done],
                    "final_accuracy": [round(done.summary.final_accuracy or 0.0, 4) for done in variant.done],
                    "uplink_bytes": [done.summary.uplink_bytes for done in variant.done],
                    "target_accuracy": round(target, 4) if target else None,
                    "uplink_bytes_to_target": [entry and entry[1] for entry in reached],
                    "rounds_to_target": [entry and entry[0] for entry in reached],
                    **more,
                }
            )
    notes = (
        "target: mean final accuracy of the first variant (dense FedAvg) minus one point; of runs with more rounds, "
        "far target: the same of dense with more rounds, with which they are then compared, seed by seed"
    )
    save("noniid", rows, notes)


def _ratios(base: list[tuple[int, int] | None], ours: list[tuple[int, int] | None]) -> list[float | None]:
    return [round(b[1] / o[1], 1) if b and o else None for b, o in zip(base, ours, strict=True)]


def tell(event: Any) -> None:
    if type(event).__name__ == "RunBegins":
        print(f"{event.number}/{event.total} {event.variant} seed {event.seed}", flush=True)


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-") or "all"


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path.is_file() else []


if __name__ == "__main__":
    steps = {"tune": tune, "run": run, "longer": longer, "save": keep}
    if len(sys.argv) < 3 or sys.argv[1] not in steps:
        raise SystemExit(__doc__)
    steps[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
