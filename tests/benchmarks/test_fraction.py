"""Hypervolume and fraction against counting the cells of a grid, and the properties that they must have."""

import numpy as np
import pytest
from benchmarks.quality.fraction import Base, Point, Share, fraction, hypervolume, lead, replicates, share
from hypothesis import given
from hypothesis import strategies as st

from quantsieve.errors import InputError, ShapeMismatch

GRID = 12  # cells a side: points lie on the lines, so that counting cells is exact
POINTS = st.lists(st.tuples(st.integers(0, GRID + 3), st.integers(0, GRID + 3)), max_size=8)
FLOAT_BYTES, FULL_BYTES = 1000, 250


def counted(points, limit):
    """Area of the cells below (GRID, limit) whose lower left corner some point dominates; cells have side 1."""
    return sum(any(x <= i and y <= j for x, y in points) for i in range(GRID) for j in range(limit))


def area(points, limit):
    sizes, losses = np.array(points, float).reshape(-1, 2).T
    return hypervolume(sizes, losses, (float(GRID), float(limit)))


def point(size_bytes, wrong, total=200):
    """A model that disagrees on the first `wrong` samples."""
    return Point(size_bytes, np.arange(total) >= wrong)


def base(wrong=100):
    return Base(FLOAT_BYTES, point(FULL_BYTES, wrong))


MODELS = st.lists(st.builds(point, st.integers(100, FLOAT_BYTES + 50), st.integers(0, 200)), min_size=1, max_size=6)


@given(points=POINTS, limit=st.integers(1, GRID))
def test_hypervolume_counts_the_dominated_cells_of_a_grid(points, limit):
    assert area(points, limit) == pytest.approx(counted(points, limit))


@given(models=MODELS)
def test_the_fraction_is_the_counted_area_over_the_whole(models):
    # On a grid of one byte and one sample the cells are counted exactly; the whole is 100 samples by 750 bytes.
    points = [(model.size_bytes, int(200 - model.agreement.sum())) for model in models]
    below = np.zeros((FLOAT_BYTES, 100), bool)
    for size, wrong in points:
        below[size:, wrong:] = True
    assert fraction(models, base()) == pytest.approx(below.sum() / (100 * 750))


@given(models=MODELS, more=MODELS)
def test_more_models_never_lower_the_fraction(models, more):
    assert fraction(models + more, base()) >= fraction(models, base()) - 1e-12


@given(models=MODELS, data=st.data())
def test_order_of_the_models_does_not_matter(models, data):
    shuffled = data.draw(st.permutations(models))
    assert fraction(shuffled, base()) == pytest.approx(fraction(models, base()), abs=1e-12)


def test_full_int8_and_float_alone_give_nothing():
    assert fraction([base().full_int8, point(FLOAT_BYTES, 0)], base()) == 0.0


def test_no_disagreement_at_the_size_of_full_int8_is_the_whole():
    assert fraction([point(FULL_BYTES, 0)], base()) == pytest.approx(1.0)


def test_half_the_disagreement_at_the_size_of_full_int8_is_half():
    assert fraction([point(FULL_BYTES, 50)], base()) == pytest.approx(0.5)


def test_full_int8_that_agrees_everywhere_is_refused():
    with pytest.raises(InputError, match="leaves nothing to select"):
        fraction([point(300, 0)], base(wrong=0))


def test_agreement_on_other_samples_is_refused():
    with pytest.raises(ShapeMismatch, match="Measure all on one set"):
        fraction([point(300, 0, total=100)], base())


def test_replicates_are_the_fractions_of_resampled_vectors():
    generator = np.random.default_rng(3)
    models = [Point(size, generator.random(200) > 0.1) for size in (300, 500, 800)]
    reference = Base(FLOAT_BYTES, Point(FULL_BYTES, generator.random(200) > 0.4))
    drawn = np.random.default_rng(0).multinomial(200, np.full(200, 1 / 200), size=5)
    for found, counts in zip(replicates(models, reference, rounds=5), drawn, strict=True):
        chosen = np.repeat(np.arange(200), counts)
        resampled = [Point(model.size_bytes, model.agreement[chosen]) for model in models]
        full = Point(FULL_BYTES, reference.full_int8.agreement[chosen])
        assert found == pytest.approx(fraction(resampled, Base(FLOAT_BYTES, full)))


def test_a_model_that_never_disagrees_at_full_size_has_no_spread():
    found = share([point(FULL_BYTES, 0)], base())
    assert (found.low, found.value, found.high) == pytest.approx((1.0, 1.0, 1.0))


def test_the_interval_of_a_noisy_model_holds_its_value_and_has_a_width():
    generator = np.random.default_rng(1)
    found = share([Point(400, generator.random(200) > 0.2)], base())
    assert found.low < found.value < found.high


def test_the_lead_over_itself_is_exactly_zero():
    models = [Point(400, np.random.default_rng(1).random(200) > 0.2)]
    assert lead(models, models, base()) == Share(0.0, 0.0, 0.0)


def test_the_lead_is_paired_and_so_narrower_than_the_shares():
    generator = np.random.default_rng(1)
    theirs = generator.random(200) > 0.2
    ours = theirs.copy()
    ours[np.flatnonzero(~theirs)[:5]] = True
    gap = lead([Point(400, ours)], [Point(400, theirs)], base())
    alone = share([Point(400, ours)], base())
    assert gap.low > 0
    assert gap.high - gap.low < alone.high - alone.low
