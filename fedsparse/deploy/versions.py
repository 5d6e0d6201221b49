"""What this side runs, as the other side wants to know it."""

from importlib.metadata import PackageNotFoundError, version

from fedsparse.protocol import PROTOCOL


def versions() -> dict[str, str | int]:
    """Return the versions that must fit together."""
    return {"fedsparse": installed("fedsparse") or "?", "flwr": installed("flwr") or "?", "protocol": PROTOCOL}


def installed(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
