"""On the path of a process, this hides what a device's installation does not have."""

import sys

MISSING = {"ray", "plotly", "scipy", "sklearn", "safetensors"}


class Hidden:
    """Says of these packages that they are not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())  # type: ignore[arg-type]
