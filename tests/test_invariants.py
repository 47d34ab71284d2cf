"""The promises about written files, on the demo's trained model (Conv+Clip, depthwise, residual Add, pool, Gemm)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from quantsieve import schemes
from quantsieve.calibrate import Calibration, calibrate
from quantsieve.example import data_path, model_path
from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare
from quantsieve.model.units import find_structure
from quantsieve.plan import Options, Plan, find_options
from quantsieve.schemes._static import by_name
from quantsieve.simulate import Simulation
from quantsieve.targets.audit import audit_layers
from quantsieve.targets.ort import OrtCpu
from quantsieve.weights import NO_CORRECTIONS, Ingredients
from quantsieve.writing import count_bytes, write_plan

LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")


@dataclass
class Made:
    executor: Executor
    parts: Ingredients
    options: Options
    calibration: Calibration
    images: np.ndarray


@pytest.fixture(scope="module")
def made() -> Made:
    images = np.load(data_path())["input"]
    model, _ = prepare(load_model(model_path()), [{"input": images[:1]}], 0)
    graph = Graph(model)
    structure = find_structure(graph)
    executor = Executor(graph, structure)
    calibration = calibrate(executor, [({"input": images[:64]}, 64)])
    known = [schemes.get("int8"), schemes.get("int8-channel")]
    options = find_options(graph, structure, calibration, known)
    parts = Ingredients(graph, structure, calibration, NO_CORRECTIONS, by_name(known))
    return Made(executor, parts, options, calibration, images[64:96])


def _random_plan(options: Options, seed: int) -> Plan:
    draw = np.random.default_rng(seed)
    chosen = {}
    for layer, allowed in options.schemes.items():
        pick = draw.integers(0, len(allowed) + 1)
        if pick < len(allowed):
            chosen[layer] = allowed[pick]
    return Plan(chosen)


def _run(model: onnx.ModelProto | Path, images: np.ndarray, level: str) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 4
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options).run(None, {"input": images})[0]


def test_a_plan_without_quantized_layers_is_bit_equal(made: Made) -> None:
    written = write_plan(made.parts, Plan({}))
    for level in LEVELS:
        expected = _run(ir.to_proto(made.parts.graph.model), made.images, level)
        assert np.array_equal(_run(written, made.images, level), expected), level


def test_the_interface_and_metadata_survive(made: Made) -> None:
    before, after = load_model(model_path()), ir.from_proto(write_plan(made.parts, _random_plan(made.options, 1)))
    for side in ("inputs", "outputs"):
        old = [(v.name, v.dtype, str(v.shape)) for v in getattr(before.graph, side)]
        assert [(v.name, v.dtype, str(v.shape)) for v in getattr(after.graph, side)] == old
    assert dict(after.metadata_props) == dict(before.metadata_props)


@pytest.mark.parametrize("seed", range(6))
def test_a_mixed_plan_computes_the_same_at_every_optimization_level(made: Made, seed: int) -> None:
    written = write_plan(made.parts, _random_plan(made.options, seed))
    reference = _run(written, made.images, LEVELS[0])
    # Integer kernels may round a value that lies on the edge of a step to its other side (one step, RUNTIME section 2).
    # Such flips are rare: in the mean over all logits they stay far below the noise of quantization itself, which a
    # layer quantized behind our back would add.
    noise = np.square(reference - _run(ir.to_proto(made.parts.graph.model), made.images, LEVELS[0])).mean()
    for level in LEVELS[1:]:
        assert np.square(_run(written, made.images, level) - reference).mean() <= 0.05 * noise + 1e-8, level


@pytest.mark.parametrize("seed", range(6))
def test_each_layer_runs_as_it_was_planned(made: Made, seed: int, tmp_path: Path) -> None:
    plan = _random_plan(made.options, seed)
    path = tmp_path / "model.onnx"
    onnx.save(write_plan(made.parts, plan), path)
    layers = {layer.name: layer.nodes for layer in made.parts.structure.quantizable if layer.weight}
    ran = audit_layers(OrtCpu().audit(path), layers)
    assert {n: found == "int8" for n, found in ran.items()} == {n: plan.is_quantized(n) for n in layers}


def test_a_float_layer_keeps_its_exact_weights(made: Made) -> None:
    plan = _random_plan(made.options, 3)
    written = ir.from_proto(write_plan(made.parts, plan))
    for layer in made.parts.structure.quantizable:
        if layer.weight and not plan.is_quantized(layer.name):
            kept = written.graph.initializers[layer.weight].const_value
            assert kept is not None and np.array_equal(kept.numpy(), made.parts.graph.constant(layer.weight))


def test_scales_of_one_value_are_scalars(made: Made) -> None:
    """With a scale of shape [1], Clip does not fuse into the convolution and the layer runs in float."""
    written = ir.from_proto(write_plan(made.parts, Plan(dict.fromkeys(made.options.schemes, "int8"))))
    for node in written.graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert all(len(v.const_value.shape) == 0 for v in node.inputs[1:] if v is not None), node.name


@pytest.mark.parametrize("seed", range(4))
def test_simulation_and_file_agree_without_optimizations(made: Made, seed: int) -> None:
    plan = _random_plan(made.options, seed)
    simulated = Simulation(made.executor, made.parts, plan).run({"input": made.images})["logits"].numpy()
    measured = _run(write_plan(made.parts, plan), made.images, LEVELS[0])
    root = next(t for t in made.parts.structure.tensors if t.root == "logits")
    step = float(made.parts.affine(root.root, "uint8").scale)
    assert np.abs(simulated - measured).max() <= step


def test_signed_and_unsigned_weights_hold_the_same_numbers(made: Made) -> None:
    plan = _random_plan(made.options, 2)
    unsigned = Ingredients(
        made.parts.graph, made.parts.structure, made.calibration, NO_CORRECTIONS, made.parts.schemes, "u8"
    )
    signed = _run(write_plan(made.parts, plan), made.images, LEVELS[0])
    assert np.array_equal(signed, _run(write_plan(unsigned, plan), made.images, LEVELS[0]))


def test_predicted_bytes_are_the_file_s_within_three_percent_of_what_it_saves(made: Made) -> None:
    empty = write_plan(made.parts, Plan({})).ByteSize()
    costs = count_bytes(made.parts, made.options, empty)
    for scheme in ("int8", "int8-channel"):
        plan = Plan({n: scheme if scheme in found else found[0] for n, found in made.options.schemes.items()})
        size = write_plan(made.parts, plan).ByteSize()
        predicted = sum(costs.layer_bytes[n][s] for n, s in plan.schemes.items()) + sum(costs.tensor_bytes.values())
        assert abs(empty + predicted - size) <= 0.03 * (empty - size)
