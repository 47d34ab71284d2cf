"""The minimum cut against all plans counted out."""

import itertools

import numpy as np
import pytest
from brute_force import every_plan, problems, small
from hypothesis import given, settings
from hypothesis import strategies as st

from quantsieve.plan import Plan
from quantsieve.search.mincut import best_at, hull
from quantsieve.search.prices import Problem

# scipy's flow is in integers: each of some hundred edges is rounded by up to a unit, 2**-30 of the sum of all gains.
UNITS = 2.0**-23


def tolerance(problem, rate):
    sizes = sum(max(map(abs, found)) for found in problem.layer_bytes) + sum(problem.tensor_bytes)
    noises = sum(map(max, problem.layer_noise)) + sum(problem.tensor_noise)
    return UNITS * (sizes + rate * noises) + 1e-9


def value_at(problem, plan, rate):
    predicted = problem.predict(plan)
    return predicted.bytes_change + rate * predicted.noise


rates = st.just(0.0) | st.floats(1e-2, 1e6)


@settings(deadline=None)
@given(problems(), rates)
def test_the_best_plan_at_a_rate_is_the_best_of_all(problem, rate):
    noise, size, _ = every_plan(problem)
    found = value_at(problem, best_at(problem, rate), rate)
    assert found <= (size + rate * noise).min() + tolerance(problem, rate)


@settings(deadline=None, max_examples=10)
@given(problems(max_layers=10), rates)
def test_the_best_plan_of_ten_layers_is_the_best_of_all(problem, rate):
    noise, size, _ = every_plan(problem)
    assert value_at(problem, best_at(problem, rate), rate) <= (size + rate * noise).min() + tolerance(problem, rate)


def true_rates(noise, size):
    """Slopes of the lower convex hull of all points, and rates between and beyond them."""
    order = np.lexsort((noise, size))
    corners = []
    for point in zip(size[order], noise[order], strict=True):
        while corners and point[0] == corners[-1][0]:
            break
        else:
            while len(corners) > 1 and _turns_up(corners[-2], corners[-1], point):
                corners.pop()
            if not corners or point[1] < corners[-1][1]:
                corners.append(point)
    slopes = [
        (right[0] - left[0]) / (left[1] - right[1]) for left, right in itertools.pairwise(corners) if left[1] > right[1]
    ]
    return [0.0, *slopes, *((a + b) / 2 for a, b in itertools.pairwise(slopes)), 2 * max(slopes, default=1)]


def _turns_up(first, second, third):
    """Whether the middle point lies on or above the line of its neighbours."""
    across = (second[0] - first[0]) * (third[1] - first[1]) - (third[0] - first[0]) * (second[1] - first[1])
    return across <= 0


@settings(deadline=None)
@given(problems())
def test_the_hull_holds_a_best_plan_for_every_rate(problem):
    noise, size, _ = every_plan(problem)
    plans = hull(problem)
    for rate in true_rates(noise, size):
        best = min(value_at(problem, plan, rate) for plan in plans)
        assert best <= (size + rate * noise).min() + tolerance(problem, rate)


@settings(deadline=None)
@given(problems())
def test_plans_of_the_hull_trade_bytes_for_noise_and_none_is_dominated(problem):
    *plans, last = hull(problem)
    assert last == Plan({})  # float stays the end, though a plan without noise may be smaller
    points = [problem.predict(plan) for plan in plans]
    for left, right in itertools.pairwise(points):
        assert left.bytes_change < right.bytes_change
        assert left.noise > right.noise


def test_a_plan_as_small_as_a_quieter_one_is_not_in_the_hull():
    """Whether the byte is saved with noise or without is all one at rate 0."""
    problem = small(
        links=(((0,),), ((0,), (0,), ())),
        options=(("int8",), ("int8", "int8-channel", "w8")),
        layer_noise=((0.0,), (0.0, 0.0, 1.0)),
        layer_bytes=((0,), (0, -1, -1)),
        layer_ms=((0.0,), (0.0,) * 3),
        tensor_noise=(0.0,),
        tensor_bytes=(0,),
    )
    predicted = [problem.predict(plan) for plan in hull(problem)]
    assert [(p.bytes_change, p.noise) for p in predicted] == [(-1, 0.0), (0, 0.0)]


@settings(deadline=None)
@given(problems())
def test_the_hull_begins_with_the_smallest_file_at_its_least_noise(problem):
    noise, size, _ = every_plan(problem)
    first = problem.predict(hull(problem)[0])
    assert first.bytes_change == size.min()
    assert first.noise == pytest.approx(noise[size == size.min()].min(), rel=1e-6, abs=1e-12)


@settings(deadline=None)
@given(problems(), st.integers(2, 4))
def test_a_limit_of_plans_is_kept(problem, limit):
    plans = hull(problem, limit)
    assert len(plans) <= limit
    assert problem.predict(plans[0]).bytes_change == every_plan(problem)[1].min()


def test_layers_that_share_a_dear_tensor_are_taken_together_or_not_at_all():
    """Alone each earns 100 bytes for noise 0.6; together 200 for 0.7."""
    problem = small()
    assert best_at(problem, 195 / 0.7 + 1) == Plan({})
    assert best_at(problem, 195 / 0.7 - 1) == Plan({"layer0": "int8", "layer1": "int8"})
    assert hull(problem) == (Plan({"layer0": "int8", "layer1": "int8"}), Plan({}))


@pytest.mark.parametrize("saved", range(1, 140))
def test_a_tensor_a_little_dearer_than_all_its_layers_earn_is_never_taken(saved):
    """Whatever the gains round to, taken one by one, their sum does not pass a cost above them all."""
    sizes = (saved, 1, 1, 1, 1, 1, 1)
    problem = small(
        links=(((0,),),) * len(sizes),
        layer_noise=((0.0,),) * len(sizes),
        layer_bytes=tuple((-size,) for size in sizes),
        tensor_noise=(1.0,),
        tensor_bytes=(0,),
    )
    assert best_at(problem, sum(sizes) + 1.0) == Plan({})
    assert len(best_at(problem, sum(sizes) - 1.0).schemes) == len(sizes)


def test_of_two_schemes_that_save_alike_the_quieter_one_is_taken():
    problem = small(
        links=(((0,), (0,)),),
        options=(("int8", "int8-channel"),),
        layer_noise=((0.4, 0.1),),
        layer_bytes=((-100, -100),),
        layer_ms=((0.0, 0.0),),
    )
    assert hull(problem) == (Plan({"layer0": "int8-channel"}), Plan({}))


def test_a_problem_without_layers_has_the_float_plan_only():
    empty = Problem((), (), (), (), (), (), (), (), (), ())
    assert hull(empty) == (Plan({}),)
    assert best_at(empty, 1.0) == Plan({})
