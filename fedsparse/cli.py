"""The command line: `fedsparse run`, `compare`, `reproduce`, `deploy`, `doctor`, `list`, `report`."""

import errno
import os
import sys
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated

import click
import typer

from fedsparse.deploy import commands as deploy
from fedsparse.errors import ConfigError, DataError, FedsparseError, RunError

app = typer.Typer(
    name="fedsparse",
    help="Communication-efficient federated learning on Flower: simulate it, compare it, count its bytes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# The newest click drops the help of arguments, so the commands' own texts explain them.
ScenarioArgument = Annotated[str, typer.Argument(metavar="SCENARIO")]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set train.lr=0.1; repeatable.")
]
EngineOption = Annotated[str | None, typer.Option("--engine", help="inline, ray, flower or deployment.")]
FederationOption = Annotated[
    Path | None, typer.Option("--federation", metavar="DIR", help="The federation's folder, for --engine deployment.")
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder for the results; default runs/NAME.")]
JobsOption = Annotated[int, typer.Option("--jobs", "-j", help="Runs at a time; more than one needs --engine inline.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace earlier results in that folder.")]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with a run that was stopped, after its last round.")
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show the logs of Flower, Ray and the clients.")]


# What a disk says of a path that the user gave; anything else is a bug, and keeps its traceback.
_OUTSIDE = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS}
# What only some installations have, and which one.
_EXTRAS = {"plotly": "server", "safetensors": "server", "scipy": "server", "sklearn": "server", "ray": "simulation"}


