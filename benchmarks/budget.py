"""`hard_threshold(budget=...)` against the best constant lam for the same bytes.

The best constant is bracketed by bisection, each step a whole training; its total error at exactly the budget is
interpolated between the two trainings next to it (log against log).

Run: ``python -m benchmarks.budget`` (about half an hour on two cores), or with names of settings to run these alone.
"""

import json
import math
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks._report import save
from fedsparse.run import run_scenario
from fedsparse.scenario import apply_overrides, load

QUICK, SOFTMAX = "quickstart", ("model.name=softmax", "data.partition=iid", "train.clients_per_round=20")
# name -> scenario, overrides, quantizer, budgets, seeds
SETTINGS: dict[str, tuple] = {
    "fashion": ("fashion-noniid", (), '|qsgd(levels=8, norm="max")', ("1MB",), (1,)),
    "digits": (QUICK, (), "", ("2MB", "700kB", "270kB", "115kB", "60kB"), (1, 2)),
    "digits-sign": (QUICK, (), "|sign", ("200kB", "100kB"), (1, 2)),
    "digits-qsgd": (QUICK, (), '|qsgd(levels=8, norm="max")', ("200kB", "100kB"), (1, 2)),
    "digits-cosine": (QUICK, ("train.lr_schedule=cosine",), "", ("700kB", "115kB"), (1, 2)),
    "digits-step": (QUICK, ("train.lr_schedule=step(every=20, factor=0.2)",), "", ("700kB", "115kB"), (1, 2)),
    "digits-10-rounds": (QUICK, ("rounds=10",), "", ("360kB", "120kB", "20kB"), (1, 2)),
    "softmax-iid-all": (QUICK, (*SOFTMAX, "train.local_epochs=1"), "", ("375kB", "165kB", "90kB"), (1, 2)),
    "softmax-one-step": (QUICK, (*SOFTMAX, "train.local_steps=1"), "", ("165kB", "90kB"), (1, 2)),
}


def lines(scenario: str, overrides: tuple[str, ...], uplink: str, seed: int) -> list[dict]:
    plain = load(scenario).model_copy(update={"variant": ()})
    if "train.local_steps=1" in overrides:
        train = plain.train.model_copy(update={"local_epochs": None, "local_steps": 1})
        plain = plain.model_copy(update={"train": train})
        overrides = tuple(o for o in overrides if o != "train.local_steps=1")
    chosen = apply_overrides(plain, [*overrides, f"compression.uplink={uplink}", f"seed={seed}"])
    with tempfile.TemporaryDirectory() as folder:
        run_scenario(chosen, Path(folder) / "run", engine="inline")
        text = (Path(folder) / "run/rounds.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def result(rounds: list[dict]) -> tuple[int, float]:
    return sum(line["uplink_bytes"] for line in rounds), rounds[-1]["total_error"]


def best_constant(scenario: str, overrides: tuple, tail: str, seed: int, budget: float, guess: float) -> dict:
    """Return the constant lam whose training takes the budget, and its total error."""
    runs: dict[float, tuple[int, float]] = {}

    def at(lam: float) -> tuple[int, float]:
        lam = float(f"{lam:.4g}")
        if lam not in runs:
            runs[lam] = result(lines(scenario, overrides, f"hard_threshold(lam={lam!r}){tail}", seed))
        return runs[lam]

    low, high = guess, guess
    while at(low)[0] < budget:
        low /= 1.15
    while at(high)[0] > budget:
        high *= 1.15
    for _ in range(3):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if at(middle)[0] > budget else (low, middle)
    (most, low_error), (least, high_error) = at(low), at(high)
    share = math.log(budget / least) / math.log(most / least) if most != least else 0.0
    error = low_error**share * high_error ** (1.0 - share)
    return {"constant_lam": low**share * high ** (1.0 - share), "constant_error": error}


def measure(task: tuple[str, str, int]) -> dict:
    name, text, seed = task
    scenario, overrides, tail, _, _ = SETTINGS[name]
    rounds = lines(scenario, overrides, f'hard_threshold(budget="{text}"){tail}', seed)
    spent, error = result(rounds)
    budget = float(text[:-2]) * {"kB": 1e3, "MB": 1e6}[text[-2:]]
    settled = np.array([line["lam"] for line in rounds[max(3, round(0.1 * len(rounds)) + 1) : -1]])
    best = best_constant(scenario, overrides, tail, seed, budget, float(np.median(settled)))
    return {
        "setting": name,
        "seed": seed,
        "budget": text,
        "spent_percent": round(100 * spent / budget, 2),
        "lam_median": float(f"{np.median(settled):.3g}"),
        "lam_sd_percent": round(100 * (math.exp(float(np.std(np.log(settled)))) - 1), 1),
        "lam_max_over_min": round(float(settled.max() / settled.min()), 2),
        "constant_lam": float(f"{best['constant_lam']:.3g}"),
        "total_error": round(error, 4),
        "constant_total_error": round(best["constant_error"], 4),
        "error_ratio": round(error / best["constant_error"], 3),
        "final_accuracy": rounds[-1]["eval_accuracy"],
    }


def main(names: list[str]) -> None:
    tasks = [(name, *pair) for name in names or SETTINGS for pair in product(SETTINGS[name][3], SETTINGS[name][4])]
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(measure, tasks))
    ratios = [row["error_ratio"] for row in rows]
    within = sum(ratio <= 1.05 for ratio in ratios)
    save(
        "budget",
        rows,
        f"Total error over that of the best constant lam: {within} of {len(rows)} at most 1.05, median "
        f"{np.median(ratios):.3f}, largest {max(ratios):.3f}. lam: rounds after the first tenth, without the last.",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
