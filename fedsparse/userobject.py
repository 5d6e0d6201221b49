"""The user's own objects, named as ``package.module:attribute``."""

import importlib
import os
import sys
from contextlib import suppress
from typing import Any

from fedsparse.errors import ConfigError, cause


def names_object(name: str) -> bool:
    """Tell ``package.module:attribute`` from a path, which may have a colon too."""
    return ":" in name and "/" not in name


def load_object(name: str, kind: str) -> Any:
    """Import what ``package.module:attribute`` names; it must be callable.

    The current folder counts as importable, as for ``python -m``.

    Raises
    ------
    ConfigError
        Where the module or the attribute is missing, importing raises, or the object cannot be called.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise ConfigError(f"{kind} {name!r} must be written package.module:callable.")
    with suppress(OSError):  # the current folder may be gone
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        text = f"{kind} {name!r}: importing {module_name} failed: {cause(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            text += ". It must be installed, or lie in the current folder or in one of PYTHONPATH."
        raise ConfigError(text) from error
    try:
        found = getattr(module, attribute)
    except AttributeError:
        place = getattr(module, "__file__", None) or "a package without a file"
        raise ConfigError(f"{kind} {name!r}: module {module_name} ({place}) has no {attribute!r}.") from None
    except (Exception, SystemExit) as error:  # a module may make its attributes when asked
        raise ConfigError(f"{kind} {name!r}: {attribute!r} of module {module_name} failed: {cause(error)}") from error
    if not callable(found):
        raise ConfigError(f"{kind} {name!r} is a {type(found).__name__}, not a callable.")
    return found
