"""Blocks: the user's map, and what a score of several layers is."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantsieve.errors import InputError, UsageError
from quantsieve.sensitivity.blocks import aggregate, group, match

NAMES = st.lists(st.text("ab1/", min_size=1, max_size=5), max_size=8, unique=True)
PATTERNS = st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["a", "b", "^a", "1$", "/", "a.b"]), max_size=3)


@given(NAMES, PATTERNS)
def test_the_first_pattern_that_matches_wins(layers, patterns):
    found = match(layers, patterns)
    for layer in layers:
        hits = [name for name, pattern in patterns.items() if re.search(pattern, layer)]
        assert found.get(layer) == (hits[0] if hits else None)


@given(NAMES, PATTERNS)
def test_every_layer_is_in_exactly_one_group_and_unmatched_ones_stand_alone(layers, patterns):
    found = match(layers, patterns)
    groups = group(layers, found)
    assert sorted(layer for g in groups for layer in g.layers) == sorted(layers)
    for g in groups:
        assert len({found.get(layer) for layer in g.layers}) == 1
        assert len(g.layers) == 1 or found.get(g.layers[0]) == g.name


def test_a_layer_alone_is_not_joined_with_a_block_of_its_name():
    assert [g.layers for g in group(["x", "y"], {"y": "x"})] == [("x",), ("y",)]


def test_an_expression_that_is_none_is_refused_with_its_block():
    with pytest.raises(InputError, match=r"block head, found '\('"):
        match(["a"], {"stem": "a", "head": "("})


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5))
def test_aggregates_are_what_their_names_say(values):
    assert aggregate("sum", values) == pytest.approx(sum(values))
    assert aggregate("max", values) == max(values)
    assert aggregate("mean", values) == pytest.approx(sum(values) / len(values))
    with pytest.raises(UsageError, match="median"):
        aggregate("median", values)
