import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from run_facts import make_hard_summary, make_summary

from quantsieve.evaluation import Estimate
from quantsieve.front import Candidate, recommend, top_k
from quantsieve.reports import _numbers as numbers
from quantsieve.reports.document import front_json, report_json
from quantsieve.reports.page import html_page
from quantsieve.reports.summary import Summary
from quantsieve.reports.text import FILE_WIDTH, MAX_LAYERS, print_report, print_top, report_text
from quantsieve.targets.timing import summarize


def printed(summary: Summary, width: int = 80, k: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width)
    if k is None:
        print_report(summary, console)
    else:
        print_top(summary, console, k)
    return console.file.getvalue()  # type: ignore[attr-defined]


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("make", [make_summary, make_hard_summary])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(make, width):
    text = printed(make(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text


@pytest.mark.parametrize("width", range(80, 140, 4))
def test_names_and_times_are_whole_at_every_width(width):
    """Times as long as they get (below 0.1 ms), and a metric that has the label's disagreement beside it."""

    def faster(candidate: Candidate) -> Candidate:
        rounds = tuple(ms / 230 for ms in candidate.latency_ms)
        return replace(candidate, latency=summarize(rounds) if rounds else None, latency_ms=rounds)

    made = make_summary()
    summary = replace(made, metric="top1", candidates=tuple(map(faster, made.candidates)))
    table = printed(summary, width).partition("Recommended:")[0]
    assert max(len(line) for line in table.splitlines()) <= width
    words = set(re.findall(r"[\w.]+", table))
    assert {"recommended", "best", "quality", "smallest", "fastest"} <= words
    for candidate in summary.shown():
        assert candidate.latency is not None
        assert {numbers.three(candidate.latency.low_ms), numbers.three(candidate.latency.high_ms)} <= words


def test_off_a_terminal_there_is_no_colour():
    assert "\x1b" not in printed(make_hard_summary())


@pytest.mark.parametrize("make", [make_summary, make_hard_summary])
def test_the_file_holds_the_text_of_a_terminal_without_its_colours_and_padding(make, monkeypatch):
    shown = printed(make(), FILE_WIDTH)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    text = report_text(make())
    assert text.splitlines() == [line.rstrip() for line in shown.splitlines()]
    assert text.endswith("\n") and text.replace("\n", "").isprintable()


def test_control_characters_of_a_model_are_shown_escaped():
    summary = make_hard_summary()
    layers = tuple(replace(layer, name=f"\x1b[31m{layer.name}") for layer in summary.layers)
    wild = replace(summary, layers=layers, model_file="a\x07.onnx", notes=("\x1b[2J of a file",))
    text = report_text(wild)
    assert "\x1b" not in text and "\x07" not in text
    assert "a\\x07.onnx" in text and "\\x1b[2J of a file" in text


def test_the_table_shows_the_front_with_names_intervals_and_kept_share():
    summary = make_summary()
    lines = printed(summary, 120).splitlines()
    for id in summary.front:
        assert sum(line.startswith(id) for line in lines) == 1
    row = next(line for line in lines if line.startswith(summary.recommendation.id or "?"))
    assert "2.7 % [0.9, 4.4]" in row and "98.5 %" in row and row.rstrip().endswith("recommended")
    full = next(line for line in lines if "full int8 " in line)
    assert "smallest, fastest" in full


def test_a_baseline_on_the_front_is_seen_by_its_origin():
    summary = make_summary()
    baseline = next(c for c in summary.candidates if c.origin == "ranking, 20 float")
    text = printed(replace(summary, front=(*summary.front, baseline.id)))
    assert "ranking, 20 float" in text and "1 on the front" in one_line(text)
    assert "ranking, 20 float" not in printed(summary)


def test_warnings_come_first_and_the_loud_ones_before_the_others():
    text = one_line(printed(make_hard_summary()))
    places = [
        text.index(part)
        for part in (
            "!! SYNTHETIC INPUTS",
            "!! BUDGET NOT MET",
            "measured 4.20 times what was simulated. Reason: The integer kernels",
            "stopped at its time limit",
            "2 unreadable images were skipped.",
            "Measured front",
        )
    ]
    assert places == sorted(places)


def test_a_good_run_has_no_loud_warning():
    assert "!!" not in printed(make_summary())


def test_at_most_twelve_layers_are_listed_and_the_rest_is_counted():
    summary = make_summary()
    many = next(c for c in summary.candidates if c.size_bytes == 12_100_000)  # 40 layers float by plan
    text = printed(replace(summary, recommendation=replace(summary.recommendation, id=many.id)), 120)
    listed = [line for line in text.splitlines() if line.startswith("  ") and " price " in line]
    assert len(listed) == MAX_LAYERS
    assert "and 29 more" in text  # 40 by plan and one refused, 12 of them listed


def test_what_ran_and_what_happens_elsewhere_is_said():
    text = one_line(printed(make_summary()))
    assert "asked int8 on 58 layers, ran int8 on 58" in text
    assert "on processors with VNNI and on ARM the file is as good" in text


def test_without_latency_the_table_has_no_times():
    summary = make_summary()
    untimed = tuple(replace(c, latency=None, latency_ms=()) for c in summary.candidates)
    assert "ms a run" in printed(summary)
    assert "ms a run" not in printed(replace(summary, candidates=untimed))


def test_top_k_lists_k_models_in_their_order_with_their_files():
    summary = make_summary()
    text = printed(summary, 120, k=3)
    ids = top_k(summary.candidates, 3)
    rows = [line.split()[0] for line in text.splitlines() if line[:10] in {c.id for c in summary.candidates}]
    assert rows == [*ids, *ids]  # the table, then the files
    assert f"plans/{ids[2]}/model.onnx" in text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0093, "0.9 %"), (0.0002, "0.02 %"), (1.0, "100 %"), (0.0, "0 %"), (-0.012, "-1.2 %")],
)
def test_shares_are_told_in_per_cent_and_small_ones_keep_a_digit(share, text):
    assert numbers.percent(share) == text


def test_an_interval_stands_in_brackets():
    assert numbers.percent_interval(Estimate(0.0093, 0.0041, 0.0184)) == "0.9 % [0.4, 1.8]"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(812, "812 B"), (42_100, "42.1 kB"), (999_999, "1.00 MB"), (18_559_665, "18.6 MB")],
)
def test_sizes_are_told_in_decimal_units(num_bytes, text):
    assert numbers.size(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.1, "4.10"), (9.999, "10.0"), (0.351, "0.351"), (1234.0, "1230"), (1.2e-5, "1.2e-05")],
)
def test_times_have_three_significant_digits(value, text):
    assert numbers.three(value) == text


def test_a_front_of_no_candidates_is_an_empty_table():
    assert "Measured front" in printed(
        replace(make_summary(), candidates=(), front=(), recommendation=recommend((), 0.01, False))
    )


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("k", [None, 3])
def test_a_run_that_ended_before_the_final_samples_has_a_report_that_says_so(width, k):
    made = make_summary(stopped="interrupted")
    candidates = tuple(replace(c, final=None, latency=None, latency_ms=()) for c in made.candidates)
    early = replace(made, candidates=candidates, front=(), recommendation=recommend(candidates, 0.03, False))
    text = one_line(printed(early, width, k))
    assert "no model was measured on the final samples" in text.lower()
    assert report_text(early) and report_json(early) and front_json(early) and html_page(early)