@app.command()
def run(
    scenario: ScenarioArgument,
    overrides: SetOption = [],  # noqa: B006  (typer reads it, nobody changes it)
    variant: Annotated[str | None, typer.Option("--variant", help="Run this variant of the scenario.")] = None,
    engine: EngineOption = None,
    federation: FederationOption = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Run one scenario and write its folder: rounds.jsonl, summary.json, model, report.

    SCENARIO is a file, or a name from `fedsparse list scenarios`.
    """
    from fedsparse import scenario as scenarios
    from fedsparse.run.folder import CHECKPOINT, check_output

    found = scenarios.load(scenario)
    loaded = scenarios.choose_variant(found, variant)
    chosen = scenarios.apply_overrides(loaded, [*overrides, *_engine(engine, federation)])
    folder = out or Path("runs") / (chosen.name if variant is None else f"{chosen.name}-{variant}")
    scenarios.validate_deep(chosen)
    if resume and overwrite:
        raise ConfigError("--resume goes on with a run, --overwrite replaces it: say one of them.")
    check_output(folder, overwrite=overwrite, resume=resume)

    from fedsparse.compare import read
    from fedsparse.console import Watch, show_table
    from fedsparse.report import build
    from fedsparse.run import run_scenario
    from fedsparse.terminal import out as console

    console.print(_describe(chosen), markup=False)
    if found.variant and variant is None:
        names = ", ".join(entry.name for entry in found.variant)
        console.print(f"(its base settings; variants: {names}; `fedsparse compare` runs them all)", markup=False)
    try:
        with Watch(chosen.rounds) as watch:
            run_scenario(chosen, folder, on_event=watch, verbose=verbose, overwrite=overwrite, resume=resume)
    except (KeyboardInterrupt, RunError) as error:
        more = " With --resume it goes on from there." if (folder / CHECKPOINT).is_dir() else ""
        if isinstance(error, RunError):
            left = _left(folder, more)
            raise RunError(f"{error}\n{left[:1].upper()}{left[1:]}".rstrip()) from error
        _stopped(folder, more)
        raise
    show_table(read(folder))
    console.print(f"results  {folder}", markup=False)
    console.print(f"report   {build(folder)}", markup=False)


@app.command()
def compare(
    scenario: ScenarioArgument,
    seeds: Annotated[str | None, typer.Option("--seeds", metavar="0,1,2", help="Default: the scenario's.")] = None,
    overrides: SetOption = [],  # noqa: B006  (typer reads it, nobody changes it)
    engine: EngineOption = None,
    federation: FederationOption = None,
    jobs: JobsOption = 1,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Run all variants of a scenario with the same seeds; write a table and a report.

    SCENARIO is a file, or a name from `fedsparse list scenarios`. Called again, it goes on where it stopped.
    """
    from fedsparse import scenario as scenarios

    loaded = scenarios.apply_overrides(scenarios.load(scenario), [*overrides, *_engine(engine, federation)])
    chosen = _seeds(seeds) or loaded.seeds or (loaded.seed,)
    folder = out or Path("runs") / loaded.name
    variants = scenarios.expand(loaded)
    for resolved in variants.values():
        scenarios.validate_deep(resolved)

    from fedsparse.compare import compare_scenario
    from fedsparse.compare.parallel import check_jobs
    from fedsparse.console import Watch, show_table
    from fedsparse.report import build
    from fedsparse.terminal import out as console

    check_jobs(jobs, variants.values())
    runs = len(variants) * len(chosen)
    console.print(f"{_describe(loaded)}; {len(variants)} variants x {len(chosen)} seeds = {runs} runs", markup=False)
    try:
        with Watch(len(chosen) * sum(each.rounds for each in variants.values()), jobs) as watch:
            result = compare_scenario(
                loaded, folder, seeds=chosen, on_event=watch, verbose=verbose, overwrite=overwrite, jobs=jobs
            )
    except KeyboardInterrupt:
        _stopped(folder, " The same command goes on from there.")
        raise
    show_table(result)
    console.print(f"results  {folder}", markup=False)
    console.print(f"report   {build(folder)}", markup=False)
    if result.facts["status"] != "completed":
        raise typer.Exit(1)


@app.command()
def reproduce(
    paper: Annotated[str | None, typer.Argument(metavar="[PAPER]")] = None,
    only: Annotated[list[str], typer.Option("--only", metavar="PART", help="Run this part alone; repeatable.")] = [],  # noqa: B006
    seeds: Annotated[str | None, typer.Option("--seeds", metavar="0,1,2", help="Default: the scenarios'.")] = None,
    overrides: SetOption = [],  # noqa: B006  (typer reads it, nobody changes it)
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Runs at a time; default: as many as CPUs.")] = 0,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Run a paper's experiments again and judge its claims, with a page that shows both.

    PAPER is sahu2021, stich2018 or basu2019; without it, they are listed. Called again, it goes on where it stopped.
    """
    from fedsparse.reproduce import command

    if paper is None:
        command.list_papers()
        return
    folder = out or Path("runs") / paper
    command.reproduce_paper(paper, folder, only, _seeds(seeds), overrides, jobs, overwrite=overwrite, verbose=verbose)


@app.command("list")
def list_(what: Annotated[str | None, typer.Argument(metavar="[WHAT]")] = None) -> None:
    """List what scenarios can name.

    WHAT is scenarios, operators, datasets, partitions, models, strategies, schedules or keys; without it, all but the
    keys.
    """
    from fedsparse.console import show_listing
    from fedsparse.listing import LISTS, table

    for name in [what] if what is not None else [name for name in LISTS if name != "keys"]:
        show_listing(name, *table(name))


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="DIR")]) -> None:
    """Write the report of a run or a comparison again, from the files in DIR."""
    from fedsparse.compare import read
    from fedsparse.console import show_table
    from fedsparse.report import build
    from fedsparse.terminal import out as console

    show_table(read(folder))
    console.print(f"report   {build(folder)}", markup=False)


app.add_typer(deploy.app)
app.command()(deploy.doctor)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Show the version and leave.")] = False,
) -> None:
    if version:
        print(f"fedsparse {package_version('fedsparse')}")
        raise typer.Exit


def _engine(name: str | None, federation: Path | None) -> list[str]:
    chosen = [] if name is None else [f"engine.name={name}"]
    return chosen if federation is None else [*chosen, f"engine.federation={str(federation)!r}"]


def _seeds(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--seeds {text!r} must be whole numbers of at least 0 with commas, for example 0,1,2.")
    seeds = tuple(int(part) for part in parts)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text!r} names a seed twice: they must differ.")
    return seeds


def _describe(scenario: "object") -> str:
    from fedsparse.scenario import Scenario

    assert isinstance(scenario, Scenario)
    data, cohort = scenario.data, scenario.train.clients_per_round
    part = f", {cohort} a round" if cohort else ""
    return (
        f"{scenario.name}: {data.dataset}, {scenario.model.name}, {data.num_clients} clients{part}, {data.partition}, "
        f"{scenario.rounds} rounds on {scenario.engine.name}"
    )


def _left(folder: Path, more: str = "") -> str:
    return f"what was done so far is in {folder}.{more}" if (folder / "summary.json").is_file() else ""


def _stopped(folder: Path, more: str = "") -> None:
    from fedsparse.terminal import err

    left = _left(folder, more)
    err.print(f"stopped; {left}" if left else "stopped.", markup=False)


def main() -> int:
    """Run the command line; errors that the user can act on become one message and an exit code.

    Returns
    -------
    int
        0: done; 1: a run failed; 2: something that the user wrote is wrong; 130: Ctrl-C.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for the user's own modules, as `python -m` has it
    try:
        code = app(standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        return 130
    except ModuleNotFoundError as error:
        if (extra := _EXTRAS.get((error.name or "").partition(".")[0])) is None:
            raise
        from fedsparse.terminal import fail

        fail(
            f"this needs {error.name}, which a device's installation does not have: install fedsparse[{extra}]; in its "
            f"repository: pip install '.[{extra}]'."
        )
        return 2
    except OSError as error:
        if error.errno not in _OUTSIDE or error.filename is None:
            raise
        from fedsparse.terminal import fail

        fail(f"{error.filename}: {error.strerror}.")
        return 2
    except FedsparseError as error:
        from fedsparse.terminal import fail

        fail(str(error))
        return 2 if isinstance(error, ConfigError | DataError) else 1


if __name__ == "__main__":
    sys.exit(main())
