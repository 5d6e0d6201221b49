"""Find and load the ClientApp that the user named."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from flwr.clientapp import ClientApp

from fedsparse.errors import ConfigError, cause, unknown_name


def check_client_app(spec: Any) -> None:
    """Check, without importing the user's module, that a client app can be there.

    Raises
    ------
    ConfigError
        Where it is no ``"package.module:attribute"`` of a module that exists, no ClientApp and no callable.
    """
    if isinstance(spec, str):
        module, _ = _split(spec)
        if module in sys.modules:
            return
        try:
            found = find_spec(module) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise ConfigError(
                f"client app {spec!r}: there is no module {module!r} on the Python path. Install it, or run from the "
                "folder that holds it."
            )
    elif not isinstance(spec, ClientApp) and not callable(spec):
        raise ConfigError(
            f"client app {spec!r} is no ClientApp, no callable that returns one, and no 'package.module:attribute'."
        )


def load_client_app(spec: Any) -> ClientApp:
    """Import and return a client app.

    Raises
    ------
    ConfigError
        With the cause, where the module does not import, has no such attribute, or gives no ClientApp.
    """
    check_client_app(spec)
    app = spec
    if isinstance(spec, str):
        module_name, attribute = _split(spec)
        try:
            module = import_module(module_name)
        except Exception as error:
            raise ConfigError(f"client app {spec!r} does not import: {type(error).__name__}: {error}") from error
        if not hasattr(module, attribute):
            names = [name for name, value in vars(module).items() if isinstance(value, ClientApp)]
            raise unknown_name(f"client app in {module_name}", attribute, names or vars(module))
        app = getattr(module, attribute)
    if not isinstance(app, ClientApp) and callable(app):
        try:
            app = app()
        except Exception as error:
            raise ConfigError(f"client app {spec!r} raised {cause(error)}") from error
    if not isinstance(app, ClientApp):
        raise ConfigError(f"client app {spec!r} gives a {type(app).__name__}, not a flwr ClientApp.")
    return app


def _split(spec: str) -> tuple[str, str]:
    module, _, attribute = spec.partition(":")
    if not module or not attribute:
        raise ConfigError(f"client app {spec!r} must look like 'package.module:attribute'.")
    return module, attribute
