"""The table of a search problem: what a plan adds up to, and which layers ride for free."""

from brute_force import problems, small
from hypothesis import given
from hypothesis import strategies as st

from quantsieve.plan import Plan
from quantsieve.search.prices import Predicted


def test_a_plan_pays_each_tensor_once_however_many_layers_share_it():
    problem = small()
    assert problem.predict(Plan({"layer0": "int8"})) == Predicted(0.6, -95, 0.0)
    assert problem.predict(Plan({"layer0": "int8", "layer1": "int8"})) == Predicted(0.7, -195, 0.0)
    assert problem.predict(Plan({})) == Predicted(0.0, 0, 0.0)
    assert problem.predict(Plan({"layer0": "float"})) == Predicted(0.0, 0, 0.0)


def test_a_layer_that_costs_nothing_once_its_tensors_are_on_rides_for_free():
    problem = small(layer_noise=((0.1,), (0.0,)), layer_bytes=((-100,), (0,)))
    assert problem.with_free_riders(Plan({"layer0": "int8"})) == Plan({"layer0": "int8", "layer1": "int8"})


def test_a_layer_whose_tensors_are_off_does_not_ride():
    problem = small(links=(((0,),), ((0, 1),)), layer_noise=((0.1,), (0.0,)))
    assert problem.with_free_riders(Plan({"layer0": "int8"})) == Plan({"layer0": "int8"})


def test_a_layer_that_costs_noise_bytes_or_time_does_not_ride():
    free = {"layer_noise": ((0.1,), (0.0,)), "layer_bytes": ((-100,), (0,))}
    for cost in (
        {"layer_noise": ((0.1,), (1e-9,))},
        {"layer_bytes": ((-100,), (1,))},
        {"layer_ms": ((0.0,), (0.01,))},
    ):
        problem = small(**{**free, **cost})
        assert problem.with_free_riders(Plan({"layer0": "int8"})) == Plan({"layer0": "int8"})


@given(problems(has_formats=True, has_crossings=True), st.data())
def test_free_riders_cost_nothing_and_change_no_choice(problem, data):
    choices = [data.draw(st.sampled_from([None, *range(len(found))])) for found in problem.options]
    plan = problem.plan(choices)
    rich = problem.with_free_riders(plan)
    before, after = problem.predict(plan), problem.predict(rich)
    assert after.noise <= before.noise + 1e-9
    assert after.bytes_change <= before.bytes_change
    assert after.ms_change <= before.ms_change + 1e-9
    assert all(rich.scheme(layer) == scheme for layer, scheme in plan.schemes.items())
