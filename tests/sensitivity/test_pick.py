"""Picking: the smallest set, the strict threshold, limits, warnings, and what is counted."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scan_facts import scan, scan_of, score

from quantsieve.errors import UsageError
from quantsieve.sensitivity.metrics import get
from quantsieve.sensitivity.pick import Rule, pick_layers, scores_of

scores = st.lists(st.floats(0, 1e6, allow_subnormal=False), max_size=12)
shares = st.floats(0, 1)


def picked(values, rule, **options):
    return pick_layers(scan_of(values), rule, options.get("scheme"), options.get("blocks", {}))


def kept_values(values, found):
    return [values[int(layer[1:])] for layer in found.layers]


# --- coverage --------------------------------------------------------------------------------


@given(scores, shares)
def test_coverage_keeps_the_fewest_layers_that_hold_the_share(values, coverage):
    """No set with fewer layers, of all sets, holds it: k layers hold most when they are the k worst."""
    found = picked(values, Rule(coverage=coverage))
    goal = coverage * math.fsum(values)
    assert math.fsum(kept_values(values, found)) >= goal
    fewer = found.num_kept - 1
    assert all(math.fsum(some) < goal for some in itertools.combinations(values, max(fewer, 0)) if fewer >= 0)


@given(scores, shares, shares)
def test_more_coverage_never_keeps_fewer_layers_and_keeps_the_same_first(values, one, other):
    low, high = (picked(values, Rule(coverage=c)).layers for c in sorted((one, other)))
    assert high[: len(low)] == low


@given(scores)
def test_coverage_0_keeps_nothing_and_coverage_1_every_layer_with_a_score(values):
    assert picked(values, Rule(coverage=0.0)).layers == ()
    whole = picked(values, Rule(coverage=1.0))
    assert whole.coverage == whole.mass == 1.0
    assert all(value > 0 for value in kept_values(values, whole))


@given(scores, shares)
def test_what_is_said_to_be_reached_is_the_share_of_what_is_kept(values, coverage):
    found = picked(values, Rule(coverage=coverage))
    total = math.fsum(values)
    wanted = math.fsum(kept_values(values, found)) / total if total > 0 else 1.0
    assert found.coverage == pytest.approx(wanted, rel=1e-12)
    assert found.mass == pytest.approx(found.coverage, rel=1e-12)  # layers alone: the two are one
    assert found.num_kept + found.num_quantized == len(values)


# --- threshold and limit ---------------------------------------------------------------------


@given(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3]), max_size=10), st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.25]))
def test_a_threshold_is_strict(values, threshold):
    found = picked(values, Rule(threshold=threshold))
    assert sorted(kept_values(values, found)) == sorted(value for value in values if value > threshold)


@given(scores, shares, st.integers(0, 5))
def test_max_layers_keeps_the_worst_of_what_was_asked_for_and_says_so(values, coverage, most):
    free, found = picked(values, Rule(coverage=coverage)), picked(values, Rule(coverage=coverage, max_layers=most))
    assert found.layers == free.layers[:most]
    assert any("are left out" in note for note in found.notes) == (free.num_kept > most)


def test_a_block_that_does_not_fit_ends_the_list():
    blocks = {"l1": "b", "l2": "b"}
    found = picked([5, 4, 3, 2], Rule(threshold=0, max_layers=2, aggregate="max"), blocks=blocks)
    assert found.layers == ("l0",)  # l3 alone would fit, but b is worse


def test_blocks_are_ranked_by_their_own_score():
    found = picked([4, 3, 2, 1], Rule(threshold=0, max_layers=2), blocks={"l1": "b", "l2": "b"})
    assert (found.layers, found.coverage) == (("l1", "l2"), 0.5)


# --- near cuts -------------------------------------------------------------------------------


@pytest.mark.parametrize(("below", "warned"), [(0.99, True), (0.989, False), (1.0, True)])
def test_a_cut_between_near_equal_scores_is_warned_of_with_both_names(below, warned):
    found = picked([1.0, below, 0.1], Rule(coverage=0.3))
    assert found.layers == ("l0",)
    assert (found.cut is not None) == warned
    assert any("l0" in note and "l1" in note for note in found.notes) == warned


@given(scores, shares, st.floats(0.01, 1))
def test_a_cut_is_told_exactly_when_its_ratio_reaches_near(values, coverage, near):
    found = picked(values, Rule(coverage=coverage, near=near))
    ranked = sorted(values, reverse=True)
    k = found.num_kept
    expected = 0 < k < len(values) and ranked[k] / ranked[k - 1] >= near
    assert (found.cut is not None) == expected


@pytest.mark.parametrize(
    ("ties", "is_tie"),
    [
        ((True, True, True), True),
        ((False, True, True), True),
        ((True, False, True), False),
        ((True, True, False), False),
    ],
)
def test_a_cut_through_a_tie_of_the_scan_is_warned_of_however_far_the_scores_lie_apart(ties, is_tie):
    """Rows of another scheme lie between the two layers: all neighbours from one to the other have to tie."""
    rows = [
        score("a", 9.0, tie=ties[0]), score("b", 5.0, tie=ties[1]),
        score("a", 4.0, "int8-channel", tie=ties[2]), score("c", 3.0), score("b", 2.0, "int8-channel"),
    ]  # fmt: skip
    found = pick_layers(scan(rows, ("int8", "int8-channel")), Rule(threshold=4.0), None, {})
    assert found.layers == ("a", "b")
    assert (found.cut is not None and found.cut.is_tie) == is_tie
    assert [note for note in found.notes if "b is kept float and c is quantized" in note and "tie" in note] == (
        list(found.notes) if is_tie else []
    )
    assert (found.document()["near_cut"] is not None) == is_tie


def test_equal_scores_that_the_scan_tells_apart_are_near_and_no_tie():
    """Whichever row comes first: the row of another scheme puts b before a."""
    rows = [score("b", 5.0, "int8-channel"), *(score(name, 2.0, tie=False) for name in ("a", "b"))]
    found = pick_layers(scan(rows, ("int8", "int8-channel")), Rule(threshold=0.0, max_layers=1), None, {})
    assert found.layers == ("b",)
    assert found.cut is not None and (found.cut.is_near, found.cut.is_tie) == (True, False)


def test_blocks_never_tie():
    rows = [score("a", 9.0, tie=True), score("b", 5.0, tie=True), score("c", 3.0)]
    found = pick_layers(scan(rows), Rule(threshold=8.0), None, {"b": "block", "c": "block"})
    assert found.layers == ("a",) and found.cut is None


# --- schemes, blocks, nodes ------------------------------------------------------------------


def test_a_layer_counts_under_the_scheme_or_under_what_it_has():
    rows = [score("a", 1, "int8"), score("a", 9, "int8-channel"), score("add", 5, "int8")]
    found = scan(rows, ("int8", "int8-channel"))
    assert scores_of(found)[0] == "int8"
    assert [row.value for row in scores_of(found)[1]] == [5, 1]
    assert [row.value for row in scores_of(found, "int8-channel")[1]] == [9, 5]
    with pytest.raises(UsageError, match="int8-channel"):
        scores_of(found, "int4")


@pytest.mark.parametrize(("how", "value"), [("sum", 5.0), ("max", 3.0), ("mean", 2.5)])
def test_a_block_has_the_aggregate_of_its_layers_and_is_kept_whole(how, value):
    found = picked([4, 3, 2], Rule(threshold=2.0, aggregate=how), blocks={"l1": "b", "l2": "b"})
    assert {group.name: score for group, score in found.groups} == {"l0": 4.0, "b": value}
    assert found.layers == ("l0", "l1", "l2")


def test_coverage_is_of_the_ranked_scores_and_mass_of_the_layers():
    found = picked([4, 3, 2, 1], Rule(coverage=0.3, aggregate="max"), blocks={"l1": "b", "l2": "b", "l3": "b"})
    assert (found.layers, found.coverage, found.mass) == (("l0",), 4 / 7, 0.4)


def test_nodes_are_those_of_the_kept_layers_once_each_and_layers_without_are_named():
    rows = [score("a", 3, nodes=("n1", "n2")), score("b", 2, nodes=("n2", "n3")), score("c", 1.5, nodes=())]
    found = pick_layers(scan([*rows, score("d", 1)]), Rule(threshold=1), None, {})
    assert found.nodes == ("n1", "n2", "n3")
    assert any(note.endswith("layers: c") for note in found.notes)


def test_the_scan_is_marked_for_what_is_picked_on_every_row_and_for_nothing_else():
    rows = [score("a", 3), score("a", 1, "int8-channel"), score("b", 2, keep_float=True)]
    found = pick_layers(scan(rows, ("int8", "int8-channel")), Rule(threshold=2.5), None, {})
    assert [(row.layer, row.keep_float) for row in found.scan.layers] == [("a", True), ("b", False), ("a", True)]
    assert any("no longer marked: b" in note for note in found.notes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"coverage": 0.5, "threshold": 1.0},
        {"coverage": 1.0001},
        {"coverage": -0.1},
        {"coverage": math.nan},
        {"threshold": math.nan},
        {"threshold": math.inf},
        {"threshold": -1.0},
        {"coverage": 0.5, "aggregate": "median"},
        {"coverage": 0.5, "max_layers": -1},
        {"coverage": 0.5, "near": 0.0},
    ],
)
def test_a_rule_that_says_nothing_or_too_much_is_wrong_usage(options):
    with pytest.raises(UsageError):
        Rule(**options)


def test_a_scan_without_layers_gives_nothing_to_keep():
    found = picked([], Rule(coverage=0.9))
    assert (found.layers, found.num_quantized, found.coverage) == ((), 0, 1.0)


# --- other metrics ---------------------------------------------------------------------------


def by(metric, values, **options):
    """Layers l0, l1, ... with these scores of the metric."""
    return pick_layers(replace(scan_of(values), metric=get(metric).meaning), Rule(**options), None, {})


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), shares)
def test_decibels_count_as_the_noise_that_they_stand_for(noises, coverage):
    noises = [max(noise, 1e-9) for noise in noises]
    found = by("sqnr", [-10 * math.log10(noise) for noise in noises], coverage=coverage)
    wanted = picked(noises, Rule(coverage=coverage))
    assert found.coverage == pytest.approx(wanted.coverage, rel=1e-9)
    assert abs(found.num_kept - wanted.num_kept) <= 1  # a share at the goal may be rounded past it
    assert any("dB" in note for note in found.notes)


def test_a_threshold_in_decibel_keeps_what_lies_below_it():
    found = by("sqnr", [30.0, 10.0, 20.0], threshold=20.0)
    assert (found.layers, found.mass) == (("l1",), pytest.approx(0.1 / 0.111))
    assert found.groups[0][1] == pytest.approx(0.1)


def test_a_layer_that_quantizing_helps_counts_0_and_one_without_end_counts_all():
    found = by("accuracy", [0.3, -0.2, 0.1], coverage=1)
    assert (found.layers, found.coverage) == (("l0", "l2"), 1.0)
    endless = by("kl_div", [2.0, math.inf, 1.0], coverage=0.9)
    assert (endless.layers, endless.coverage) == (("l1",), 1.0)
    lost = by("sqnr", [-1e308, 20.0], threshold=0)
    assert lost.layers == ("l0",)
