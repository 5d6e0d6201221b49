"""Every operator, one file each. Importing this package registers them all, so a new file needs no list to edit."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
