"""What a comparison found, read from the folders of its runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from math import exp, log
from pathlib import Path
from typing import Any

from fedsparse.compare.statistics import Interval, interval, paired
from fedsparse.errors import ConfigError
from fedsparse.run.folder import PARTITION, ROUNDS, SUMMARY, RunFolder, is_ours
from fedsparse.run.summary import Rounds, Summary, first_reaching, virtual_time_to
from fedsparse.scenario import Scenario, expand

POINT = 0.01
LONG = 4000
_SUMS = (
    "uplink_bytes",
    "downlink_bytes",
    "dense_bytes",
    "uplink_frame_bits_formula",
    "nnz",
    "memory_resets",
    "restored",
    "wall_s",
)


@dataclass(frozen=True)
class Run:
    """One finished or unfinished run of a variant."""

    seed: int
    path: Path
    summary: Summary
    lines: Rounds

    @property
    def completed(self) -> bool:
        """Whether all rounds were run."""
        return self.summary.status == "completed"


@dataclass(frozen=True)
class Variant:
    """One variant with its runs, one for each seed, in the order of the seeds; None where a run is missing."""

    name: str
    scenario: Scenario
    runs: tuple[Run | None, ...]

    @property
    def done(self) -> list[Run]:
        """The completed runs."""
        return [run for run in self.runs if run is not None and run.completed]

    def each(self, field: str) -> list[Any]:
        """Return a field of the summaries for each seed, None where the run is not complete."""
        return [getattr(run.summary, field) if run is not None and run.completed else None for run in self.runs]

    def mean(self, field: str) -> float | None:
        """Return the mean of a field over the completed runs."""
        values = [value for value in self.each(field) if value is not None]
        return sum(values) / len(values) if values else None

    @property
    def accuracy(self) -> Interval | None:
        """Final accuracy over the seeds."""
        return interval([value for value in self.each("final_accuracy") if value is not None])

    @property
    def compression_ratio(self) -> float | None:
        """Dense bytes over wire bytes, all seeds together."""
        wire = sum(run.summary.uplink_bytes for run in self.done)
        return sum(run.summary.dense_bytes for run in self.done) / wire if wire else None

    def reaching(self, target: float | None) -> list[tuple[int, int] | None]:
        """Return round and uplink bytes at which each completed run first reached the target."""
        return [first_reaching(run.lines, target) for run in self.done]

    def virtual_time_to(self, target: float | None) -> float | None:
        """Return the mean virtual seconds to the target, where every completed run has a clock and reached it."""
        times = [virtual_time_to(run.lines, target) for run in self.done]
        known = [time for time in times if time is not None]
        return sum(known) / len(known) if known and len(known) == len(times) else None


@dataclass(frozen=True)
class Comparison:
    """All variants of a comparison, or the single one of a run.

    Parameters
    ----------
    scenario : Scenario
        With its variants.
    seeds : tuple of int
        The paired seeds.
    variants : tuple of Variant
        In the order of the file; the first is what the others are compared with.
    facts : dict
        Command, machine, versions, start, duration, status.
    division : dict or None
        Examples of each class at each client, for the first seed.
    """

    scenario: Scenario
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]
    facts: dict[str, Any]
    division: dict[str, Any] | None = None

    @property
    def first(self) -> Variant:
        """The variant that the others are compared with."""
        return self.variants[0]

    @cached_property
    def target(self) -> float | None:
        """The scenario's target accuracy; without one, the first variant's mean final accuracy minus one point."""
        if self.scenario.target_accuracy is not None:
            return self.scenario.target_accuracy
        mean = self.first.accuracy
        return mean.mean - POINT if mean is not None and mean.mean > POINT else None

    @property
    def has_clock(self) -> bool:
        """Whether any run has a virtual clock."""
        return any(variant.mean("virtual_s") is not None for variant in self.variants)

    @property
    def shows_target(self) -> bool:
        """Whether bytes and rounds to the target say something: a lone run is no measure of itself."""
        return self.target is not None and (self.target_is_given or len(self.variants) > 1)

    @property
    def target_is_given(self) -> bool:
        """Whether the target comes from the scenario."""
        return self.scenario.target_accuracy is not None

    def difference(self, variant: Variant) -> Interval | None:
        """Return the paired difference in final accuracy to the first variant."""
        if variant is self.first:
            return None
        return paired(variant.each("final_accuracy"), self.first.each("final_accuracy"))

    def savings(self, variant: Variant) -> float | None:
        """Return how many times fewer uplink bytes to the target than the first variant needs.

        The geometric mean over paired seeds; None unless both reached the target with every seed.
        """
        ours, base = variant.reaching(self.target), self.first.reaching(self.target)
        complete = len(ours) == len(base) == len(self.seeds)
        if variant is self.first or not complete or not all(ours) or not all(base):
            return None
        logs = [log(b[1] / o[1]) for o, b in zip(ours, base, strict=True) if o is not None and b is not None]
        return exp(sum(logs) / len(logs))

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "name": self.scenario.name,
            **self.facts,
            "seeds": list(self.seeds),
            "target_accuracy": self.target,
            "target_is_given": self.target_is_given,
            "variants": [self._variant_json(variant) for variant in self.variants],
            "runs": [
                {"variant": variant.name, **run.summary.to_json()}
                for variant in self.variants
                for run in variant.runs
                if run is not None
            ],
        }

    def _variant_json(self, variant: Variant) -> dict[str, Any]:
        accuracy, difference = variant.accuracy, self.difference(variant)
        reached = variant.reaching(self.target)
        return {
            "name": variant.name,
            "uplink": variant.scenario.compression.uplink,
            "strategy": variant.scenario.strategy.name,
            "runs_completed": len(variant.done),
            "final_accuracy": asdict(accuracy) if accuracy else None,
            "difference_to_first": asdict(difference) if difference else None,
            "uplink_bytes": variant.mean("uplink_bytes"),
            "downlink_bytes": variant.mean("downlink_bytes"),
            "compression_ratio": variant.compression_ratio,
            "reached_target": sum(entry is not None for entry in reached),
            "rounds_to_target": [entry[0] if entry else None for entry in reached],
            "uplink_bytes_to_target": [entry[1] if entry else None for entry in reached],
            "uplink_savings_to_target": self.savings(variant),
            "virtual_s": variant.mean("virtual_s"),
            "virtual_s_to_target": variant.virtual_time_to(self.target),
        }


def variant_folder(out: Path, variant: str, seed: int) -> Path:
    """Return where a comparison keeps one run."""
    return out / variant / f"seed-{seed}"


def read(path: Path) -> Comparison:
    """Read a comparison, or a single run as a comparison of one.

    Raises
    ------
    ConfigError
        Where the folder holds neither.
    """
    if not is_ours(path):
        raise ConfigError(f"{path} holds no run and no comparison of fedsparse (no scenario.toml with its results).")
    folder = RunFolder(path)
    scenario = folder.scenario()
    facts = folder.read_json(SUMMARY) or {}
    if "variants" not in facts:
        run = read_run(path)
        variant = Variant(scenario.name, scenario, (run,))
        return Comparison(scenario, (scenario.seed,), (variant,), _facts(facts), folder.read_json(PARTITION))
    seeds = tuple(int(seed) for seed in facts["seeds"])
    return read_runs(path, scenario, seeds, _facts(facts))


def read_runs(path: Path, scenario: Scenario, seeds: Sequence[int], facts: dict[str, Any]) -> Comparison:
    """Read the runs of a comparison as they are now."""
    variants, division = [], None
    for name, resolved in expand(scenario).items():
        runs = tuple(read_run(variant_folder(path, name, seed)) for seed in seeds)
        variants.append(Variant(name, resolved, runs))
        known = [run for run in runs if run is not None]
        if division is None and known:
            division = RunFolder(known[0].path).read_json(PARTITION)
    return Comparison(scenario, tuple(seeds), tuple(variants), facts, division)


def read_run(path: Path) -> Run | None:
    """Read one run's folder, None where there is none that ended."""
    folder = RunFolder(path)
    summary = folder.read_json(SUMMARY)
    if summary is None:
        return None
    return Run(int(summary["seed"]), path, Summary.from_json(summary), _lines(folder))


