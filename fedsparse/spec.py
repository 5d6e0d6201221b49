"""One small grammar for everything a user writes as text: operators, partitions, schedules.

``stage | stage | ...`` where a stage is ``name`` or ``name(argument, key=value, ...)``. An argument is again such
a pipeline, which is how ``piecewise(topk(density=0.01)|sign)`` nests. A value is a number, ``true``/``false`` or a
"quoted text".
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from fedsparse.errors import ConfigError, unknown_name

Value = int | float | bool | str
T = TypeVar("T")

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
    |(?P<name>[A-Za-z_]\w*)|(?P<text>"[^"]*"|'[^']*')|(?P<mark>[(),=|]))""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Stage:
    """One ``name(args, key=value)`` of a pipeline."""

    name: str
    args: tuple[tuple["Stage", ...], ...] = ()
    options: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [format_pipeline(arg) for arg in self.args]
        parts += [f"{key}={format_value(value)}" for key, value in self.options.items()]
        return f"{self.name}({', '.join(parts)})" if parts else self.name


def format_value(value: Value) -> str:
    """Write a value so that reading it gives exactly the same value back."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value)


def format_pipeline(stages: tuple[Stage, ...]) -> str:
    """Write a pipeline in its canonical form."""
    return "|".join(str(stage) for stage in stages)


def parse_pipeline(text: str) -> tuple[Stage, ...]:
    """Read ``a(x=1)|b`` into its stages.

    Raises
    ------
    ConfigError
        Where the text does not follow the grammar; the message points at the place.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a spec is text like 'topk(density=0.01)|sign', got {type(text).__name__} {text!r}.")
    return _Reader(text).read_all()


def parse_stage(text: str) -> Stage:
    """Read a pipeline that must have exactly one stage."""
    stages = parse_pipeline(text)
    if len(stages) != 1:
        raise ConfigError(f"{text!r} must be a single name or name(...), without '|'.")
    return stages[0]


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.kind, self.token = "", ""
        self.advance()

    def fail(self, wanted: str) -> ConfigError:
        found = f"{self.token!r} at character {self.position - len(self.token) + 1}" if self.token else "the end"
        return ConfigError(f"cannot read spec {self.text!r}: expected {wanted}, found {found}.")

    def advance(self) -> None:
        rest = self.text[self.position :]
        if not rest.strip():
            self.kind, self.token = "end", ""
            return
        match = _TOKEN.match(rest)
        if match is None or match.lastgroup is None:
            self.token = rest.strip()[0]
            self.position += rest.index(self.token) + 1
            raise self.fail("a name, a number or a quoted text")
        self.position += match.end()
        self.kind, self.token = match.lastgroup, match.group(match.lastgroup)

    def take(self, mark: str) -> bool:
        if self.kind == "mark" and self.token == mark:
            self.advance()
            return True
        return False

    def read_all(self) -> tuple[Stage, ...]:
        stages = self.read_pipeline()
        if self.kind != "end":
            raise self.fail("'|' or the end")
        return stages

    def read_pipeline(self) -> tuple[Stage, ...]:
        stages = [self.read_stage()]
        while self.take("|"):
            stages.append(self.read_stage())
        return tuple(stages)

    def read_stage(self) -> Stage:
        if self.kind != "name":
            raise self.fail("a name")
        name = self.token
        self.advance()
        args: list[tuple[Stage, ...]] = []
        options: dict[str, Value] = {}
        if self.take("(") and not self.take(")"):
            while True:
                self.read_argument(name, args, options)
                if self.take(")"):
                    break
                if not self.take(","):
                    raise self.fail("',' or ')'")
        return Stage(name, tuple(args), options)

    def read_argument(self, name: str, args: list[tuple[Stage, ...]], options: dict[str, Value]) -> None:
        if self.kind != "name":
            raise self.fail(f"key=value inside {name}(...)")
        first = self.token
        start = self.position
        self.advance()
        if not self.take("="):
            self.position = start - len(first)
            self.advance()
            args.append(self.read_pipeline())
            return
        if first in options:
            raise ConfigError(f"{name}(...) gives {first!r} twice.")
        options[first] = self.read_value()

    def read_value(self) -> Value:
        kind, token = self.kind, self.token
        if kind == "number":
            value: Value = float(token) if any(c in token for c in ".eE") else int(token)
        elif kind == "text":
            value = token[1:-1]
        elif kind == "name" and token.lower() in ("true", "false"):
            value = token.lower() == "true"
        else:
            raise self.fail('a number, true, false or a "quoted text"')
        self.advance()
        return value


def build(stage: Stage, registry: Mapping[str, Callable[..., T]], kind: str, **given: Any) -> T:
    """Build the registered dataclass that a stage names, with clear errors for wrong names and options.

    `given` are fields that do not come from the text.
    """
    factory = registry.get(stage.name)
    if factory is None:
        raise unknown_name(kind, stage.name, registry)
    if stage.args:
        raise ConfigError(f"{kind} {stage.name!r} takes key=value options only, got {stage}.")
    known = {f.name: f for f in fields(factory) if f.init and f.name not in given}  # type: ignore[arg-type]
    for key in stage.options:
        if key not in known:
            if not known:
                raise ConfigError(f"{kind} {stage.name!r} takes no options, got {key!r}.")
            raise unknown_name(f"option of {stage.name}(...):", key, known)
    missing = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in missing if name not in stage.options]
    if missing:
        raise ConfigError(f"{kind} {stage.name!r} needs {', '.join(missing)}; options: {', '.join(known)}.")
    return factory(**given, **stage.options)


def options_of(instance: Any) -> dict[str, Value]:
    """Return the options that differ from the defaults, in the order of the fields."""
    return {
        f.name: value
        for f in fields(instance)
        if f.init and (value := getattr(instance, f.name)) != f.default and value is not None
    }
