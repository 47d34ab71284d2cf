import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from run_facts import make_hard_summary, make_summary

from quantsieve.front import Recommendation
from quantsieve.reports import page
from quantsieve.reports.page import html_page
from quantsieve.reports.summary import Precision

VOID = {"meta", "rect", "line", "circle", "path", "br"}


class Balance(HTMLParser):
    """Fails on a tag that is closed without being open."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("make", [make_summary, make_hard_summary])
def test_the_page_is_well_formed_and_asks_no_network(make):
    page = html_page(make())
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"(src|href)=\"(https?:)?//|@import|<script|url\(", page)


def test_the_page_holds_every_candidate_and_every_layer():
    summary = make_summary()
    page = html_page(summary)
    assert all(candidate.id in page for candidate in summary.candidates)
    assert all(f">{layer.name}<" in page for layer in summary.layers)
    assert page.count("<circle") == sum(c.final is not None for c in summary.candidates)


def test_loud_warnings_are_marked():
    assert 'class="caution loud">SYNTHETIC' in html_page(make_hard_summary())
    assert 'class="caution loud"' not in html_page(make_summary())


def test_text_from_the_run_is_escaped():
    page = html_page(make_summary(model_file="<b>&.onnx", notes=("<script>alert(1)</script>",)))
    assert "<script>" not in page and "&lt;b&gt;&amp;.onnx" in page


def test_a_run_without_a_recommendation_or_a_measured_model_still_has_a_page():
    summary = make_summary()
    nothing = replace(
        summary,
        candidates=summary.candidates[-1:],
        front=(),
        recommendation=Recommendation(None, "Nothing was measured."),
        prediction=None,
    )
    page = html_page(nothing)
    assert "Nothing was measured." in page and "<svg" not in page


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Precision(58, 57, 1, {}), "int8 on 57 of 58 layers"),
        (Precision(0, 0, 0, {}), "as planned"),
        (Precision(0, 0, 0, {"a": "int8", "b": "mixed"}), "2 layers otherwise than planned"),
    ],
)
def test_what_ran_is_told_for_plans_without_int8_layers_too(found, text):
    assert page._ran(found) == text
