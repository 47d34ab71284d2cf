"""The forerunner's order of layers in both readings, and how its scores come about."""

import pytest
from benchmarks.quality.forerunner import DIRECTIONS, Errors, combine, order, spread_over
from hypothesis import given
from hypothesis import strategies as st

CLEAN, MIDDLE, DIRTY = Errors(40.0, 50.0), Errors(20.0, 40.0), Errors(0.0, 30.0)
ERRORS = {"middle": MIDDLE, "clean": CLEAN, "dirty": DIRTY}
SQNRS = st.builds(Errors, st.floats(-20, 90), st.floats(-20, 90))


def test_the_repaired_reading_keeps_the_noisiest_layer_float_first():
    assert order(combine(ERRORS), "repaired") == ("dirty", "middle", "clean")


def test_the_published_reading_keeps_the_cleanest_layer_float_first():
    assert order(combine(ERRORS), "as published") == ("clean", "middle", "dirty")


def test_both_errors_are_scaled_and_weigh_the_same():
    assert combine(ERRORS) == pytest.approx({"middle": 0.5, "clean": 1.0, "dirty": 0.0})


def test_a_layer_is_dirty_by_either_error():
    errors = {"a": Errors(0.0, 50.0), "b": Errors(40.0, 0.0), "c": Errors(40.0, 50.0)}
    assert combine(errors) == pytest.approx({"a": 0.5, "b": 0.5, "c": 1.0})


def test_equal_errors_give_equal_scores_and_keep_the_order_of_the_graph():
    scores = combine({"z": MIDDLE, "a": MIDDLE})
    assert [order(scores, direction) for direction in DIRECTIONS] == [("z", "a"), ("z", "a")]


@given(errors=st.dictionaries(st.text(max_size=3), SQNRS, min_size=1, max_size=8))
def test_scores_lie_in_0_to_1_and_every_layer_is_ordered_once(errors):
    scores = combine(errors)
    assert all(0 <= score <= 1 for score in scores.values())
    assert all(sorted(order(scores, direction)) == sorted(errors) for direction in DIRECTIONS)


@given(total=st.integers(1, 300), wanted=st.integers(1, 300))
def test_samples_are_spread_without_repeats_and_both_ends_are_there(total, wanted):
    found = spread_over(total, wanted).tolist()
    assert len(found) == min(total, wanted)
    assert found == sorted(set(found))
    assert found[0] == 0
    assert wanted == 1 or found[-1] == total - 1
