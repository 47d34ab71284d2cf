"""Local, accumulated and leave-one-out errors equal those of the slow way: whole simulations, values compared."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_suffix import COUNT, Setup, images

from quantsieve.errors import UsageError
from quantsieve.plan import FLOAT, Plan, full_plan
from quantsieve.schemes._static import by_name
from quantsieve.sensitivity.local import Error, TensorErrors, combined, tensor_errors
from quantsieve.sensitivity.rescue import join, rescue_batch
from quantsieve.sensitivity.suffix import error_vectors, float_outputs
from quantsieve.simulate import Simulation
from quantsieve.weights import NO_CORRECTIONS, Ingredients


@pytest.fixture(scope="module")
def setup():
    return Setup()


@pytest.fixture(scope="module")
def parts(setup):
    executor = setup.executor
    return Ingredients(executor.graph, executor.structure, setup.calibration, NO_CORRECTIONS, by_name(setup.schemes))


def plans(setup):
    full = full_plan(setup.options, "int8")
    first = next(iter(full.schemes))
    return [full, Plan({name: s for name, s in full.schemes.items() if name != first})]


# --- rescue -----------------------------------------------------------------------------------------------------


def simulated(setup, parts, plan):
    reference = float_outputs(setup.executor, setup.executor.forward({"x": setup.x}))
    outputs = float_outputs(setup.executor, Simulation(setup.executor, parts, plan).run({"x": setup.x}))
    return error_vectors(outputs, reference, setup.calibration.output_variance, COUNT)[0]


@pytest.mark.parametrize("which", [0, 1])
def test_leaving_one_out_equals_simulating_each_smaller_plan(setup, parts, which):
    plan = plans(setup)[which]
    told = []
    found = rescue_batch(setup.executor, parts, plan, {"x": setup.x}, COUNT, told.append)
    assert found.layers == tuple(x.name for x in setup.executor.structure.quantizable if plan.is_quantized(x.name))
    np.testing.assert_allclose(found.full, simulated(setup, parts, plan), rtol=1e-6)
    for layer, errors in zip(found.layers, found.errors, strict=True):
        smaller = Plan({**plan.schemes, layer: FLOAT})
        np.testing.assert_allclose(errors, simulated(setup, parts, smaller), rtol=1e-6, err_msg=layer)
    assert told == list(range(1, len(found.layers) + 1))
    np.testing.assert_allclose(found.gain(), (found.full - found.errors).mean(axis=1))
    low, high = found.interval()
    assert (low <= found.gain()).all() and (found.gain() <= high).all()


def test_two_batches_of_rescues_join_to_the_whole(setup, parts):
    plan = plans(setup)[0]
    whole = rescue_batch(setup.executor, parts, plan, {"x": setup.x}, COUNT)
    halves = [rescue_batch(setup.executor, parts, plan, {"x": x}, len(x)) for x in (setup.x[:2], setup.x[2:])]
    np.testing.assert_allclose(join(halves).errors, whole.errors, rtol=1e-5)
    np.testing.assert_allclose(join(halves).full, whole.full, rtol=1e-5)


# --- local and accumulated ----------------------------------------------------------------------------------------


def test_local_error_is_that_of_rounding_the_float_tensor(setup, parts):
    found = {e.root: e for e in tensor_errors(setup.executor, parts, plans(setup)[0], [{"x": setup.x}])}
    values = setup.executor.forward({"x": setup.x})
    assert set(found) == {"x", "r1", "c2", "r2", "g"}  # the head's output stays float
    for root, errors in found.items():
        exact = values[root].numpy().astype(np.float64)
        affine = parts.affine(root, "uint8")
        q = np.clip(np.rint(exact / affine.scale) + affine.zero_point, 0, 255)
        noise = np.square((q - affine.zero_point) * affine.scale - exact).sum()
        assert errors.local.signal == pytest.approx(np.square(exact).sum(), rel=1e-6)
        assert errors.local.noise == pytest.approx(noise, rel=1e-3)


def test_accumulated_error_is_that_of_the_tensor_in_the_quantized_model(setup, parts):
    plan = plans(setup)[0]
    found = {e.root: e for e in tensor_errors(setup.executor, parts, plan, [{"x": setup.x}])}
    values = setup.executor.forward({"x": setup.x})
    simulation = Simulation(setup.executor, parts, plan)
    state, seen = setup.executor.feed_values({"x": setup.x}), {}
    for index, layer in enumerate(setup.executor.steps):
        seen.update({name: value.numpy().copy() for name, value in state.items()})
        name = layer.name if layer else ""
        reads = simulation.reads.get(name, {})
        setup.executor.run_step(index, state, simulation.weights.get(name), reads, simulation.outputs)
    seen.update({name: value.numpy().copy() for name, value in state.items()})
    for root in simulation.outputs:
        noise = np.square(seen[root].astype(np.float64) - values[root].numpy()).sum()
        assert found[root].accumulated.noise == pytest.approx(noise, rel=1e-6)
    assert found["x"].accumulated.noise == pytest.approx(found["x"].local.noise)  # nothing happened before it


def test_batches_add_up(setup, parts):
    plan = plans(setup)[0]
    whole = tensor_errors(setup.executor, parts, plan, [{"x": setup.x}])
    halves = tensor_errors(setup.executor, parts, plan, [{"x": setup.x[:2]}, {"x": setup.x[2:]}])
    for a, b in zip(whole, halves, strict=True):
        assert a.accumulated.noise == pytest.approx(b.accumulated.noise, rel=1e-4)
        assert a.local.signal == pytest.approx(b.local.signal, rel=1e-6)


def test_only_tensors_that_the_plan_rounds_are_told(setup, parts):
    head = Plan({"head": "int8"})
    assert {e.root for e in tensor_errors(setup.executor, parts, head, [{"x": images(2, 3)}])} == {"r2"}


# --- the ranking --------------------------------------------------------------------------------------------------


def made(name, local, accumulated):
    return TensorErrors(name, Error(1.0, local), Error(1.0, accumulated))


def test_the_noisiest_tensor_ranks_first_not_the_cleanest():
    errors = [made("clean", 1e-6, 1e-5), made("dirty", 1e-2, 1e-1), made("middle", 1e-4, 1e-3)]
    found = combined(errors)
    assert found == pytest.approx({"clean": 0.0, "dirty": 1.0, "middle": 0.5})
    assert combined([made("a", 1e-4, 1e-2), made("b", 1e-2, 1e-4)], local=1, accumulated=0) == {"a": 0.0, "b": 1.0}


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=8))
def test_combined_errors_lie_in_0_to_1_whatever_the_noise(noises):
    found = combined([made(str(i), a, b) for i, (a, b) in enumerate(noises)])
    assert all(0 <= value <= 1 for value in found.values())


@pytest.mark.parametrize("weights", [(-1, 1), (0, 0)])
def test_weights_that_weigh_nothing_are_wrong_usage(weights):
    with pytest.raises(UsageError):
        combined([made("a", 1, 1)], *weights)


def test_sqnr_and_relative_error_say_the_same():
    assert Error(100.0, 1.0).sqnr_db == pytest.approx(20)
    assert Error(100.0, 1.0).relative == pytest.approx(0.01)
    assert Error(1.0, 0.0).sqnr_db == math.inf and Error(1.0, 0.0).relative == 0
    assert Error(0.0, 1.0).sqnr_db == -math.inf and Error(0.0, 1.0).relative == math.inf
    assert Error(1.0, math.nan).relative == math.inf
