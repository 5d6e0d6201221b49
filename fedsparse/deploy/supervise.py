"""Keep processes running: start them again when they end, write their output into logs that do not grow for ever."""

import ctypes
import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from fedsparse.flower_programs import without_colours
from fedsparse.processes import stop_all

LOG_BYTES, LOG_FILES = 1_000_000, 5
FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S = 1.0, 30.0, 60.0
AGAIN_AFTER_S = 600.0
_PR_SET_PDEATHSIG = 1
# Flower's executors look for work every second.
QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}

Listener = Callable[[str], None]


class Child:
    """One process that is to run always.

    Parameters
    ----------
    name : str
        For the log, and for people.
    command : sequence of str
        What to run.
    environment : mapping
        Its whole environment.
    log : path
        Gets its output, rotated.
    on_line : callable, optional
        Gets each line of its output, in another thread.
    before_start : callable, optional
        Called before every start.
    memory_mb : int, optional
        What it, and each process that it starts, may allocate.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        on_line: Listener | None = None,
        before_start: Callable[[], None] | None = None,
        memory_mb: int | None = None,
    ) -> None:
        self.name, self.command, self.environment = name, list(command), dict(environment)
        self.on_line, self.before_start, self.memory_mb = on_line, before_start, memory_mb
        self.tail: deque[str] = deque(maxlen=40)
        self.process: subprocess.Popen[str] | None = None
        self.starts = 0
        self._pause, self._began, self._next = FIRST_PAUSE_S, 0.0, 0.0
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = logging.Logger(name)
        handler = _Log(log, maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1, encoding="utf-8", delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._log.addHandler(handler)

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process; it ends when this one does."""
        limit, parent = self.memory_mb, os.getpid()

        def prepare() -> None:
            _die_with(parent)
            if limit is not None:
                import resource

                # Of what a process maps, torch's libraries alone take gigabytes; this counts what it allocates.
                resource.setrlimit(resource.RLIMIT_DATA, (limit << 20, limit << 20))

        if self.before_start is not None:
            self.before_start()
        self.starts += 1
        self._began = time.monotonic()
        self._log.info("--- start %d: %s", self.starts, " ".join(self.command))
        self.process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=prepare,
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def tend(self) -> int | None:
        """Start the process where it is due; return the exit code of one that has just ended."""
        if self.process is None:
            if time.monotonic() >= self._next:
                self.start()
            return None
        code = self.process.poll()
        if code is None:
            return None
        if time.monotonic() - self._began > STEADY_S:
            self._pause = FIRST_PAUSE_S
        self._log.info("--- ended with code %d; again in %.0f s", code, self._pause)
        self._next = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        self.process = None
        return code

    @property
    def last_words(self) -> str:
        """The last line that it wrote, or as much of it as one reads; an address of a manual says nothing."""
        return next((line for line in reversed(self.tail) if line.strip() and "https://" not in line), "")[:200]

    @property
    def pause_s(self) -> float:
        """Seconds until it is started again."""
        return max(0.0, self._next - time.monotonic())

    def farewell(self, code: int) -> str:
        """Say how it ended, and when it is started again."""
        return f"{self.name} ended with code {code} ({self.last_words}); again in {self.pause_s:.0f} s"

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for raw in process.stdout:
                line = without_colours(raw).rstrip()
                self.tail.append(line)
                self._log.info("%s", line)
                # Whatever happens, such as a full disk: nobody else reads the pipe, and the child would break with it.
                with suppress(Exception):
                    if self.on_line is not None:
                        self.on_line(line)


class Sayings:
    """Passes on what people should know, the same thing again only after some minutes: a device may try for weeks.

    Parameters
    ----------
    say : callable
        Gets the texts.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said = say, dict[str, float]()

    def __call__(self, text: str, about: str | None = None) -> None:
        """Say `text`, unless something `about` the same was said a short while ago."""
        now, about = time.monotonic(), about or text
        if now - self._said.get(about, -AGAIN_AFTER_S) >= AGAIN_AFTER_S:
            self._said[about] = now
            self._say(text)

    def forget(self) -> None:
        """Say everything anew: what was wrong has been mended."""
        self._said.clear()


class _Log(RotatingFileHandler):
    """A log that is silent while its disk is full, and goes on afterwards."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing: logging would write a traceback for each line."""


class Supervisor:
    """Runs children until it is told to stop.

    Parameters
    ----------
    children : sequence of Child
        In the order in which they are started.
    mark : str
        Text in the environment of all processes, by which strays of an earlier supervisor are found and ended.
    on_end : callable, optional
        Told of a child that ended, and its exit code.
    on_tick : callable, optional
        Called several times a second.
    """

    def __init__(
        self,
        children: Sequence[Child],
        mark: str,
        on_end: Callable[[Child, int], None] | None = None,
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        self.children, self._mark = list(children), mark
        self._on_end, self._on_tick = on_end, on_tick
        self._stop = threading.Event()

    def stop(self, *_: object) -> None:
        """Let `run` return."""
        self._stop.set()

    def run(self) -> None:
        """Keep the children running until SIGINT or SIGTERM."""
        before = {kind: signal.signal(kind, self.stop) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            stop_all(self._mark, None)
            while not self._stop.is_set():
                for child in self.children:
                    if (code := child.tend()) is not None and self._on_end is not None:
                        self._on_end(child, code)
                if self._on_tick is not None:
                    self._on_tick()
                self._stop.wait(0.2)
        finally:
            stop_all(self._mark, None)
            for kind, handler in before.items():
                signal.signal(kind, handler)


def _die_with(parent: int) -> None:
    """Let the kernel end this process together with its parent, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        os._exit(1)
