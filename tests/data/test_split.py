import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantsieve.data import split
from quantsieve.errors import InputError

COUNTS = st.integers(16, 800)
SEEDS = st.integers(0, 2**32)


def parts(result):
    return result.calibration, result.search, result.final


@given(num_samples=COUNTS, seed=SEEDS, num_classes=st.integers(0, 20))
def test_parts_are_disjoint_cover_all_samples_and_are_fixed_by_the_seed(num_samples, seed, num_classes):
    labels = np.arange(num_samples) % num_classes if num_classes else None
    first, second = (split(num_samples, seed, labels=labels) for _ in range(2))
    joined = np.concatenate(parts(first))
    assert np.array_equal(np.sort(joined), np.arange(num_samples))
    for one, other in zip(parts(first), parts(second), strict=True):
        assert one.dtype == np.int64
        assert not one.flags.writeable
        np.testing.assert_array_equal(one, other)


@given(num_samples=COUNTS, seed=SEEDS)
def test_default_sizes_are_a_fifth_then_a_quarter_of_the_rest(num_samples, seed):
    result = split(num_samples, seed)
    calibration = max(4, min(100, num_samples // 5))
    search = max(4, (num_samples - calibration) // 4)
    assert [len(part) for part in parts(result)] == [calibration, search, num_samples - calibration - search]


@given(num_samples=st.integers(20, 400), num_classes=st.integers(2, 10), seed=SEEDS)
def test_every_part_has_the_class_shares_of_the_whole(num_samples, num_classes, seed):
    labels = np.random.default_rng(seed).integers(0, num_classes, num_samples)
    result = split(num_samples, seed, labels=labels)
    whole = np.bincount(labels, minlength=num_classes)
    for part in parts(result):
        found = np.bincount(labels[part], minlength=num_classes)
        # Spread evenly over [0, 1) with one offset a class, m members leave m * share +- 1 in an interval of
        # positions; the interval's own length differs from the part's share by at most num_classes / n.
        slack = 1 + (1 + whole * num_classes / num_samples)
        assert np.all(np.abs(found - whole * len(part) / num_samples) <= slack)


def test_another_seed_gives_another_split():
    assert not np.array_equal(split(100, 0).final, split(100, 1).final)


def test_the_split_of_a_seed_does_not_change_between_releases():
    assert split(16, 0).calibration.tolist() == [11, 3, 13, 2]


def test_with_a_calibration_source_of_its_own_only_search_and_final_are_cut():
    result = split(100, 0, calibration=0)
    assert [len(part) for part in parts(result)] == [0, 25, 75]


def test_sizes_that_are_asked_for_are_kept():
    result = split(100, 0, calibration=10, search=20, final=30)
    assert [len(part) for part in parts(result)] == [10, 20, 30]


def test_search_gives_way_to_a_final_size_that_is_asked_for():
    assert [len(part) for part in parts(split(100, 0, final=75))] == [20, 5, 75]


@pytest.mark.parametrize(
    ("num_samples", "sizes", "needed"),
    [(15, {}, 16), (11, {"calibration": 0}, 12), (100, {"final": 90}, 114)],
)
def test_too_few_samples_are_refused_with_the_counts(num_samples, sizes, needed):
    with pytest.raises(InputError, match=rf"Expected {needed} samples \(.*found {num_samples}\."):
        split(num_samples, 0, **sizes)


def test_sizes_and_seeds_below_their_least_are_refused():
    with pytest.raises(InputError, match="search size of at least 1, found 0"):
        split(100, 0, search=0)
    with pytest.raises(InputError, match="seed of 0 or more, found -1"):
        split(100, -1)


def test_labels_of_another_length_are_refused():
    with pytest.raises(InputError, match="20 labels"):
        split(20, 0, labels=np.zeros(19, np.int64))
