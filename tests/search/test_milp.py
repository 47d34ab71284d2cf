"""The integer programme against all plans counted out."""

import pytest
from brute_force import every_plan, problems, small
from hypothesis import given, settings
from hypothesis import strategies as st

from quantsieve.plan import Plan
from quantsieve.search.milp import cheapest_noise, fastest
from quantsieve.search.prices import Crossing, Problem

GAP = 1e-4


def least(noise, fits, problem):
    """Of the plans that fit; the solver may stop at its relative gap, and at 1e-6 of the largest price."""
    best = noise[fits].min()
    largest = max([*(max(found) for found in problem.layer_noise), *problem.tensor_noise])
    return best * (1 + GAP) + 2e-6 * (largest or 1.0)


@settings(deadline=None, max_examples=60)
@given(problems(), st.floats(0, 1.2))
def test_a_budget_of_bytes_is_kept_with_the_least_noise_of_all_plans(problem, share):
    noise, size, _ = every_plan(problem)
    budget = float(int(size.min() * share))
    plan = cheapest_noise(problem, budget)
    fits = size <= budget
    assert (plan is not None) == fits.any()
    if plan is not None:
        predicted = problem.predict(plan)
        assert predicted.bytes_change <= budget
        assert predicted.noise <= least(noise, fits, problem)


@settings(deadline=None, max_examples=60)
@given(problems(has_formats=True, has_crossings=True), st.floats(0, 1), st.floats(0, 1))
def test_a_budget_of_milliseconds_is_kept_beside_that_of_bytes(problem, byte_share, ms_share):
    noise, size, ms = every_plan(problem)
    bytes_budget, ms_budget = float(int(size.min() * byte_share)), ms.min() * ms_share + 1e-6
    plan = cheapest_noise(problem, bytes_budget, ms_budget)
    fits = (size <= bytes_budget) & (ms <= ms_budget)
    assert (plan is not None) == fits.any()
    if plan is not None:
        predicted = problem.predict(plan)
        assert predicted.bytes_change <= bytes_budget
        assert predicted.ms_change <= ms_budget + 1e-6  # the solver's own tolerance on a row
        assert predicted.noise <= least(noise, fits, problem)


@settings(deadline=None, max_examples=60)
@given(problems(has_formats=True, has_crossings=True))
def test_the_fastest_plan_is_the_fastest_of_all(problem):
    _, _, ms = every_plan(problem)
    widest = max([*(abs(x) for found in problem.layer_ms for x in found), *problem.tensor_ms])
    assert problem.predict(fastest(problem)).ms_change <= ms.min() + 2e-3 * (widest or 1.0) + GAP * abs(ms.min()) + 1e-9


def test_a_layer_that_is_slower_alone_is_taken_where_its_neighbours_would_convert():
    """Both ends of a tensor in its format spare both conversions."""
    chain = small(layer_ms=((-1.0,), (0.25,)), crossings=(Crossing(0, 0, 0.3), Crossing(0, 1, 0.3)))
    assert fastest(chain) == Plan({"layer0": "int8", "layer1": "int8"})
    assert chain.predict(Plan({"layer0": "int8"})).ms_change == pytest.approx(-0.7)
    assert fastest(small(layer_ms=((-1.0,), (0.35,)), crossings=(Crossing(0, 1, 0.3),))) == Plan({"layer0": "int8"})


@settings(deadline=None, max_examples=10)
@given(problems(max_layers=10), st.floats(0.3, 1))
def test_ten_layers_are_solved_exactly(problem, share):
    noise, size, _ = every_plan(problem)
    budget = float(int(size.min() * share))
    plan = cheapest_noise(problem, budget)
    assert plan is not None
    assert problem.predict(plan).bytes_change <= budget
    assert problem.predict(plan).noise <= least(noise, size <= budget, problem)


@pytest.mark.parametrize(("budget", "possible"), [(-195, True), (-196, False)])
def test_a_budget_beyond_the_smallest_file_has_no_plan(budget, possible):
    assert (cheapest_noise(small(), budget) is not None) is possible


def test_a_plan_between_the_plans_of_the_hull_is_found():
    """The quiet layer alone is above the line from both to none, so the hull lacks it."""
    problem = small(layer_noise=((0.1,), (0.2,)))
    assert cheapest_noise(problem, -50) == Plan({"layer0": "int8"})


def test_without_layers_the_float_plan_is_the_only_one():
    empty = Problem((), (), (), (), (), (), (), (), (), ())
    assert cheapest_noise(empty, 0) == Plan({})
    assert fastest(empty) == Plan({})
    assert cheapest_noise(empty, -1) is None
    assert cheapest_noise(empty, 0, ms_change=-1) is None
