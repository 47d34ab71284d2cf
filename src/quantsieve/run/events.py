"""events.jsonl: what happened in a run, one JSON object a line, for people and progress bars.

Nothing is ever decided from it, so it is not flushed to the disk, and a line that a kill cut off is skipped.
"""

import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quantsieve.run._atomic import refusal


@dataclass(frozen=True, slots=True)
class Event:
    """time: seconds since 1970 by the run's clock; kind: one word; text: a sentence; fields: JSON values."""

    time: float
    kind: str
    text: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Events:
    """The end of one events.jsonl, where a run appends; several threads may."""

    path: Path
    clock: Callable[[], float]
    # An append is one write, but another thread may see the file's new size in the middle of it.
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def append(self, kind: str, text: str, fields: Mapping[str, object] | None = None) -> Event:
        """The event, written at the end of the file. Raises RunFolderError when the disk refuses."""
        event = Event(self.clock(), kind, text, dict(fields or {}))
        document = {"time": event.time, "kind": kind, "text": text, "fields": _printable(event.fields)}
        line = json.dumps(document, allow_nan=False) + "\n"
        try:
            with self._turn, self.path.open("ab", buffering=0) as file:
                file.write(self._line_end() + line.encode("ascii"))
        except OSError as error:
            raise refusal(error, self.path) from error
        return event

    def _line_end(self) -> bytes:
        # After a kill in the middle of a line the next event must not be glued to the rest of it.
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return b""
            file.seek(-1, os.SEEK_END)
            return b"" if file.read(1) == b"\n" else b"\n"


def read_events(path: Path) -> tuple[Event, ...]:
    """All whole events in the order they were written; none when there is no file. Raises RunFolderError."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise refusal(error, path) from error
    return tuple(event for event in map(_read_line, lines) if event is not None)


def _read_line(line: bytes) -> Event | None:
    try:
        document = json.loads(line)
        return Event(document["time"], document["kind"], document["text"], document["fields"])
    except (ValueError, KeyError, TypeError):
        return None


def _printable(value: object) -> object:
    # A number that JSON cannot say must not end a run only because it was to be shown.
    if isinstance(value, Mapping):
        return {str(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    return value if isinstance(value, str | int | None) else str(value)
