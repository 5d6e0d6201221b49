"""The clients' devices: who has which, and what a round takes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp

from fedsparse.compression.base import check_number, check_whole
from fedsparse.devices.availability import ALWAYS, Availability
from fedsparse.devices.profiles import Device
from fedsparse.errors import ConfigError
from fedsparse.seeding import generator

Mix = Mapping[Device, float]


@dataclass(frozen=True)
class Member:
    """One client's turn on its device.

    Parameters
    ----------
    client : str
        Who.
    down_s, compute_s, up_s : float
        Virtual seconds of its three parts.
    dropped : bool
        The device went away before its reply was through; `seconds` is then when.
    """

    client: str
    down_s: float
    compute_s: float
    up_s: float
    dropped: bool = False
    part: float = 1.0

    @property
    def seconds(self) -> float:
        """Virtual seconds until the server has the reply, or until the device went away."""
        return self.part * (self.down_s + self.compute_s + self.up_s)


@dataclass(frozen=True, eq=False)
class Fleet:
    """All clients' devices: each profile for its share of the clients, who has which drawn by a seed.

    Parameters
    ----------
    mix : mapping
        Device -> share of the clients, of any sum.
    num_clients : int
        Clients are named "0" to ``num_clients - 1``.
    seed : int
        Says who has which device.
    flop_per_step : float
        Floating-point operations of one local step: forward and backward pass of a batch.
    compute_sigma, network_sigma : float
        Standard deviation of the logarithm of each client's own factor on its device's speed and bandwidth.
    availability : Availability
        When clients are there.
    dropout : float
        Probability that a client goes away during a round, at a random moment of its turn.

    Raises
    ------
    ConfigError
        Impossible numbers.
    """

    mix: Mix
    num_clients: int
    seed: int
    flop_per_step: float
    compute_sigma: float = 0.0
    network_sigma: float = 0.0
    availability: Availability = ALWAYS
    dropout: float = 0.0
    _own: dict[str, Device] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.mix:
            raise ConfigError("a fleet needs at least one device profile.")
        for device, share in self.mix.items():
            check_number(f"devices.mix of {device.name}", "share", share, 1e-9, 1e9)
        for key in ("compute_sigma", "network_sigma"):
            check_number("devices", key, getattr(self, key), 0.0, 3.0)
        check_whole("devices", "num_clients", self.num_clients, 1)
        self.availability.check(self.num_clients)
        check_number("devices", "dropout", self.dropout, 0.0, 1.0)
        if self.dropout == 1.0:
            raise ConfigError("devices.dropout must be below 1, or no update ever arrives.")

    @cached_property
    def kinds(self) -> list[Device]:
        """The profile of each client, in client order."""
        total = sum(self.mix.values())
        exact = {device: self.num_clients * share / total for device, share in self.mix.items()}
        counts = {device: int(count) for device, count in exact.items()}
        by_rest = sorted(exact, key=lambda device: counts[device] - exact[device])
        for device in by_rest[: self.num_clients - sum(counts.values())]:
            counts[device] += 1
        dealt = [device for device, count in counts.items() for _ in range(count)]
        return [dealt[i] for i in generator(self.seed, "devices").permutation(self.num_clients)]

    def device(self, client: str) -> Device:
        """Return a client's device, with its own speed and bandwidth."""
        if client not in self._own:
            if not client.isdecimal() or int(client) >= self.num_clients:
                raise ConfigError(f"no device for client {client!r}: the fleet has 0 to {self.num_clients - 1}.")
            device = self.kinds[int(client)]
            compute, network = generator(self.seed, "device", client).standard_normal(2)
            faster, wider = exp(self.compute_sigma * compute), exp(self.network_sigma * network)
            self._own[client] = replace(
                device,
                gflops=device.gflops * faster,
                up_mbit=device.up_mbit * wider,
                down_mbit=device.down_mbit * wider,
            )
        return self._own[client]

    def there(self, client: str, now: float, draw: str) -> bool:
        """Return whether a client can be asked at `now`; `draw` names the occasion, for availability by chance."""
        return self.availability.there(client, now, draw, self.seed)

    def turn(self, client: str, server_round: int, down_bytes: int, steps: float, up_bytes: int) -> Member:
        """Return how long a client's turn takes: the model down, so many local steps, the update up."""
        device = self.device(client)
        rng = generator(self.seed, "dropout", server_round, client)
        dropped, moment = bool(rng.random() < self.dropout), float(rng.random())
        return Member(
            client,
            down_s=device.download_seconds(down_bytes),
            compute_s=device.compute_seconds(steps * self.flop_per_step),
            up_s=device.upload_seconds(up_bytes),
            dropped=dropped,
            part=moment if dropped else 1.0,
        )
