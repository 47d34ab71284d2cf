"""events.jsonl survives kills in the middle of a line and never ends a run by what it is told."""

import errno
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantsieve.errors import RunFolderError
from quantsieve.run.events import Event, Events, read_events


def ticking(path: Path) -> Events:
    counter = itertools.count(1)
    return Events(path, lambda: float(next(counter)))


def test_events_are_read_in_the_order_they_were_written(tmp_path):
    events = ticking(tmp_path / "events.jsonl")
    events.append("started", "The run starts.")
    events.append("stage", "prepare, “fertig”\nnext line", {"done": 1, "of": 9})
    assert read_events(events.path) == (
        Event(1.0, "started", "The run starts.", {}),
        Event(2.0, "stage", "prepare, “fertig”\nnext line", {"done": 1, "of": 9}),
    )


@pytest.mark.parametrize("kept", range(1, 40, 6))
def test_a_cut_off_last_line_costs_that_event_only(tmp_path, kept):
    events = ticking(tmp_path / "events.jsonl")
    events.append("a", "whole")
    whole = events.path.read_bytes()
    events.append("b", "to be cut off")
    events.path.write_bytes(whole + events.path.read_bytes()[len(whole) :][:kept])
    assert [event.kind for event in read_events(events.path)] == ["a"]
    events.append("c", "after the kill")
    assert [event.kind for event in read_events(events.path)] == ["a", "c"]


def test_lines_that_are_no_events_are_passed_over(tmp_path):
    events = ticking(tmp_path / "events.jsonl")
    events.path.write_bytes(b'7\n{"time": 1}\n\xff\xfe\n\n[]\n')
    events.append("a", "whole")
    assert [event.kind for event in read_events(events.path)] == ["a"]


def test_no_file_means_no_events(tmp_path):
    assert read_events(tmp_path / "events.jsonl") == ()


def test_numbers_that_json_cannot_say_are_written_as_words(tmp_path):
    events = ticking(tmp_path / "events.jsonl")
    events.append("price", "odd", {"loss": float("nan"), "all": (float("inf"), 1.5), "what": Path("x")})
    (line,) = events.path.read_text().splitlines()
    fields = json.loads(line, parse_constant=lambda name: pytest.fail(name))["fields"]
    assert fields == {"loss": "nan", "all": ["inf", 1.5], "what": "x"}


def test_threads_do_not_mix_their_lines(tmp_path):
    events = Events(tmp_path / "events.jsonl", lambda: 0.0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: events.append("probe", "x" * 3000, {"i": i}), range(200)))
    assert sorted(event.fields["i"] for event in read_events(events.path)) == list(range(200))
    assert len(events.path.read_bytes().splitlines()) == 200


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_told_in_three_parts(tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match=r"Expected room .*, found No space left .*\. Free some space") as caught:
        Events(tmp_path / "events.jsonl", lambda: 0.0).append("a", "b")
    assert caught.value.__cause__.errno == errno.ENOSPC
