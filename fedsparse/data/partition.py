"""How training examples are divided among clients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from fedsparse.compression.base import check_number, check_whole
from fedsparse.errors import ConfigError
from fedsparse.seeding import generator
from fedsparse.spec import Stage, build, parse_stage

Indices = NDArray[np.int64]


class Partitioner(ABC):
    """Divides examples among clients; every example goes to at most one. Clients may stay empty."""

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def divide(
        self, labels: Indices, num_clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Return each client's positions in `labels`."""

    def __str__(self) -> str:
        options = {f.name: getattr(self, f.name) for f in fields(cast(Any, self))}
        return str(Stage(self.name, options={key: value for key, value in options.items() if value is not None}))


PARTITIONS: dict[str, type[Partitioner]] = {}


def _register(cls: type[Partitioner]) -> type[Partitioner]:
    PARTITIONS[cls.name] = cls
    return cls


def partition(
    spec: str, labels: Indices, num_clients: int, seed: int, groups: NDArray[Any] | None = None
) -> list[Indices]:
    """Divide examples among clients.

    Parameters
    ----------
    spec : str
        For example ``"dirichlet(alpha=0.1)"``; see `PARTITIONS`.
    labels : array of int64, shape (n,)
        Class of each example.
    num_clients : int
        How many clients; some may get nothing.
    seed : int
        The same seed gives the same division.
    groups : array, shape (n,), optional
        Natural client of each example, for ``"natural"``.

    Returns
    -------
    list of arrays of int64
        Disjoint positions for each client, in random order.
    """
    check_whole("partition", "num_clients", num_clients, 1)
    partitioner = make_partitioner(spec)
    # The canonical form: how the user writes alpha must not change who gets what.
    rng = generator(seed, "partition", str(partitioner), num_clients)
    parts = partitioner.divide(np.asarray(labels, dtype=np.int64), num_clients, rng, groups)
    return [rng.permutation(part).astype(np.int64) for part in parts]


def make_partitioner(spec: str) -> Partitioner:
    """Build the partitioner that a spec names."""
    registry = cast(Mapping[str, Callable[..., Partitioner]], PARTITIONS)
    return build(parse_stage(spec), registry, "partition")


def label_distribution(parts: list[Indices], labels: Indices, num_classes: int) -> NDArray[np.int64]:
    """Return how many examples of each class each client has, shape (num_clients, num_classes)."""
    counts = [np.bincount(labels[part], minlength=num_classes) for part in parts]
    return np.array(counts, dtype=np.int64).reshape(len(parts), num_classes)


def _split(order: Indices, sizes: NDArray[np.int64]) -> list[Indices]:
    return [np.asarray(piece) for piece in np.split(order, np.cumsum(sizes)[:-1])]


def _by_owner(owner: NDArray[np.int64], num_clients: int) -> list[Indices]:
    """Turn 'example i belongs to client owner[i]' into each client's examples."""
    return _split(np.argsort(owner, kind="stable"), np.bincount(owner, minlength=num_clients))


