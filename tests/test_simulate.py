"""The simulation of a plan gives what its file gives with optimizations off, tensor by tensor."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from onnxruntime import OrtValue

import planned
from planned import Kit
from quantsieve.model.execute import Executor
from quantsieve.plan import Plan, place
from quantsieve.simulate import Simulation, fake_weights


@cache
def exposed_kit(name: str) -> Kit:
    return planned.exposed(planned.demo(16) if name == "demo" else planned.KITS[name]())


@pytest.fixture(params=[*planned.KITS, "demo"])
def kit(request: pytest.FixtureRequest) -> Kit:
    return exposed_kit(request.param)


def simulated(kit: Kit, plan: Plan) -> planned.Feeds:
    values = Simulation(kit.executor, kit.parts(), plan).run(kit.feeds)
    return {name: values[name].numpy().copy() for name in kit.graph.output_names}


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_every_layer_is_within_one_step_of_the_file(tmp_path: Path, kit: Kit, seed: int | None) -> None:
    """Each layer is simulated on what the file gives its readers: a step of one does not count for the next."""
    plan = kit.plan() if seed is None else kit.random_plan(seed)
    found = planned.run_file(planned.save_plan(tmp_path, kit, plan), kit.feeds, "off")
    simulation = Simulation(kit.executor, kit.parts(), plan)
    values = kit.executor.feed_values(kit.feeds)
    seen = set()
    for index, layer in enumerate(kit.executor.steps):
        name = layer.name if layer is not None else ""
        is_fake = layer is not None and layer.weight is not None and plan.is_quantized(name)
        weights = fake_weights(kit.parts(), layer, plan.scheme(name)) if is_fake and layer is not None else None
        kit.executor.run_step(index, values, weights, simulation.reads.get(name, {}), simulation.outputs)
        if layer is None:
            continue
        array = values[layer.output].numpy()
        # Sums run in another order: a value at a tie may round to the other side, and no further.
        form = simulation.outputs[layer.output].dtype if layer.output in simulation.outputs else "uint8"
        step = float(kit.parts().affine(layer.output, form).scale)
        gaps = np.abs(found[layer.output] - array)
        assert gaps.max() <= step * 1.001, name
        assert (gaps > step / 2).mean() < 1e-2, name  # ties are rare
        values[layer.output] = OrtValue.ortvalue_from_numpy(found[layer.output])
        seen.add(layer.output)
    assert seen == set(found)


@pytest.mark.parametrize("name", planned.KITS)
@pytest.mark.parametrize("seed", [None, *range(6)])
def test_outputs_are_within_one_step_of_the_file(tmp_path: Path, name: str, seed: int | None) -> None:
    kit = exposed_kit(name)
    plan = kit.plan() if seed is None else kit.random_plan(seed)
    found = planned.run_file(planned.save_plan(tmp_path, kit, plan), kit.feeds, "off")
    for output, array in simulated(kit, plan).items():
        # These networks have few values and gains near 1, so a tie that is passed on stays within a step.
        assert np.abs(found[output] - array).max() <= float(kit.parts().affine(output, "uint8").scale) * 1.001, output


def test_rounded_tensors_lie_on_their_grid_and_others_do_not(kit: Kit) -> None:
    plan = kit.random_plan(1)
    values = simulated(kit, plan)
    rounded = set(place(kit.graph, kit.structure, plan, kit.parts().schemes).outputs)
    assert rounded and rounded != set(values)
    for name, array in values.items():
        scale = kit.parts().affine(name, "uint8").scale
        off_grid = float(np.abs(array / scale - np.rint(array / scale)).max())
        # Layers without weights that stay float (Add, pools) may fall on a grid; those with weights do not.
        if name in rounded:
            assert off_grid < 1e-3, name
        elif any(layer.output == name and layer.weight for layer in kit.structure.layers):
            assert off_grid > 0.1, name


def test_a_plan_without_quantized_layers_simulates_the_float_model(kit: Kit) -> None:
    floats = kit.executor.forward(kit.feeds)
    for name, array in simulated(kit, Plan({})).items():
        np.testing.assert_array_equal(array, floats[name].numpy())


def test_one_simulation_serves_batches_of_any_size(kit: Kit) -> None:
    simulation = Simulation(kit.executor, kit.parts(), kit.plan())
    whole = simulation.run(kit.feeds)
    name = kit.graph.outputs[0].name
    first = simulation.run({key: array[:3] for key, array in kit.feeds.items()})[name].numpy().copy()
    step = float(kit.parts().affine(name, "uint8").scale)
    assert first.shape[0] == 3
    assert np.abs(first - whole[name].numpy()[:3]).max() <= step * 1.001


def test_fake_weights_move_by_at_most_half_a_scale(kit: Kit) -> None:
    for layer in kit.structure.quantizable:
        if layer.weight is None:
            continue
        weight = kit.graph.constant(layer.weight)
        assert weight is not None
        rounded, bias = fake_weights(kit.parts(), layer, "int8")
        # max|w| / 254, and the float32 roundings of a division and a product of up to 127 steps.
        assert np.abs(rounded - weight).max() <= np.abs(weight).max() / 254 * (1 + 3.1e-5), layer.name
        assert (bias is None) == (layer.bias is None)


def test_a_simulation_leaves_its_executor_computing_floats() -> None:
    kit = exposed_kit("reshaped")
    executor = Executor(kit.graph, kit.structure)
    before = executor.forward(kit.feeds)["scores"].numpy().copy()
    Simulation(executor, kit.parts(), kit.plan()).run(kit.feeds)
    np.testing.assert_array_equal(executor.forward(kit.feeds)["scores"].numpy(), before)
