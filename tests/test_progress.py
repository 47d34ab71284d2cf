"""Progress on stderr: few lines off a terminal, bars with the time left on one."""

import io

import pytest
from rich.console import Console

from quantsieve._progress import Bars, Lines, time_left, watch
from quantsieve.run.progress import Silent, Step


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_line_is_printed_when_a_stage_begins_and_then_now_and_then():
    stream, clock = io.StringIO(), Clock()
    lines = Lines(stream, clock)
    for second in range(40):
        clock.now = second
        lines(Step("sensitivity", "probing", second, 40, 40.0 - second))
    lines(Step("search", "first plan"))
    assert stream.getvalue().splitlines() == [
        "sensitivity 0/40, 40 s left: probing",
        "sensitivity 15/40, 25 s left: probing",
        "sensitivity 30/40, 10 s left: probing",
        "search: first plan",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "1 s"), (59.4, "59 s"), (90, "2 min"), (3700, "1 h 2 min")])
def test_the_time_left_is_short(seconds, text):
    assert time_left(seconds) == text


def test_off_a_terminal_lines_go_to_stderr_and_nothing_to_stdout(capsys):
    with watch(quiet=False) as progress:
        progress(Step("calibrate", "ranges", 1, 4))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "calibrate 1/4: ranges\n")


def test_quiet_shows_nothing(capsys):
    with watch(quiet=True) as progress:
        assert isinstance(progress, Silent)
        progress(Step("calibrate", "ranges", 1, 4))
    assert capsys.readouterr().err == ""


def test_on_a_terminal_each_stage_has_a_bar_with_the_time_left():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    with Bars(console) as bars:
        bars(Step("calibrate", "ranges", 1, 4, 30))
        bars(Step("search", "candidate 3: [programme]"))
        bars._display.refresh()
        shown = stream.getvalue()
    assert "30 s left" in shown or "calibrate" in shown
    assert "candidate 3: [programme]" in shown
    assert "4/4" in stream.getvalue()


def test_bars_are_taken_down_when_the_command_fails():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bars = Bars(console)
    with pytest.raises(RuntimeError), bars:
        raise RuntimeError
    assert not bars._display.live.is_started
