"""Labels stay off points and bars wherever there is room."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_facts import make_hard_summary, make_summary

from quantsieve.reports._labels import Box, line_boxes, place
from quantsieve.reports.page import html_page

FRAME = Box(0, 0, 400, 300)
SIZE = (80.0, 16.0)

places = st.tuples(st.floats(5, 395), st.floats(5, 295))
bars = st.lists(
    st.tuples(places, st.floats(1, 80)).map(lambda p: Box(p[0][0] - 2, p[0][1] - p[1], p[0][0] + 2, p[0][1] + p[1])),
    max_size=12,
)


def num_hidden(box: Box, taken: list[Box]) -> int:
    return sum(box.overlaps(other) for other in taken)


@given(places, bars)
def test_a_label_lies_in_the_frame_with_its_size_and_off_its_point(point, taken):
    box = place(point, SIZE, taken, FRAME, gap=10)
    assert FRAME.holds(box)
    assert (box.right - box.left, box.bottom - box.top) == pytest.approx(SIZE)
    assert box.distance(*point) >= 10 * (1 - 1e-9)


@given(places, bars)
def test_nothing_is_hidden_where_the_nearest_free_side_is_free(point, taken):
    """Whatever hides nothing right beside the point costs less than any place that hides something."""
    x, y = point
    width, height = SIZE
    sides = [
        Box(x + 10, y - height / 2, x + 10 + width, y + height / 2),
        Box(x - 10 - width, y - height / 2, x - 10, y + height / 2),
        Box(x - width / 2, y - 10 - height, x + width / 2, y - 10),
        Box(x - width / 2, y + 10, x + width / 2, y + 10 + height),
    ]
    if any(FRAME.holds(side) and not num_hidden(side, taken) for side in sides):
        assert num_hidden(place(point, SIZE, taken, FRAME, gap=10), taken) == 0


def test_an_empty_picture_has_the_label_on_the_right_and_at_its_right_edge_on_the_left():
    assert place((100, 150), SIZE, [], FRAME, gap=10) == Box(110, 142, 190, 158)
    assert place((390, 150), SIZE, [], FRAME, gap=10) == Box(300, 142, 380, 158)


def test_bars_on_all_sides_send_the_label_beyond_them():
    taken = [Box(x - 2, 100, x + 2, 200) for x in range(120, 300, 20)]
    box = place((200, 150), SIZE, taken, FRAME, gap=10)
    assert num_hidden(box, taken) == 0 and (box.bottom <= 100 or box.top >= 200)


def test_the_line_to_a_label_crosses_no_other_label():
    taken = [Box(x - 2, 100, x + 2, 200) for x in range(120, 300, 20)]
    first = place((200, 150), SIZE, taken, FRAME, gap=10)
    second = place((220, 150), SIZE, [*taken, first], FRAME, gap=10, labels=[first])
    assert not second.overlaps(first)
    assert not any(part.overlaps(first) for part in line_boxes((220, 150), second.nearest(220, 150)))


@pytest.mark.parametrize("make", [make_summary, make_hard_summary])
@pytest.mark.parametrize("chosen", [0, 2, 4])
def test_the_pages_recommended_label_hides_no_point_and_no_bar(make, chosen):
    summary = make()
    id = summary.front[chosen]
    page = html_page(replace(summary, recommendation=replace(summary.recommendation, id=id)))
    found = re.search(r'<text class="label chosen" x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">(\w+)<', page)
    assert found is not None and found[4] == "recommended"
    x, y, width = float(found[1]), float(found[2]), 8.0 * len(found[4])
    left = x - {"start": 0, "middle": width / 2, "end": width}[found[3]]
    label = Box(left, y - 11, left + width, y + 3)
    circles = re.findall(r'<circle class="\w+ dot" cx="([\d.]+)" cy="([\d.]+)" r="([\d.]+)"', page)
    lines = re.findall(r'<line class="\w+" x1="([\d.]+)" x2="\1" y1="([\d.]+)" y2="([\d.]+)" stroke-width', page)
    assert len(circles) == len(lines) > 5
    for cx, cy, r in (map(float, circle) for circle in circles):
        assert not label.overlaps(Box(cx - r, cy - r, cx + r, cy + r))
    for at, low, high in (map(float, line) for line in lines):
        assert not label.overlaps(Box(at - 1, high, at + 1, low))