def _top_up(owner: NDArray[np.int64], num_clients: int, min_size: int, rng: np.random.Generator) -> None:
    """Give every client at least `min_size` examples, taken at random from the largest clients."""
    sizes = np.bincount(owner, minlength=num_clients)
    if min_size * num_clients > owner.size:
        raise ConfigError(
            f"min_size = {min_size} for {num_clients} clients takes {min_size * num_clients} examples, the data has "
            f"{owner.size}."
        )
    needs = np.maximum(min_size - sizes, 0)
    # The highest size down to which the large clients must give for there to be enough.
    low, high = min_size, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.maximum(sizes - middle, 0).sum() >= needs.sum() else (low, middle - 1)
    order = rng.permutation(owner.size)
    order = order[np.argsort(owner[order], kind="stable")]
    rank_within_client = np.arange(owner.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    spare = order[rank_within_client >= low]
    owner[rng.permutation(spare)[: needs.sum()]] = np.repeat(np.arange(num_clients), needs)


@_register
@dataclass(frozen=True)
class IID(Partitioner):
    """Shuffle and deal out equal shares."""

    name = "iid"
    summary = "equal shares of a shuffled set"

    def divide(
        self, labels: Indices, num_clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Return shares that differ by one example at most."""
        return [np.asarray(p) for p in np.array_split(rng.permutation(labels.size), num_clients)]


@_register
@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Each class is divided by a draw from a Dirichlet distribution (Yurochkin et al. 2019; Hsu et al. 2019).

    Parameters
    ----------
    alpha : float
        Concentration: 0.1 is strongly non-IID, 100 nearly IID.
    min_size : int, optional
        Least number of examples of a client. The largest clients give what is missing, so that one draw is enough;
        redrawing until it fits, as is often done, may never end.
    """

    alpha: float = 0.1
    min_size: int | None = None

    name = "dirichlet"
    summary = "class proportions from a Dirichlet distribution; alpha=0.1 is strongly non-IID"

    def __post_init__(self) -> None:
        check_number(self.name, "alpha", self.alpha, 0.0, 1e6, open_low=True)
        if self.min_size is not None:
            check_whole(self.name, "min_size", self.min_size, 0)

    def divide(
        self, labels: Indices, num_clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Return every example to some client; sizes vary and may be zero."""
        owner = np.zeros(labels.size, dtype=np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(num_clients, self.alpha))
            if not np.isfinite(shares).all():  # for a tiny alpha every gamma draw can underflow: one client takes all
                shares = np.zeros(num_clients)
                shares[rng.integers(num_clients)] = 1.0
            cuts = np.floor(np.cumsum(shares) * members.size).astype(np.int64).clip(0, members.size)
            cuts[-1] = members.size
            owner[members] = np.repeat(np.arange(num_clients), np.diff(cuts, prepend=0))
        if self.min_size:
            _top_up(owner, num_clients, self.min_size, rng)
        return _by_owner(owner, num_clients)


@_register
@dataclass(frozen=True)
class Shards(Partitioner):
    """Sort by class, cut into equal shards, deal some to each client (McMahan et al. 2017).

    Parameters
    ----------
    shards_per_client : int
    """

    shards_per_client: int = 2

    name = "shards"
    summary = "sorted by class, cut into equal shards, some dealt to each client"

    def __post_init__(self) -> None:
        check_whole(self.name, "shards_per_client", self.shards_per_client, 1, 10_000)

    def divide(
        self, labels: Indices, num_clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Return `shards_per_client` shards each."""
        order = rng.permutation(labels.size)
        order = order[np.argsort(labels[order], kind="stable")]
        shards = np.array_split(order, num_clients * self.shards_per_client)
        dealt = rng.permutation(len(shards)).reshape(num_clients, self.shards_per_client)
        return [np.concatenate([shards[s] for s in mine]) for mine in dealt]


@_register
@dataclass(frozen=True)
class Pathological(Partitioner):
    """Each client has exactly k classes; a class's examples are shared equally by the clients that have it.

    The label skew "#C = k" of Li et al. 2022, after McMahan et al. 2017. Where there are fewer places than classes,
    the examples of the classes left over go to nobody. A class with fewer examples than clients leaves some without.

    Parameters
    ----------
    classes_per_client : int
    """

    classes_per_client: int = 2

    name = "pathological"
    summary = "exactly k classes for each client"

    def __post_init__(self) -> None:
        check_whole(self.name, "classes_per_client", self.classes_per_client, 1)

    def divide(
        self, labels: Indices, num_clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Return examples of `classes_per_client` classes each."""
        classes = np.unique(labels)
        k = self.classes_per_client
        if k > classes.size:
            raise ConfigError(f"pathological: classes_per_client is {k}, the data has {classes.size} classes.")
        # Running through shuffled decks of all classes gives each client k different ones and uses all evenly.
        chosen: list[list[int]] = []
        deck: list[int] = []
        for _ in range(num_clients):
            mine: list[int] = []
            while len(mine) < k:
                if not any(c not in mine for c in deck):
                    deck += [int(c) for c in rng.permutation(classes)]
                mine.append(deck.pop(next(i for i, c in enumerate(deck) if c not in mine)))
            chosen.append(mine)
        parts: list[list[Indices]] = [[] for _ in range(num_clients)]
        for label in classes:
            holders = [client for client, mine in enumerate(chosen) if int(label) in mine]
            if holders:
                shares = np.array_split(rng.permutation(np.flatnonzero(labels == label)), len(holders))
                for holder, share in zip(holders, shares, strict=True):
                    parts[holder].append(share)
        return [np.concatenate(mine) if mine else np.empty(0, dtype=np.int64) for mine in parts]


@_register
@dataclass(frozen=True)
class QuantitySkew(Partitioner):
    """Sizes from a Dirichlet distribution, classes IID (Li et al. 2022, quantity skew).

    Parameters
    ----------
    alpha : float
        Concentration: 0.5 gives very different sizes, 100 nearly equal ones.
    min_size : int, optional
        As in `Dirichlet`.
    """

    alpha: float = 0.5
    min_size: int | None = None

    name = "quantity_skew"
    summary = "sizes from a Dirichlet distribution, classes mixed"

    def __post_init__(self) -> None:
        check_number(self.name, "alpha", self.alpha, 0.0, 1e6, open_low=True)
        if self.min_size is not None:
            check_whole(self.name, "min_size", self.min_size, 0)

    def divide(
        self, labels: Indices, num_clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Return every example to some client."""
        return Dirichlet(self.alpha, self.min_size).divide(
            np.zeros(labels.size, dtype=np.int64), num_clients, rng, None
        )


@_register
@dataclass(frozen=True)
class Natural(Partitioner):
    """The data set's own clients (speakers, users, devices), in the order of their names."""

    name = "natural"
    summary = "the data set's own clients"

    def divide(
        self, labels: Indices, num_clients: int, rng: np.random.Generator, groups: NDArray[Any] | None
    ) -> list[Indices]:
        """Return one natural client each; refuse where there are fewer than asked for."""
        if groups is None:
            raise ConfigError("partition 'natural' needs a data set with groups; this one names no natural clients.")
        names, owner = np.unique(groups, return_inverse=True)
        if names.size < num_clients:
            raise ConfigError(f"partition 'natural': the data has {names.size} clients, num_clients is {num_clients}.")
        return _by_owner(owner.astype(np.int64), names.size)[:num_clients]
