"""The user's own objects, named as ``package.module:attribute``."""

import importlib
import os
import sys
from typing import Any

from fedsparse.errors import ConfigError


def load_object(name: str, kind: str) -> Any:
    """Import what ``package.module:attribute`` names; it must be callable.

    The current folder counts as importable, as for ``python -m``.

    Raises
    ------
    ConfigError
        Where the module or the attribute is missing, importing raises, or the object cannot be called.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{kind} {name!r} must be written package.module:callable.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{kind} {name!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        place = getattr(module, "__file__", None) or "a package without a file"
        raise ConfigError(f"{kind} {name!r}: module {module_name} ({place}) has no {attribute!r}.")
    found = getattr(module, attribute)
    if not callable(found):
        raise ConfigError(f"{kind} {name!r} is a {type(found).__name__}, not a callable.")
    return found
