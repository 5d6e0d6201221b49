"""From a TOML file, `--set` and variants to resolved scenarios, and back to TOML."""

import sysconfig
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from fedsparse.errors import ConfigError, unknown_name
from fedsparse.scenario.problems import describe, several, unknown_key
from fedsparse.scenario.schema import Scenario, all_keys, sections

# Setting one of a pair takes the place of the other.
_EXCLUSIVE = {"train.local_epochs": "train.local_steps", "train.local_steps": "train.local_epochs"}


def load(source: str | Path) -> Scenario:
    """Read a scenario from a file, or from the name of one that comes with fedsparse.

    Raises
    ------
    ConfigError
        One message for all that is wrong with the file.
    """
    path = find(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the scenario {path}: {getattr(error, 'strerror', None) or error}.") from None
    return from_toml(text, str(path))


def from_toml(text: str, where: str = "scenario") -> Scenario:
    """Read a scenario from TOML text."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}.") from None
    return from_dict(values, where)


def from_dict(values: Mapping[str, Any], where: str = "scenario") -> Scenario:
    """Build and check a scenario, variants included."""
    raw = dict(values)
    if isinstance(raw.get("variant"), list):
        raw["variant"] = [_variant(entry) for entry in raw["variant"]]
    try:
        scenario = Scenario.model_validate(raw)
    except ValidationError as error:
        raise describe(error, raw, where) from None
    if lines := _contradictions(scenario):
        raise several(where, lines)
    names = [variant.name for variant in scenario.variant]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: two variants are named {name!r}; give each its own name.")
    for variant in scenario.variant:
        if shared := sorted({"seed", "seeds", "target_accuracy"} & set(variant.overrides)):
            raise ConfigError(
                f"{where}: variant {variant.name!r} cannot set {shared[0]!r}: a comparison gives all variants the same."
            )
        _with(scenario, variant.overrides, f"{where}: variant {variant.name!r}")
    return _normal(scenario)


def apply_overrides(scenario: Scenario, assignments: Iterable[str]) -> Scenario:
    """Apply ``key=value`` texts, as `--set` gives them; a value is TOML, or a bare text.

    Raises
    ------
    ConfigError
        An unknown key, an impossible value, or a key that a variant sets itself, which would go unheard.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {assignment!r} must look like key=value, for example train.lr=0.1.")
        changes[key] = _value(value.strip())
    for variant in scenario.variant:
        if heard := sorted(set(changes) & set(variant.overrides)):
            raise ConfigError(
                f"--set {heard[0]}: variant {variant.name!r} sets {heard[0]} itself, so this would have no effect on "
                "it. Change the variant in the scenario file, or run one variant alone with `fedsparse run --variant`."
            )
    return _with(scenario, changes, "--set") if changes else scenario


def expand(scenario: Scenario) -> dict[str, Scenario]:
    """Return what a comparison runs: variant name -> scenario without variants, in the order of the file."""
    plain = scenario.model_copy(update={"variant": ()})
    if not scenario.variant:
        return {plain.name: plain}
    return {v.name: _with(plain, v.overrides, f"variant {v.name!r}") for v in scenario.variant}


def choose_variant(scenario: Scenario, name: str | None) -> Scenario:
    """Return one variant's scenario, or the base settings where no name is given."""
    if name is None:
        return scenario.model_copy(update={"variant": ()})
    variants = {variant.name for variant in scenario.variant}
    if name not in variants:
        if not variants:
            raise ConfigError(f"--variant {name!r}: the scenario {scenario.name!r} has no variants.")
        raise unknown_name("variant", name, variants)
    return expand(scenario)[name]


def to_toml(scenario: Scenario) -> str:
    """Write a scenario with every default spelled out; reading it back gives an equal one."""
    values = _plain(scenario.model_dump())
    variants = [{"name": entry["name"], **entry["overrides"]} for entry in values.pop("variant", [])]
    return tomli_w.dumps(values | ({"variant": variants} if variants else {}))


def shipped() -> dict[str, Path]:
    """Return the scenarios that come with fedsparse, and those in ./scenarios, by name."""
    folders = [
        Path(sysconfig.get_path("data")) / "share/fedsparse/scenarios",
        Path(__file__).parents[2] / "scenarios",
        Path.cwd() / "scenarios",
    ]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def find(source: str | Path) -> Path:
    """Return the path of a scenario given by path or name."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"the scenario {str(source)!r} is a folder; name a .toml file in it.")
    if path.suffix == ".toml" or "/" in str(source):
        there = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = f" In {path.parent} there are: {', '.join(there)}." if there else ""
        raise ConfigError(f"no scenario file {str(source)!r}.{hint}")
    names = shipped()
    if str(source) in names:
        return names[str(source)]
    raise ConfigError(f"{unknown_name('scenario', str(source), names)} A path to a .toml file is allowed too.")


def _variant(entry: Any) -> Any:
    """Split a [[variant]] table into its name and dotted overrides; nested tables mean the same as dotted keys."""
    if not isinstance(entry, dict):
        return entry
    overrides: dict[str, Any] = {}
    tables = sections()
    for key, value in entry.items():
        if key == "name":
            continue
        if key in tables and isinstance(value, dict):
            overrides.update({f"{key}.{inner}": content for inner, content in value.items()})
        else:
            overrides[key] = value
    return {**({"name": entry["name"]} if "name" in entry else {}), "overrides": overrides}


def _with(scenario: Scenario, changes: Mapping[str, Any], where: str) -> Scenario:
    """Return the scenario with dotted keys changed, checked again."""
    values = scenario.model_dump()
    known = set(all_keys())
    for key, value in changes.items():
        _set(values, key, value, known, where)
    try:
        changed = Scenario.model_validate(values)
    except ValidationError as error:
        raise describe(error, values, where) from None
    if lines := _contradictions(changed):
        raise several(where, lines)
    return _normal(changed)


def _set(values: dict[str, Any], key: str, value: Any, known: set[str], where: str) -> None:
    table, _, inner = key.partition(".")
    if key.startswith("strategy.options."):
        values["strategy"]["options"] = values["strategy"]["options"] | {key.removeprefix("strategy.options."): value}
        return
    if key not in known:
        raise ConfigError(f"{where}: {unknown_key(key, known)}")
    if key in _EXCLUSIVE:
        values[table][_EXCLUSIVE[key].partition(".")[2]] = None
    if inner:
        values[table][inner] = value
    else:
        values[table] = value


def _contradictions(scenario: Scenario) -> list[str]:
    """Return what no single key is to blame for."""
    train, data = scenario.train, scenario.data
    lines = []
    if train.local_epochs is not None and train.local_steps is not None:
        lines.append(
            f"train.local_epochs = {train.local_epochs} and train.local_steps = {train.local_steps} exclude one "
            "another: keep one."
        )
    if train.clients_per_round is not None and train.clients_per_round > data.num_clients:
        lines.append(
            f"train.clients_per_round = {train.clients_per_round} is more than data.num_clients = "
            f"{data.num_clients}: lower one or raise the other."
        )
    if scenario.seeds is not None and len(set(scenario.seeds)) < len(scenario.seeds):
        lines.append(f"seeds = {list(scenario.seeds)} names a seed twice: they must differ.")
    return lines


def _normal(scenario: Scenario) -> Scenario:
    """Fill in what follows from the rest: one local epoch by default, absolute paths for workers elsewhere."""
    train, data, engine = scenario.train, scenario.data, scenario.engine
    if train.local_epochs is None and train.local_steps is None:
        train = train.model_copy(update={"local_epochs": 1})
    if data.data_dir is not None:
        data = data.model_copy(update={"data_dir": _absolute("data.data_dir", data.data_dir)})
    if engine.federation is not None:
        engine = engine.model_copy(update={"federation": _absolute("engine.federation", engine.federation)})
    return scenario.model_copy(update={"train": train, "data": data, "engine": engine})


def _absolute(key: str, path: str) -> str:
    try:
        return str(Path(path).expanduser().resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a loop of links, a home of nobody
        raise ConfigError(f"{key} = {path!r} is no path of this machine: {error}.") from None


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _plain(value: Any) -> Any:
    """Drop None, which TOML does not have, and tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
