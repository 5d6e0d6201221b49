"""Keep the libraries' logs away from the user unless they are wanted."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = ("flwr", "ray", "strategies", "clients")


@contextmanager
def logs(verbose: bool) -> Iterator[None]:
    """Let only warnings of Flower, Ray and our own packages through, or everything if `verbose`."""
    import flwr.supercore.logger  # noqa: F401  (sets its own level when it is first imported)

    loggers = [logging.getLogger(name) for name in _NAMES]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
