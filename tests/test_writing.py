"""Written files: names, weights and numbers survive, and what was planned is what runs, with default options too."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import planned
from planned import Kit
from quantsieve import writing
from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare
from quantsieve.plan import Plan, place
from quantsieve.schemes import FLOAT
from quantsieve.simulate import Simulation
from quantsieve.targets.audit import audit_layers
from quantsieve.targets.ort import OrtCpu

SEEDS = range(7)  # plans a network
NETWORKS = tuple(planned.KITS)


@cache
def kit_named(name: str) -> Kit:
    return planned.demo() if name == "demo" else planned.KITS[name]()


@cache
def exact_type() -> str:
    return planned.exact_weight_type()


@pytest.fixture(params=NETWORKS)
def kit(request: pytest.FixtureRequest) -> Kit:
    return kit_named(request.param)


@pytest.fixture
def no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing._Writer, "_is_guarded", lambda self, root: False)


def constants(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def output_steps(kit: Kit) -> dict[str, float]:
    """A 255th of each float output's range."""
    values = kit.executor.forward(kit.feeds)
    return {out.name: float(np.ptp(values[out.name].numpy())) / 255 for out in kit.graph.outputs}


def ran(path: Path, kit: Kit, level: str = "all") -> dict[str, str]:
    """By layer, the precision of the main node. A bias Add that no kernel takes, behind a MatMul of rank 3, is
    apart."""
    nodes = {layer.name: layer.nodes[:1] for layer in kit.structure.quantizable}
    return dict(audit_layers(OrtCpu(optimization=level).audit(path), nodes))


def gap(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], steps: dict[str, float]) -> float:
    """Largest difference between two sets of outputs, in output steps."""
    return max(float(np.abs(found[name] - wanted[name]).max()) / step for name, step in steps.items())


# A kernel and the float reference round the same sum; they differ by a step where it lies within float error of a tie,
# in few places. Such a step passes the layers behind it with a gain near 1.
KERNEL_STEPS = 1.0


# --- the file as its user sees it -----------------------------------------------------------------------------------


def test_a_plan_without_quantized_layers_is_bit_equal_to_the_prepared_model(tmp_path: Path, kit: Kit) -> None:
    wanted = planned.run_file(planned.save(tmp_path, kit.graph.model), kit.feeds, "off")
    for name, plan in {"empty": Plan({}), "named": Plan(dict.fromkeys(kit.options.schemes, FLOAT))}.items():
        found = planned.run_file(planned.save_plan(tmp_path, kit, plan, name=f"{name}.onnx"), kit.feeds, "off")
        assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in wanted.items()}


def test_inputs_outputs_metadata_and_doc_strings_survive(tmp_path: Path, kit: Kit) -> None:
    for plan in (Plan({}), kit.plan(), kit.random_plan(0)):
        written = onnx.load(planned.save_plan(tmp_path, kit, plan))
        onnx.checker.check_model(written, full_check=True)
        assert list(written.graph.input) == list(kit.original.graph.input)
        assert list(written.graph.output) == list(kit.original.graph.output)
        assert list(written.metadata_props) == list(kit.original.metadata_props) != []
        assert written.doc_string == kit.original.doc_string != ""
        assert written.graph.doc_string == kit.original.graph.doc_string != ""
        assert written.graph.name == kit.original.graph.name


def test_the_input_file_keeps_its_bytes(tmp_path: Path, kit: Kit) -> None:
    path = tmp_path / "user.onnx"
    onnx.save(kit.original, path)
    before = path.read_bytes()
    model, _ = prepare(load_model(path), [kit.feeds], len(before))
    assert [v.name for v in model.graph.outputs] == [v.name for v in kit.graph.model.graph.outputs]
    planned.save_plan(tmp_path, kit, kit.plan())
    assert path.read_bytes() == before


def test_writing_leaves_the_prepared_model_as_it_was(kit: Kit) -> None:
    before = ir.to_proto(kit.graph.model).SerializeToString()
    writing.write_plan(kit.parts(), kit.plan())
    assert ir.to_proto(kit.graph.model).SerializeToString() == before


