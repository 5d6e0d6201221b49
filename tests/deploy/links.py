"""A slow link to a device: a network namespace, a veth pair, and a token bucket on either end."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

import pytest

needs_links = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="needs root, and ip and tc of iproute2",
)


class Link:
    """A namespace whose only way out is a link to this machine.

    Parameters
    ----------
    number : int
        Tells links of a machine apart; the addresses are 10.83.NUMBER.1 here and .2 there.
    rate : str
        Of either direction, as tc takes it: ``"2mbit"``.
    """

    def __init__(self, number: int, rate: str) -> None:
        self.name, self.here, self.there = f"fs-{number}", f"fs-h{number}", f"fs-d{number}"
        self.address, self.prefix = f"10.83.{number}.1", ("ip", "netns", "exec", f"fs-{number}")
        self._number, self._rate = number, rate

    def __enter__(self) -> Self:
        self.close()
        _ip("netns", "add", self.name)
        _ip("link", "add", self.here, "type", "veth", "peer", "name", self.there, "netns", self.name)
        _ip("addr", "add", f"{self.address}/24", "dev", self.here)
        _ip("link", "set", self.here, "up")
        inside = ["-n", self.name]
        _ip(*inside, "addr", "add", f"10.83.{self._number}.2/24", "dev", self.there)
        for device in ("lo", self.there):
            _ip(*inside, "link", "set", device, "up")
        shape = ["root", "tbf", "rate", self._rate, "burst", "16kb", "latency", "400ms"]
        _run("tc", "qdisc", "add", "dev", self.here, *shape)
        _run(*self.prefix, "tc", "qdisc", "add", "dev", self.there, *shape)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for command in (("link", "del", self.here), ("netns", "del", self.name)):
            subprocess.run(["ip", *command], stderr=subprocess.DEVNULL, check=False)

    def set(self, state: str) -> None:
        """Pull the plug ("down"), or put it in again ("up")."""
        _ip("link", "set", self.here, state)

    @property
    def uplink_bytes(self) -> int:
        """Bytes that came from the device, as the interface counts them."""
        return int(Path(f"/sys/class/net/{self.here}/statistics/rx_bytes").read_text())

    @property
    def downlink_bytes(self) -> int:
        return int(Path(f"/sys/class/net/{self.here}/statistics/tx_bytes").read_text())


def _ip(*command: str) -> None:
    _run("ip", *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
