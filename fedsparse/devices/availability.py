"""When a device is there to be asked."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, cast

from fedsparse.compression.base import check_number
from fedsparse.errors import ConfigError, DataError
from fedsparse.seeding import generator
from fedsparse.spec import build, parse_stage

DAY = 86400.0


class Availability(ABC):
    """Says whether a client is there at a moment of virtual time."""

    name: ClassVar[str]
    summary: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]

    def check(self, num_clients: int) -> None:  # noqa: B027  (most fit any number of clients)
        """Refuse what leaves all of the clients "0" to ``num_clients - 1`` away for ever."""

    @abstractmethod
    def there(self, client: str, now: float, draw: str, seed: int) -> bool:
        """Return whether `client` can be asked at `now` (virtual seconds); `draw` names the occasion."""


@dataclass(frozen=True)
class Always(Availability):
    """Always there."""

    name = "always"
    summary = "always there"
    examples = ("always",)

    def there(self, client: str, now: float, draw: str, seed: int) -> bool:
        """Return True."""
        return True


ALWAYS = Always()


@dataclass(frozen=True)
class Probability(Availability):
    """There with probability p, drawn for each client and round by itself."""

    p: float

    name = "probability"
    summary = "there with probability p in each round, independently"
    examples = ("probability(p=0.8)",)

    def __post_init__(self) -> None:
        check_number(self.name, "p", self.p, 0.0, 1.0, open_low=True)

    def there(self, client: str, now: float, draw: str, seed: int) -> bool:
        """Return a seeded draw."""
        return bool(generator(seed, "available", draw, client).random() < self.p)


@dataclass(frozen=True)
class Periodic(Availability):
    """There for a fraction `on` of every period, each client at a phase of its own: phones that charge at night.

    Parameters
    ----------
    period : float
        Virtual seconds; a day by default.
    on : float
        Fraction of it, above 0, at most 1.
    spread : float
        How far the clients' phases lie apart, as a fraction of the period; 0: all come and go together.
    """

    on: float
    period: float = DAY
    spread: float = 1.0

    name = "periodic"
    summary = "there for a fraction of every period, each client at a phase of its own"
    examples = ("periodic(on=0.33)", "periodic(on=0.5, period=3600, spread=0.2)")

    def __post_init__(self) -> None:
        check_number(self.name, "on", self.on, 0.0, 1.0, open_low=True)
        check_number(self.name, "period", self.period, 0.0, 1e9, open_low=True)
        check_number(self.name, "spread", self.spread, 0.0, 1.0)

    def there(self, client: str, now: float, draw: str, seed: int) -> bool:
        """Return whether the client's phase is within the fraction."""
        offset = generator(seed, "phase", client).random() * self.spread
        return (now / self.period + offset) % 1.0 < self.on


@dataclass(frozen=True)
class Trace(Availability):
    """There as a CSV file says: lines ``client,start,end`` in virtual seconds; afterwards it begins anew.

    Parameters
    ----------
    path : str
        The file. A client without a line in it is never there.
    """

    path: str

    name = "trace"
    summary = "as a CSV file of client,start,end says"
    examples = ()

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise ConfigError(f'trace: path must be a text such as path="trace.csv", got {self.path!r}.')
        _read(self.path)

    def check(self, num_clients: int) -> None:
        """Refuse a trace of other clients."""
        _, intervals = _read(self.path)
        if not any(client.isdecimal() and int(client) < num_clients for client in intervals):
            raise DataError(
                f"the availability trace {self.path} names none of the clients 0 to {num_clients - 1}, but "
                f"{next(iter(intervals))!r}, ...: nobody would ever be there."
            )

    def there(self, client: str, now: float, draw: str, seed: int) -> bool:
        """Return whether any of the client's intervals holds the moment."""
        length, intervals = _read(self.path)
        moment = now % length
        return any(start <= moment < end for start, end in intervals.get(client, ()))


@lru_cache(maxsize=8)
def _read(path: str) -> tuple[float, dict[str, list[tuple[float, float]]]]:
    intervals: dict[str, list[tuple[float, float]]] = {}
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            for number, line in enumerate(csv.reader(file), 1):
                if not line or (number == 1 and line[0] == "client"):
                    continue
                try:
                    client, start, end = line[0].strip(), float(line[1]), float(line[2])
                except (IndexError, ValueError):
                    raise DataError(
                        f"{path}, line {number}: expected client,start,end, got {','.join(line)!r}."
                    ) from None
                if not 0 <= start < end < float("inf"):
                    raise DataError(f"{path}, line {number}: needs 0 <= start < end, got {start:g} and {end:g}.")
                intervals.setdefault(client, []).append((start, end))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read the availability trace {path}: {error}.") from None
    if not intervals:
        raise DataError(f"the availability trace {path} has no line client,start,end.")
    return max(end for spans in intervals.values() for _, end in spans), intervals


AVAILABILITY: dict[str, type[Availability]] = {cls.name: cls for cls in (Always, Probability, Periodic, Trace)}


def make_availability(spec: str) -> Availability:
    """Build what a spec such as ``"probability(p=0.8)"`` names.

    Raises
    ------
    ConfigError, DataError
        Unknown names, impossible values, a trace that cannot be read.
    """
    if not isinstance(spec, str):
        raise ConfigError(f"availability must be a text such as 'probability(p=0.8)', got {spec!r}.")
    return build(parse_stage(spec), cast(Mapping[str, Callable[..., Availability]], AVAILABILITY), "availability")
