"""Ctrl-C and SIGTERM: both end a run, but never between two writes that belong together."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def terminates() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold both signals back until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {kind: signal.signal(kind, lambda number, _frame: came.append(number)) for kind in _SIGNALS}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler if handler is not None else signal.SIG_DFL)
    if came:
        signal.raise_signal(came[0])
