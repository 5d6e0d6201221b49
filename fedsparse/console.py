"""What the command line shows while runs go on."""

import sys
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedsparse.compare.conduct import RunBegins, RunEnds
from fedsparse.compare.results import Comparison
from fedsparse.compare.table import digits, duration
from fedsparse.run import RoundDone, Started
from fedsparse.terminal import out

PLAIN_EVERY_S = 15.0


class Watch:
    """Shows the rounds of one run, or of all runs of a comparison: a bar on a terminal, a few plain lines elsewhere.

    Parameters
    ----------
    rounds : int
        Rounds of all runs together.
    jobs : int
        Runs at a time; what several have to tell comes when they are over.
    """

    def __init__(self, rounds: int, jobs: int = 1) -> None:
        self._rounds, self._done, self._bulk = rounds, 0, jobs > 1
        self._before = 0  # rounds that earlier processes have done
        self._resets = 0  # error memories that restarted from zero
        self._label, self._spent, self._accuracy, self._known = "", 0, "", ""
        self._last_line = self._began = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.fields[label]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=out,
            transient=True,
            disable=not out.is_terminal,
        )
        self._task = self._bar.add_task("", total=rounds, label="starting", state="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, event: RunBegins | RunEnds | Started | RoundDone) -> None:
        """Take in an event."""
        if isinstance(event, RunBegins):
            self._begin(event)
        elif isinstance(event, RunEnds):
            self._end(event)
        elif isinstance(event, RoundDone):
            self._round(event)
        else:
            self._spent, self._known = event.uplink_bytes, f"accuracy {100 * event.initial_accuracy:.1f} %"
            self._resumed(event.rounds)
            self._show(f"round {event.rounds}/{event.scenario.rounds}  {self._known}")

    def _begin(self, event: RunBegins) -> None:
        self._label, self._resets = f"[{event.number}/{event.total}] {event.variant}, seed {event.seed}", 0
        if event.done_before:
            self._say(f"{self._label}: done before")
        else:
            self._show("starting")

    def _end(self, event: RunEnds) -> None:
        left = self._left() if self._bulk else ""
        text = f"{self._label}: failed: {event.error}" if event.error else f"{self._label}: {self._accuracy}{left}"
        self._say(text)

    def _round(self, event: RoundDone) -> None:
        line = event.line
        self._done += 1
        self._spent += line["uplink_bytes"]
        if line["eval_accuracy"] is not None:
            self._known = f"accuracy {100 * line['eval_accuracy']:.1f} %"
        self._accuracy = f"{self._known}, uplink {digits(self._spent / 1e6)} MB{_budget(line)}"
        clock = f"  {duration(line['virtual_s'])} on the devices" if line.get("virtual_s") is not None else ""
        failed = clock + (f"  {len(line['failed'])} {'lost' if clock else 'failed'}" if line["failed"] else "")
        self._resets += line.get("memory_resets", 0)
        failed += f"  {self._resets} error memories restarted from zero" if self._resets else ""
        text = f"round {line['round']}/{event.scenario.rounds}  {self._accuracy.replace(', ', '  ')}{failed}"
        self._show(text)
        last = line["round"] == event.scenario.rounds and not self._label
        if not out.is_terminal and not self._bulk and (last or time.monotonic() - self._last_line > PLAIN_EVERY_S):
            self._last_line = time.monotonic()
            self._say(f"{self._label}{'  ' if self._label else ''}{text}{self._left()}")

    def _resumed(self, rounds: int) -> None:
        if rounds:
            self._done += rounds
            self._before += rounds
            self._say(f"{self._label}{'  ' if self._label else ''}goes on after round {rounds}")

    def _left(self) -> str:
        here = self._done - self._before
        if not here:
            return ""
        left = (time.monotonic() - self._began) / here * (self._rounds - self._done)
        return f"  about {left:.0f} s left" if left >= 1 else ""

    def _show(self, state: str) -> None:
        self._bar.update(self._task, completed=self._done, label=self._label, state=state)

    def _say(self, text: str) -> None:
        self._bar.console.print(text, markup=False)


def _budget(line: dict[str, Any]) -> str:
    expected = line.get("budget_predicted")
    return "" if expected is None else f" of {digits(expected / 1e6)} MB expected in the end"


def show_table(comparison: Comparison) -> None:
    """Print a comparison's table and what it comes to."""
    from rich.table import Table

    from fedsparse.compare.table import header, interval_note, rows
    from fedsparse.report import findings

    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for number, title in enumerate(header(comparison)):
        table.add_column(title, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for cells in rows(comparison):
        table.add_row(*cells)
    out.print()
    Console(highlight=False, width=None if out.is_terminal else 160).print(table)
    if note := interval_note(comparison):
        out.print(note, style="dim")
    out.print()
    for sentence in findings(comparison):
        out.print(sentence, markup=False)
    out.print()


def show_listing(title: str, columns: list[str], lines: list[list[Any]]) -> None:
    """Print one table of `fedsparse list`."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    for line in lines:
        table.add_row(*(str(cell) for cell in line))
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print()
