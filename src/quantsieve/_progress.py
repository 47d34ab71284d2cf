"""Progress on stderr: a bar with the time left on a terminal, few plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from quantsieve.run.progress import Progress, Silent, Step

LINE_EVERY_S = 15.0  # at most, within one stage: logs of a whole night must stay readable


@contextmanager
def watch(quiet: bool) -> Iterator[Progress]:
    """What shows the steps of a command while the block runs."""
    console = Console(stderr=True)
    if quiet:
        yield Silent()
    elif console.is_terminal:
        with Bars(console) as bars:
            yield bars
    else:
        yield Lines(sys.stderr)


def time_left(seconds: float) -> str:
    """'8 s', '3 min', '2 h 5 min'."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Lines:
    """One line when a stage begins, and one now and then while it lasts. Threads may share it."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        self._stream = stream
        self._clock = clock
        self._stage = ""
        self._last = 0.0
        self._turn = threading.Lock()

    def __call__(self, step: Step) -> None:
        with self._turn:
            now = self._clock()
            if step.stage == self._stage and now - self._last < LINE_EVERY_S:
                return
            self._stage, self._last = step.stage, now
            print(_line(step), file=self._stream, flush=True)


def _line(step: Step) -> str:
    count = f" {step.done}/{step.total}" if step.total else ""
    left = f", {time_left(step.eta_s)} left" if step.eta_s is not None else ""
    return f"{step.stage}{count}{left}: {step.text}" if step.text else f"{step.stage}{count}{left}"


class Bars:
    """A bar a stage; finished ones stay above the one at work. Threads may share it."""

    def __init__(self, console: Console):
        self._display = RichProgress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.fields[text]}", markup=False, style="dim", table_column=None),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._turn = threading.Lock()

    def __enter__(self) -> "Bars":
        self._display.start()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._finish_all()
        self._display.stop()

    def __call__(self, step: Step) -> None:
        with self._turn:
            if step.stage not in self._tasks:
                self._finish_all()
                self._tasks[step.stage] = self._display.add_task(step.stage, total=None, left="", text="")
            left = "" if step.eta_s is None else f"{time_left(step.eta_s)} left"
            self._display.update(
                self._tasks[step.stage],
                completed=step.done,
                total=step.total or None,
                left=left,
                text=Text(step.text).plain,
            )

    def _finish_all(self) -> None:
        for task in self._tasks.values():
            total = self._display.tasks[task].total
            done = self._display.tasks[task].completed if total is None else total
            self._display.update(task, completed=done, total=max(done, 1), left="", text="")
