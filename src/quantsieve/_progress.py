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
from rich.table import Column

from quantsieve.run.progress import Progress, Silent, Step

LINE_EVERY_S = 15.0  # at most, within one stage: logs of a whole night must stay readable

_OTHER_COLUMNS = 60  # columns of a bar without its text


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
        # rich would shrink the names of the stages to make room for a long text.
        text_width = max(10, console.width - _OTHER_COLUMNS)
        text_column = Column(no_wrap=True, overflow="ellipsis", max_width=text_width)
        self._display = RichProgress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.fields[text]}", markup=False, style="dim", table_column=text_column),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._stage = ""
        self._turn = threading.Lock()

    def __enter__(self) -> "Bars":
        self._display.start()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._finish()
        self._display.stop()

    def __call__(self, step: Step) -> None:
        with self._turn:
            if step.stage != self._stage:
                self._begin(step.stage)
            left = "" if step.eta_s is None else f"{time_left(step.eta_s)} left"
            self._display.update(
                self._tasks[step.stage],
                completed=step.done,
                total=step.total or None,
                left=left,
                text=step.text,
            )

    def _begin(self, stage: str) -> None:
        """A bar below all others; a stage that was left and is taken up again moves there."""
        self._finish()
        if stage in self._tasks:
            self._display.remove_task(self._tasks[stage])
        self._tasks[stage] = self._display.add_task(stage, total=None, left="", text="")
        self._stage = stage

    def _finish(self) -> None:
        if self._stage in self._tasks:
            task = self._display.tasks[self._display.task_ids.index(self._tasks[self._stage])]
            total = max(task.total or task.completed, 1)
            self._display.update(task.id, completed=total, total=total, left="", text="")
