"""Device profiles by name."""

from dataclasses import dataclass, fields
from typing import Any

from fedsparse.compression.base import check_number
from fedsparse.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Device:
    """What one kind of device can do.

    Parameters
    ----------
    name : str
        The profile's name.
    gflops : float
        Sustained speed of training in float32, in 10^9 floating-point operations a second.
    up_mbit, down_mbit : float
        Bandwidth to and from the server, in 10^6 bits a second.
    latency_s : float
        Seconds that a message is under way beside the time its bytes take.
    memory_mb : float
        Memory for training, in 10^6 bytes.
    source : str
        Where the numbers are from.

    Raises
    ------
    ConfigError
        A number that no device has.
    """

    name: str
    gflops: float
    up_mbit: float
    down_mbit: float
    latency_s: float = 0.0
    memory_mb: float = 1e12
    source: str = ""

    def __post_init__(self) -> None:
        for key in ("gflops", "up_mbit", "down_mbit", "memory_mb"):
            check_number(f"device {self.name}", key, getattr(self, key), 0.0, float("inf"), open_low=True)
        check_number(f"device {self.name}", "latency_s", self.latency_s, 0.0, 3600.0)

    def compute_seconds(self, flop: float) -> float:
        """Return the seconds that so many floating-point operations take."""
        return flop / (self.gflops * 1e9)

    def download_seconds(self, num_bytes: int) -> float:
        """Return the seconds until a message of the server is here."""
        return self.latency_s + 8e-6 * num_bytes / self.down_mbit

    def upload_seconds(self, num_bytes: int) -> float:
        """Return the seconds until a message is at the server."""
        return self.latency_s + 8e-6 * num_bytes / self.up_mbit


_MOBILE = "latency: Ookla 2022, global median of mobile networks; bandwidth: assumed, a middling 4G cell"
_HOME = "bandwidth and latency: assumed, home Wi-Fi on a 50/20 Mbit/s line"

PROFILES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            "raspberry-pi-4", 8.0, 20.0, 50.0, 0.02, 4000, f"compute: HPL on four cores, B. Feiereisen 2022; {_HOME}"
        ),
        Device(
            "jetson-nano", 70.0, 20.0, 50.0, 0.02, 4000, f"compute: 30 % of the GPU's 236 GFLOP/s in float32; {_HOME}"
        ),
        Device("phone-4g", 20.0, 8.0, 25.0, 0.028, 2000, f"compute: assumed, a middle-class phone's CPU; {_MOBILE}"),
        Device("laptop-wifi", 100.0, 20.0, 50.0, 0.02, 8000, f"compute: assumed, four AVX2 cores at 30 %; {_HOME}"),
        Device(
            "datacenter",
            6000.0,
            10000.0,
            10000.0,
            0.0005,
            80000,
            "compute: 30 % of an A100's 19.5 TFLOP/s in float32; network: 10 Gbit/s Ethernet",
        ),
    )
}


# What a device of any kind may have, so that no time or rate leaves the range of floating-point numbers.
_RANGES = {
    "gflops": (1e-6, 1e9),
    "up_mbit": (1e-6, 1e9),
    "down_mbit": (1e-6, 1e9),
    "memory_mb": (1e-3, 1e12),
    "latency_s": (0.0, 3600.0),
}


def get_profile(name: str) -> Device:
    """Return a profile by its name.

    Raises
    ------
    ConfigError
        Unknown name.
    """
    if name not in PROFILES:
        raise unknown_name("device profile", name, PROFILES)
    return PROFILES[name]


def custom_profile(name: str, numbers: dict[str, Any]) -> Device:
    """Build a user's profile: numbers of its own, the others those of `like`, a profile's name.

    Raises
    ------
    ConfigError
        Unknown or missing keys, impossible numbers.
    """
    known = [entry.name for entry in fields(Device) if entry.name != "name"]
    for key in numbers:
        if key not in [*known, "like"]:
            raise unknown_name(f"key of device {name}:", key, [*known, "like"])
    base: dict[str, Any] = {}
    if "like" in numbers:
        base = {key: getattr(get_profile(str(numbers["like"])), key) for key in known if key != "source"}
    values = {**base, **{key: value for key, value in numbers.items() if key != "like"}}
    missing = [key for key in ("gflops", "up_mbit", "down_mbit") if key not in values]
    if missing:
        raise ConfigError(
            f'device {name} lacks {", ".join(missing)}: give them, or take those of another with like = "phone-4g".'
        )
    for key, value in values.items():
        if key == "source":
            continue
        low, high = _RANGES[key]
        check_number(f"device {name}", key, value, low, high)
    return Device(name=name, **values)
