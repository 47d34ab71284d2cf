"""The integer programme against all plans counted out."""

import pytest
from brute_force import every_plan, problems, small
from hypothesis import given, settings
from hypothesis import strategies as st

from quantsieve.plan import Plan
from quantsieve.search.milp import cheapest_noise
from quantsieve.search.prices import Problem

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
@given(problems(), st.floats(0, 1), st.floats(0, 1))
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
    assert cheapest_noise(empty, -1) is None
    assert cheapest_noise(empty, 0, ms_change=-1) is None
