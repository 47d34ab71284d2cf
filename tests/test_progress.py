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


@pytest.fixture
def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=25, color_system=None)


def last_frame(console):
    """The lines that a user sees at the end; rich redraws all of them each time."""
    return [line.rstrip() for line in console.file.getvalue().split("\x1b[2K")[-1].splitlines()]


def test_on_a_terminal_each_stage_has_a_bar_with_the_time_left(terminal):
    with Bars(terminal) as bars:
        bars(Step("calibrate", "ranges", 1, 4, 30))
        bars._display.refresh()
        assert "1/4" in last_frame(terminal)[0]
        assert "30 s left" in last_frame(terminal)[0]
        bars(Step("search", "candidate 3: [programme] " + "long " * 40, 2))
        bars._display.refresh()
        finished, current = last_frame(terminal)[:2]
    assert "✓ calibrate" in finished
    assert "4/4" in finished
    assert "candidate 3: [programme]" in current
    assert max(map(len, last_frame(terminal))) <= 100


def test_a_stage_that_is_taken_up_again_moves_below_the_others(terminal):
    with Bars(terminal) as bars:
        bars(Step("search", "the float model"))
        bars(Step("calibrate", "ranges", 4, 4))
        bars(Step("search", "candidate 8", 7))
    names = [line.split()[1] for line in last_frame(terminal) if "/" in line]
    assert names == ["calibrate", "search"]
    assert "7/7" in last_frame(terminal)[1]


def test_bars_are_taken_down_when_the_command_fails(terminal):
    bars = Bars(terminal)
    with pytest.raises(RuntimeError), bars:
        raise RuntimeError
    assert not bars._display.live.is_started