def test_the_file_spends_no_byte_on_shapes_in_between(tmp_path: Path, kit: Kit) -> None:
    for plan in (Plan({}), kit.random_plan(1)):
        assert not onnx.load(planned.save_plan(tmp_path, kit, plan)).graph.value_info


def test_what_a_subgraph_reads_from_outside_is_rounded_for_it_too(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    node, value = planned.node, onnx.helper.make_tensor_value_info
    branches = {
        f"{branch}_branch": onnx.helper.make_graph(
            [node(op, ["c"], [branch], name=op)], branch, [], [value(branch, onnx.TensorProto.FLOAT, None)]
        )
        for branch, op in (("then", "Neg"), ("else", "Abs"))
    }
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("ReduceSum", ["x"], ["total"], name="total", keepdims=0),
        node("Greater", ["total", "zero"], ["flag"], name="flag"),
        node("If", ["flag"], ["y"], name="if", **branches),
    ]
    shape = ["n", 2, 4, 4]
    ends = [[value(name, onnx.TensorProto.FLOAT, shape)] for name in "xy"]
    weight = numpy_helper.from_array(draw.standard_normal((2, 2, 1, 1)).astype(np.float32), "w")
    graph = onnx.helper.make_graph(nodes, "g", *ends, [weight, numpy_helper.from_array(np.float32(0), "zero")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    kit = planned.kit_of(model, {"x": draw.standard_normal((8, 2, 4, 4)).astype(np.float32)})
    path = planned.save_plan(tmp_path, kit, kit.plan("conv"))
    readers = [found.op_type for found in _nodes(onnx.load(path).graph) if "c" in found.input]
    assert readers == ["QuantizeLinear"]
    simulated = Simulation(kit.executor, kit.parts(), kit.plan("conv")).run(kit.feeds)["y"].numpy()
    np.testing.assert_allclose(planned.run_file(path, kit.feeds, "off")["y"], simulated, atol=1e-5)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def test_equal_plans_give_equal_bytes(tmp_path: Path, kit: Kit) -> None:
    plan = kit.random_plan(3)
    backwards = Plan(dict(reversed(plan.schemes.items())))
    one, other = (planned.save_plan(tmp_path, kit, p, name=f"{i}.onnx") for i, p in enumerate((plan, backwards)))
    assert one.read_bytes() == other.read_bytes()


# --- what was planned is what runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mixed_plan_gives_the_same_outputs_at_every_level(tmp_path: Path, kit: Kit, seed: int) -> None:
    path = planned.save_plan(tmp_path, kit, kit.random_plan(seed), exact_type())
    wanted = planned.run_file(path, kit.feeds, "off")
    for level in planned.LEVELS[1:]:
        assert gap(planned.run_file(path, kit.feeds, level), wanted, output_steps(kit)) <= KERNEL_STEPS, level


@pytest.mark.parametrize("seed", SEEDS)
def test_float_layers_keep_their_weights_bit_for_bit(tmp_path: Path, kit: Kit, seed: int) -> None:
    plan = kit.random_plan(seed)
    written = constants(planned.save_plan(tmp_path, kit, plan))
    for layer in kit.structure.layers:
        for name in filter(None, (layer.weight, layer.bias)):
            wanted = kit.graph.constant(name)
            assert wanted is not None
            assert (name in written) != plan.is_quantized(layer.name)  # and the floats of the others are gone
            assert name not in written or written[name].tobytes() == wanted.tobytes()


@pytest.mark.parametrize("seed", SEEDS)
def test_each_layer_runs_in_the_precision_that_was_planned(tmp_path: Path, kit: Kit, seed: int) -> None:
    plan = kit.random_plan(seed)
    path = planned.save_plan(tmp_path, kit, plan, exact_type())
    for level in planned.LEVELS[2:]:  # basic has no integer kernels
        found = ran(path, kit, level)
        for layer in kit.structure.quantizable:
            if plan.is_quantized(layer.name):
                assert found[layer.name] == "int8", layer.name
            elif layer.weight is not None:
                assert found[layer.name] == "float", layer.name
            # A float Add between rounded tensors may run as integers: it has no weights, and its numbers are the same.


@pytest.mark.parametrize(
    ("network", "float_layer"), [("convolutions", "depthwise"), ("reshaped", "square"), ("rows", "down")]
)
@pytest.mark.usefixtures("no_guard")
def test_without_its_guard_a_float_layer_is_quantized_at_load(tmp_path: Path, network: str, float_layer: str) -> None:
    kit = kit_named(network)
    plan = kit.plan(*(name for name in kit.options.schemes if name != float_layer))
    path = planned.save_plan(tmp_path, kit, plan, exact_type())
    assert ran(path, kit)[float_layer] == "int8"
    # Its weights were rounded: half a step and more here, a ten-thousandth with the guard.
    outputs = planned.run_file(path, kit.feeds)
    assert gap(outputs, planned.run_file(path, kit.feeds, "off"), output_steps(kit)) > 0.5


def unguarded(folder: Path, kit: Kit, plan: Plan) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing._Writer, "_is_guarded", lambda self, root: False)
        return planned.save_plan(folder, kit, plan, exact_type(), "unguarded.onnx")


def test_a_float_layer_with_tiny_weights_and_a_large_bias_is_lost_without_its_guard(tmp_path: Path) -> None:
    kit = planned.fragile()
    plan = kit.plan("first", "last")
    steps = output_steps(kit)
    guarded, bare = planned.save_plan(tmp_path, kit, plan, exact_type()), unguarded(tmp_path, kit, plan)
    wanted = planned.run_file(guarded, kit.feeds, "off")
    assert gap(planned.run_file(bare, kit.feeds, "off"), wanted, steps) == 0
    for level in planned.LEVELS[1:]:
        assert gap(planned.run_file(guarded, kit.feeds, level), wanted, steps) <= KERNEL_STEPS
        assert gap(planned.run_file(bare, kit.feeds, level), wanted, steps) > 100


def test_a_fully_quantized_network_has_no_float_layer(tmp_path: Path, kit: Kit) -> None:
    for scheme in ("int8", "int8-channel"):
        path = planned.save_plan(tmp_path, kit, kit.plan(scheme=scheme), exact_type())
        assert set(ran(path, kit).values()) == {"int8"}


# --- scalars --------------------------------------------------------------------------------------------------------


def scalar_parameters(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Scales and zero points of all pairs without an axis of channels."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            yield from (tensors[name] for name in node.input[1:])


def test_scales_and_zero_points_are_scalars_when_one_serves_all(tmp_path: Path, kit: Kit) -> None:
    found = list(scalar_parameters(onnx.load(planned.save_plan(tmp_path, kit, kit.plan(scheme="int8")))))
    assert found
    assert {tuple(tensor.dims) for tensor in found} == {()}


def integer_convolutions(path: Path) -> int:
    """In ONNX's own layout or in the one of channels last."""
    counts = OrtCpu().audit(path).op_counts
    return sum(count for name, count in counts if name.rpartition(":")[2] == "QLinearConv")


def test_convolutions_fuse_with_their_clip_and_relu(tmp_path: Path) -> None:
    kit = kit_named("convolutions")
    path = planned.save_plan(tmp_path, kit, kit.plan(scheme="int8"), exact_type())
    assert integer_convolutions(path) == 5
    names = {name.rpartition(":")[2] for name, _ in OrtCpu().audit(path).op_counts}
    assert not {"Clip", "Relu", "Conv", "FusedConv"} & names


def test_with_vectors_for_scalars_a_clip_does_not_fuse(tmp_path: Path) -> None:
    kit = kit_named("convolutions")
    path = planned.save_plan(tmp_path, kit, kit.plan(scheme="int8"), exact_type())
    model = onnx.load(path)
    for tensor in scalar_parameters(model):
        tensor.dims[:] = [1]
    onnx.save(model, path)
    assert integer_convolutions(path) < 5


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["int8", "int8-channel"])
def test_signed_and_unsigned_weights_give_equal_outputs(tmp_path: Path, kit: Kit, scheme: str) -> None:
    files = {t: planned.save_plan(tmp_path, kit, kit.plan(scheme=scheme), t, f"{t}.onnx") for t in ("s8", "u8")}
    assert {a.dtype.name for a in constants(files["u8"]).values()} >= {"uint8"}
    assert "int8" not in {a.dtype.name for a in constants(files["u8"]).values()}
    signed, unsigned = (planned.run_file(path, kit.feeds, "off") for path in files.values())
    for name, wanted in signed.items():
        np.testing.assert_array_equal(unsigned[name], wanted)


@pytest.mark.parametrize("product", ["transposed", "plain", "matmul"])
@pytest.mark.parametrize("level", ["off", "all"])
def test_per_channel_scales_follow_the_columns_of_the_product(tmp_path: Path, product: str, level: str) -> None:
    kit = planned.single_product(product)
    layer = kit.structure.quantizable[0]
    weight = kit.graph.constant(layer.weight or "")
    assert weight is not None and weight.shape[0] == weight.shape[1]
    columns = (weight.T if product == "transposed" else weight).astype(np.float64)
    scale = np.abs(columns).max(axis=0) / 127
    affine = kit.parts().affine("x", "uint8")
    quantum = float(affine.scale)
    x = np.clip(np.rint(kit.feeds["x"] / affine.scale) + affine.zero_point, 0, 255) - affine.zero_point
    wanted = x * quantum @ (np.rint(columns / scale) * scale)
    if layer.bias is not None:
        bias = kit.graph.constant(layer.bias)
        wanted = wanted + np.rint(bias / (quantum * scale)) * (quantum * scale)
    path = planned.save_plan(tmp_path, kit, kit.plan(scheme="int8-channel"), exact_type())
    assert set(ran(path, kit).values()) == {"int8"}
    found = planned.run_file(path, kit.feeds, level)["y"]
    # Each of the 16 products and its sum rounds once in float32; scales round once too.
    bound = 40 * 2.0**-24 * (np.abs(x * quantum) @ np.abs(columns) + 1)
    assert (np.abs(found - wanted) <= bound).all()


def test_a_bias_too_large_for_int32_is_kept_by_a_larger_weight_scale(tmp_path: Path) -> None:
    kit = planned.single_product("plain", weight=1e-9, bias=5.0)
    path = planned.save_plan(tmp_path, kit, kit.plan(), exact_type())
    wanted = planned.run_file(planned.save(tmp_path, kit.graph.model), kit.feeds, "off")["y"]
    for level in ("off", "all"):
        # The weights are lost, which is less than a millionth of the bias here; the bias is not.
        np.testing.assert_allclose(planned.run_file(path, kit.feeds, level)["y"], wanted, rtol=1e-6)


# --- predicted size -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("scheme", ["int8", "int8-channel"])
def test_predicted_bytes_are_those_of_the_file(share: float, scheme: str) -> None:
    kit = kit_named("demo")
    draw = np.random.default_rng(int(10 * share))
    plan = kit.plan(*(name for name in kit.options.schemes if draw.random() <= share), scheme=scheme)
    parts = kit.parts()
    empty = writing.write_plan(parts, writing.FLOAT_PLAN).ByteSize()
    costs = writing.count_bytes(parts, kit.options, empty)
    layers = sum(costs.layer_bytes[name][chosen] for name, chosen in plan.schemes.items())
    tensors = sum(costs.tensor_bytes[pair] for pair in place(kit.graph, kit.structure, plan, parts.schemes).rounded)
    written = writing.write_plan(parts, plan).ByteSize() - empty
    assert written < 0
    assert layers + tensors == pytest.approx(written, rel=0.03)
