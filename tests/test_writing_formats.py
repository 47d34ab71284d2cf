"""Plans of layers with several activation formats, or none: what is simulated is what the file does, at every level."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

import planned
from planned import Kit, gap
from quantsieve import writing
from quantsieve.plan import Plan, Rounded, full_plan, place
from quantsieve.schemes import names
from quantsieve.schemes._affine import round_blocks
from quantsieve.simulate import Simulation
from quantsieve.targets.audit import audit_layers
from quantsieve.targets.ort import OrtCpu
from quantsieve.weights import Corrections, constants
from quantsieve.writing import write_plan

SEEDS = range(12)


@cache
def kit_named(name: str) -> Kit:
    return planned.demo(16) if name == "demo" else planned.KITS[name]()


@pytest.fixture(params=planned.KITS)
def kit(request: pytest.FixtureRequest) -> Kit:
    return kit_named(request.param)


@cache
def exact_type() -> str:
    return planned.exact_weight_type()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_of_all_schemes_does_what_is_simulated_at_every_level(tmp_path: Path, kit: Kit, seed: int) -> None:
    plan = kit.random_plan(seed, among=names())
    path = planned.save_plan(tmp_path, kit, plan, exact_type())
    onnx.checker.check_model(path)
    simulated = Simulation(kit.executor, kit.parts(), plan).run(kit.feeds)
    wanted = {out.name: simulated[out.name].numpy() for out in kit.graph.outputs}
    for level in planned.LEVELS:
        assert gap(planned.run_file(path, kit.feeds, level), wanted) <= 1, level


@pytest.mark.parametrize("scheme", ["w8", "a16w8"])
def test_a_full_plan_in_one_of_them_is_nearer_to_float_than_int8(tmp_path: Path, kit: Kit, scheme: str) -> None:
    floats = planned.run_file(planned.save(tmp_path, kit.graph.model), kit.feeds, "off")
    gaps = [
        gap(planned.run_file(planned.save_plan(tmp_path, kit, full_plan(kit.options, name)), kit.feeds, "off"), floats)
        for name in (scheme, "int8-channel")
    ]
    assert gaps[0] < gaps[1]


@pytest.mark.parametrize("name", ["tokens", "rows", "reshaped"])
@pytest.mark.parametrize("scheme", ["w8", "a16w8"])
def test_onnxruntime_makes_no_blocked_kernel_of_a_float_matmul(tmp_path: Path, name: str, scheme: str) -> None:
    """It would round what it reads to 8 bits, which neither scheme asks for."""
    kit = kit_named(name)
    path = planned.save_plan(tmp_path, kit, full_plan(kit.options, scheme))
    audit = OrtCpu().audit(path)
    assert "com.microsoft:MatMulNBits" not in dict(audit.op_counts)
    products = {x.name: x.nodes[:1] for x in kit.structure.quantizable if x.weight}
    assert set(audit_layers(audit, products).values()) == {"float"}
    assert gap(planned.run_file(path, kit.feeds), planned.run_file(path, kit.feeds, "off")) < 0.01


def test_weights_alone_round_no_tensor_and_leave_layers_without_weights_float(tmp_path: Path, kit: Kit) -> None:
    plan = full_plan(kit.options, "w8")
    assert set(plan.schemes) == {layer.name for layer in kit.structure.quantizable if layer.weight}
    assert not place(kit.graph, kit.structure, plan, kit.parts().schemes).rounded
    model = onnx.load(planned.save_plan(tmp_path, kit, plan))
    assert "QuantizeLinear" not in {node.op_type for node in model.graph.node}
    assert not {layer.weight for layer in kit.structure.layers if layer.weight} & {
        t.name for t in model.graph.initializer
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_a_layer_of_8_bit_weights_alone_is_never_made_an_integer_one_that_rounds_more(
    tmp_path: Path, kit: Kit, seed: int
) -> None:
    plan = kit.random_plan(seed, among=("int8", "w8"))
    path = planned.save_plan(tmp_path, kit, plan, exact_type())
    found = audit_layers(OrtCpu().audit(path), {x.name: x.nodes[:1] for x in kit.structure.quantizable})
    rounded = place(kit.graph, kit.structure, plan, kit.parts().schemes)
    for layer in kit.structure.quantizable:
        if plan.scheme(layer.name) == "w8" and layer.op_type in ("Conv", "ConvTranspose"):
            assert found[layer.name] == "float", layer.name
            assert layer.output not in rounded.outputs


def test_weights_alone_of_convolutions_are_floats_once_the_file_is_loaded(tmp_path: Path) -> None:
    """So they run as float ones do, in their blocked layout: nothing is left of Cast, Mul or DequantizeLinear."""
    kit = kit_named("convolutions")
    path = planned.save_plan(tmp_path, kit, full_plan(kit.options, "w8"))
    floats = OrtCpu().audit(planned.save(tmp_path, kit.graph.model)).op_counts
    convolutions = {name: count for name, count in floats if name.endswith("Conv")}
    found = dict(OrtCpu().audit(path).op_counts)
    assert convolutions and {name: found.get(name) for name in convolutions} == convolutions
    assert not {"Cast", "Mul"} & set(found)


def test_16_bit_tensors_take_onnxruntimes_own_operators_below_opset_21(tmp_path: Path) -> None:
    kit = kit_named("convolutions")
    model = onnx.load(planned.save_plan(tmp_path, kit, full_plan(kit.options, "a16w8")))
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": kit.graph.opset, "com.microsoft": 1}
    kinds = {(node.domain, node.op_type) for node in model.graph.node if node.op_type.endswith("QuantizeLinear")}
    assert ("com.microsoft", "QuantizeLinear") in kinds
    assert ("", "QuantizeLinear") not in kinds


def test_16_bit_tensors_take_the_standard_operators_from_opset_21_on(tmp_path: Path) -> None:
    kit = planned.at_opset(21)
    plan = full_plan(kit.options, "a16w8")
    path = planned.save_plan(tmp_path, kit, plan)
    onnx.checker.check_model(path, full_check=True)
    assert {opset.domain for opset in onnx.load(path).opset_import} == {""}
    wanted = Simulation(kit.executor, kit.parts(), plan).run(kit.feeds)["y"].numpy().copy()
    for level in planned.LEVELS:
        assert gap(planned.run_file(path, kit.feeds, level), {"y": wanted}) <= 1, level


def test_a_reader_in_another_format_rounds_once_more_behind_a_guard(tmp_path: Path) -> None:
    kit = kit_named("convolutions")
    plan = Plan({"stem": "int8", "depthwise": "a16w8"})
    found = place(kit.graph, kit.structure, plan, kit.parts().schemes)
    assert found.outputs == {"r1": "uint8", "r2": "uint16"}
    assert [tuple(read) for read in found.reads["depthwise"]] == [("r1", "r1", "uint16")]
    assert set(found.rounded) == {
        Rounded("x", "uint8"), Rounded("r1", "uint8"), Rounded("r1", "uint16"), Rounded("r2", "uint16"),
    }  # fmt: skip
    model = onnx.load(planned.save_plan(tmp_path, kit, plan))
    makers = {name: node for node in model.graph.node for name in node.output}
    pair = makers[next(node for node in model.graph.node if node.name == "depthwise").input[0]]
    guard = makers[makers[pair.input[0]].input[0]]
    assert guard.op_type == "Sum" and len(guard.input) == 1
    assert makers[guard.input[0]].op_type == "DequantizeLinear"


@pytest.mark.parametrize("name", ["tokens", "rows", "reshaped"])
@pytest.mark.parametrize("weight_type", ["s8", "u8"])
def test_a_dynamic_product_is_one_integer_kernel_with_the_numbers_of_the_simulation(
    tmp_path: Path, name: str, weight_type: str
) -> None:
    kit = kit_named(name)
    plan = kit.plan(*(name for name, found in kit.options.schemes.items() if "dynamic8" in found), scheme="dynamic8")
    assert {kit.structure.layer(name).op_type for name in plan.schemes} <= {"MatMul", "Gemm"}
    path = planned.save_plan(tmp_path, kit, plan, weight_type)
    onnx.checker.check_model(path, full_check=True)
    found = OrtCpu().audit(path)
    ran = audit_layers(found, {n: kit.structure.layer(n).nodes[:1] for n in plan.schemes})
    assert set(ran.values()) == {"int8"}
    counts = dict(found.op_counts)
    assert "MatMulInteger" not in counts  # one kernel with its Cast and Mul
    simulated = Simulation(kit.executor, kit.parts(weight_type), plan).run(kit.feeds)
    wanted = {out.name: simulated[out.name].numpy().copy() for out in kit.graph.outputs}
    levels = planned.LEVELS if weight_type == exact_type() else planned.LEVELS[:1]
    for level in levels:
        assert gap(planned.run_file(path, kit.feeds, level), wanted) <= 1, level


@pytest.mark.parametrize("product", ["transposed", "plain", "matmul"])
def test_4_bit_blocks_are_packed_as_the_kernel_reads_them(
    tmp_path: Path, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the numbers of the simulation, which rounds what the kernel rounds; 16 values make half a block."""
    kit = planned.single_product(product)
    plan = kit.plan(scheme="w4")
    wanted = Simulation(kit.executor, kit.parts(), plan).run(kit.feeds)["y"].numpy().copy()
    for level in (4, 1):
        monkeypatch.setattr(writing, "FAST_LEVEL", level)
        path = planned.save_plan(tmp_path, kit, plan)
        audit = OrtCpu().audit(path)
        assert dict(audit.op_counts)["com.microsoft:MatMulNBits"] == 1
        assert audit_layers(audit, {"product": ("product",)}) == {"product": "weight-only"}
        for optimization in planned.LEVELS:
            found = planned.run_file(path, kit.feeds, optimization)["y"]
            worst = np.abs(found - wanted).max() / np.ptp(wanted)
            assert (worst < 1e-5) == (level == 4), (level, optimization, worst)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("summed", [16, 32, 45])