def _lines(folder: RunFolder) -> Rounds:
    """Read the rounds of a run, once while its file does not change: a comparison reads its runs after each of them."""
    try:
        state = (folder.path / ROUNDS).stat()
    except FileNotFoundError:
        return ()
    return _lines_of(folder.path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=256)
def _lines_of(path: Path, changed_ns: int, size: int) -> Rounds:
    lines = RunFolder(path).rounds()
    return lines if len(lines) <= LONG else merged(lines)


def merged(lines: Rounds) -> Rounds:
    """Add each round that was not evaluated to the next one that was: many thousand rounds of many runs fill memory.

    Sums and the state after a round are exact; what happened between two evaluations is left out.
    """
    kept: list[dict[str, Any]] = []
    open_line: dict[str, Any] | None = None
    for line in lines:
        if open_line is not None:
            sums = {key: (open_line[key] or 0) + (line[key] or 0) for key in _SUMS if key in line}
            joined = {key: [*open_line[key], *line[key]] for key in ("cohort", "accepted")}
            failures = {key: open_line.get(key, {}) | line.get(key, {}) for key in ("failed", "causes")}
            line = {**line, **sums, **joined, **failures}
        open_line = line if line.get("eval_accuracy") is None else None
        if open_line is None:
            kept.append(line)
    return kept if open_line is None else [*kept, open_line]


def _facts(values: dict[str, Any]) -> dict[str, Any]:
    wanted = ("status", "command", "machine", "versions", "started", "wall_s", "engine")
    return {key: values.get(key) for key in wanted}
