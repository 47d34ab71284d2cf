"""Bias correction along a plan makes each layer's mean output the float model's, and errors smaller."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import planned
from planned import Kit
from quantsieve import example
from quantsieve.model.units import Layer
from quantsieve.model.walks import Walks
from quantsieve.plan import Plan
from quantsieve.repair import correct_along
from quantsieve.simulate import Simulation
from quantsieve.weights import Corrections, Ingredients
from quantsieve.writing import write_plan


@cache
def kit_named(name: str) -> Kit:
    return planned.demo() if name == "demo" else planned.KITS[name]()


def halves(kit: Kit) -> list[planned.Feeds]:
    """The calibration samples in two batches of unequal size."""
    return [{key: array[part] for key, array in kit.feeds.items()} for part in (slice(0, 5), slice(5, None))]


def core_means(folder: Path, model: onnx.ModelProto, kit: Kit, layers: list[Layer]) -> dict[str, np.ndarray]:
    """By layer, the mean of its main node's output (bias included, before the activation) of each channel."""
    made = {node.name: node.output[0] for node in model.graph.node}
    have = {value.name for value in model.graph.output}
    more = [made[layer.nodes[0]] for layer in layers if made[layer.nodes[0]] not in have]
    model.graph.output.extend(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in more)
    onnx.save(model, folder / "probed.onnx")
    outputs = planned.run_file(folder / "probed.onnx", kit.feeds, "off")
    arrays = {layer.name: outputs[made[layer.nodes[0]]].astype(np.float64) for layer in layers}
    return {name: array.mean(axis=tuple(i for i in range(array.ndim) if i != 1)) for name, array in arrays.items()}


def corrected_layers(kit: Kit, plan: Plan) -> list[Layer]:
    return [x for x in kit.structure.quantizable if plan.is_quantized(x.name) and x.weight and x.bias]


@pytest.mark.parametrize("name", ["convolutions", "reshaped", "demo"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_the_mean_output_of_each_corrected_layer_is_the_float_models(
    tmp_path: Path, name: str, seed: int | None
) -> None:
    kit = kit_named(name)
    plan = kit.plan() if seed is None else kit.random_plan(seed)
    layers = corrected_layers(kit, plan)
    plain = kit.parts()
    parts = correct_along(plain, plan, Walks(kit.executor, halves(kit), 0))
    wanted = core_means(tmp_path, _proto(plain, Plan({})), kit, layers)
    found = core_means(tmp_path, _proto(parts, plan), kit, layers)
    raw = core_means(tmp_path, _proto(plain, plan), kit, layers)
    worst_raw = 0.0
    for layer in layers:
        made = parts.integers(layer, plan.scheme(layer.name)).bias
        assert made is not None
        # The bias is rounded to its own scale. Where simulation and file round a tie to different sides, in one
        # value of thousands, the means of the layers behind it move: up to 0.025 of an output step were seen.
        bound = made.scale / 2 + 0.05 * float(parts.affine(layer.output, "uint8").scale)
        assert (np.abs(found[layer.name] - wanted[layer.name]) <= bound).all(), layer.name
        worst_raw = max(worst_raw, float((np.abs(raw[layer.name] - wanted[layer.name]) / bound).max()))
    assert not layers or worst_raw > 4  # there was something to correct


def _proto(parts: Ingredients, plan: Plan) -> onnx.ModelProto:
    return write_plan(parts, plan)


def test_it_lowers_the_error_of_a_fully_quantized_network_on_other_samples() -> None:
    kit = kit_named("demo")
    with np.load(example.data_path()) as data:
        feeds = {"input": data["input"][200:400]}
    floats = kit.executor.forward(feeds)["logits"].numpy().copy()
    for scheme in ("int8", "int8-channel"):
        plan = kit.plan(scheme=scheme)
        plain = kit.parts()
        errors = [
            float(np.square(Simulation(kit.executor, parts, plan).run(feeds)["logits"].numpy() - floats).mean())
            for parts in (plain, correct_along(plain, plan, Walks(kit.executor, halves(kit), 0)))
        ]
        assert errors[1] < 0.9 * errors[0], scheme


def test_batches_of_other_sizes_give_the_same_corrections() -> None:
    kit = kit_named("convolutions")
    plan = kit.plan()
    split = correct_along(kit.parts(), plan, Walks(kit.executor, halves(kit), 0)).corrections.shifts["int8"]
    whole = correct_along(kit.parts(), plan, Walks(kit.executor, [kit.feeds], 0)).corrections.shifts["int8"]
    assert split.keys() == whole.keys()
    for name, shift in whole.items():
        np.testing.assert_allclose(split[name], shift, rtol=1e-4, atol=1e-5 * np.abs(shift).max())


def test_float_layers_and_layers_without_a_bias_are_left_alone() -> None:
    kit = kit_named("convolutions")
    plan = kit.plan("stem", "right", "residual")
    assert {n for by_layer in _shifts(kit, plan).shifts.values() for n in by_layer} == {"stem"}
    assert _shifts(kit, Plan({})).shifts == {}


def test_earlier_corrections_are_replaced_and_not_added_to() -> None:
    kit = kit_named("convolutions")
    plan = kit.plan()
    once = _shifts(kit, plan)
    again = correct_along(kit.parts().with_corrections(once), plan, Walks(kit.executor, [kit.feeds], 0))
    for name, shift in once.shifts["int8"].items():
        np.testing.assert_array_equal(again.corrections.shifts["int8"][name], shift)


def _shifts(kit: Kit, plan: Plan) -> Corrections:
    return correct_along(kit.parts(), plan, Walks(kit.executor, [kit.feeds], 0)).corrections