def test_packed_blocks_unpack_to_the_values(axis: int, summed: int) -> None:
    shape = (summed, 6) if axis == 0 else (6, summed)
    made = round_blocks(np.random.default_rng(0).normal(size=shape).astype(np.float32), axis, 32, 4)
    assert made.scale.shape == (6, -(-summed // 32))
    packed = made.packed()
    assert packed.shape == (6, made.scale.shape[1], 16)
    low_first = np.stack([packed & 15, packed >> 4], axis=-1).reshape(6, -1)[:, :summed].astype(np.int8) - 8
    np.testing.assert_array_equal(low_first if axis == 1 else low_first.T, made.values)
    assert np.abs(made.values).max() == 7


def test_layers_that_read_the_same_value_dynamically_share_its_rounding(tmp_path: Path) -> None:
    kit = kit_named("tokens")
    place_of = place(kit.graph, kit.structure, full_plan(kit.options, "dynamic8"), kit.parts().schemes)
    assert not place_of.outputs and {read.form for found in place_of.reads.values() for read in found} == {"dynamic"}
    model = onnx.load(planned.save_plan(tmp_path, kit, full_plan(kit.options, "dynamic8")))
    read = [node.input[0] for node in model.graph.node if node.op_type == "DynamicQuantizeLinear"]
    assert len(read) == len(set(read))


def test_a_bias_that_stays_float_is_corrected_too(tmp_path: Path) -> None:
    kit = kit_named("convolutions")
    layer = kit.structure.layer("stem")
    shift = np.linspace(-0.1, 0.1, 8, dtype=np.float32)
    parts = kit.parts().with_corrections(Corrections({"w8": {"stem": shift}}))
    plan = Plan({"stem": "w8"})
    model = write_plan(parts, plan)
    node = next(node for node in model.graph.node if node.name == "stem")
    written = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}[node.input[2]]
    np.testing.assert_array_equal(written, constants(kit.graph, layer)[1] - shift)
    path = tmp_path / "corrected.onnx"
    onnx.save(model, path)
    simulated = Simulation(kit.executor, parts, plan).run(kit.feeds)
    wanted = {out.name: simulated[out.name].numpy() for out in kit.graph.outputs}
    assert gap(planned.run_file(path, kit.feeds), wanted) < 1e-3


@pytest.mark.parametrize("seed", range(4))
def test_predicted_bytes_are_those_of_the_file(seed: int) -> None:
    kit = kit_named("demo")
    predicted, found = planned.bytes_changed(kit, kit.random_plan(seed, among=names()))
    assert predicted == pytest.approx(found, rel=0.05)
