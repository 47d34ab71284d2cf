"""QOperator files: integer operators in place of Q/DQ pairs, with the numbers of the simulation."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

import planned
from planned import Kit, gap
from quantsieve.operators import as_operators
from quantsieve.plan import Plan, full_plan
from quantsieve.schemes import names
from quantsieve.schemes._formats import Formats
from quantsieve.simulate import Simulation
from quantsieve.targets.audit import audit_layers
from quantsieve.targets.ort import OrtCpu
from quantsieve.writing import write_plan

FORMATS = {
    "u8": Formats(),
    "s8": Formats(activation_type="s8"),
    "s8-symmetric": Formats(activation_type="s8", symmetric_activations=True),
    "u8-symmetric": Formats(symmetric_activations=True),
    "asymmetric": Formats(asymmetric_weights=True),
}
every_format = pytest.mark.parametrize("formats", FORMATS)


@cache
def kit_in(name: str, formats: str) -> Kit:
    return planned.KITS[name]().under(FORMATS[formats])


@cache
def exact_type() -> str:
    return planned.exact_weight_type()


def save(folder: Path, kit: Kit, plan: Plan) -> Path:
    path = folder / "operators.onnx"
    onnx.save(as_operators(write_plan(kit.parts(exact_type()), plan)), path)
    return path


def kinds(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("name", planned.KITS)
@every_format
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_does_what_is_simulated_at_every_level(tmp_path: Path, name: str, formats: str, seed: int) -> None:
    kit = kit_in(name, formats)
    plan = kit.random_plan(seed, among=names()) if seed else full_plan(kit.options, "int8-channel")
    path = save(tmp_path, kit, plan)
    onnx.checker.check_model(path)
    simulated = Simulation(kit.executor, kit.parts(), plan).run(kit.feeds)
    wanted = {out.name: simulated[out.name].numpy().copy() for out in kit.graph.outputs}
    for level in planned.LEVELS:
        # Integer kernels round a sum or a mean of integers by up to a step otherwise, which layers behind pass on.
        assert gap(planned.run_file(path, kit.feeds, level), wanted) <= 2, level


@pytest.mark.parametrize("name", planned.KITS)
@every_format
def test_every_layer_is_an_integer_operator_at_every_level(tmp_path: Path, name: str, formats: str) -> None:
    """Signed activations around branches too, which Q/DQ pairs leave float on x86-64."""
    kit = kit_in(name, formats)
    path = save(tmp_path, kit, kit.plan())
    layers = {x.name: x.nodes[:1] for x in kit.structure.quantizable}
    for level in ("off", "all"):
        assert set(audit_layers(OrtCpu(optimization=level).audit(path), layers).values()) == {"int8"}


def test_operators_are_those_that_onnxruntime_has(tmp_path: Path) -> None:
    kit = kit_in("convolutions", "u8")
    assert kinds(save(tmp_path, kit, kit.plan())) == {
        "QuantizeLinear", "QLinearConv", "QLinearAdd", "MaxPool", "QLinearConcat", "QLinearGlobalAveragePool",
        "Flatten", "QGemm", "DequantizeLinear",
    }  # fmt: skip
    kit = kit_in("tokens", "u8")
    assert {"MatMulIntegerToFloat", "QLinearSigmoid"} <= kinds(save(tmp_path, kit, kit.plan()))
    kit = planned.two_products()
    path = save(tmp_path, kit, kit.plan())
    assert kinds(path) == {"QuantizeLinear", "QLinearMatMul", "MatMulIntegerToFloat"}
    simulated = Simulation(kit.executor, kit.parts(), kit.plan()).run(kit.feeds)["y"].numpy().copy()
    assert gap(planned.run_file(path, kit.feeds, "off"), {"y": simulated}) <= 1


def test_a_float_plan_and_16_bit_pairs_and_weights_alone_stay_as_they_are(tmp_path: Path) -> None:
    kit = kit_in("convolutions", "u8")
    for plan in (Plan({}), full_plan(kit.options, "a16w8"), full_plan(kit.options, "w8")):
        model = write_plan(kit.parts(), plan)
        assert as_operators(model).SerializeToString() == model.SerializeToString()


def test_layers_that_the_plan_leaves_float_stay_float_operators() -> None:
    """A Concat between pairs, as a float layer has them among quantized ones."""
    kit = kit_in("convolutions", "u8")
    plan = kit.plan(*(name for name in kit.options.schemes if name != "join"))
    model = write_plan(kit.parts(), plan)
    for floats, kind in (((), "QLinearConcat"), (("join",), "Concat")):
        nodes = {node.name: node.op_type for node in as_operators(model, floats).graph.node}
        assert nodes["join"] == kind


@every_format
@pytest.mark.parametrize("seed", range(4))
def test_predicted_bytes_are_those_of_the_file(formats: str, seed: int) -> None:
    kit = planned.demo(16).under(FORMATS[formats])
    plan = kit.random_plan(seed) if seed else full_plan(kit.options, "int8-channel")
    predicted, found = planned.bytes_changed(kit, plan, is_operators=True)
    assert predicted == pytest.approx(found, rel=0.02)


def test_the_model_that_it_is_made_of_is_not_touched() -> None:
    kit = kit_in("convolutions", "u8")
    model = write_plan(kit.parts(), kit.plan())
    before = model.SerializeToString()
    as_operators(model)
    assert model.SerializeToString() == before


SHAPE = [1, 1, 1, 50]


def pairs_around(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], into: str) -> onnx.ModelProto:
    """x, a pair of scale `s` and zero point `z`, the nodes from 'd' to 'r', a pair of `s` and the zero point `into`."""
    node, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    whole = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
        node("DequantizeLinear", ["q", "s", "z"], ["d"], "d"),
        *nodes,
        node("QuantizeLinear", ["r", "s", into], ["rq"], "rq"),
        node("DequantizeLinear", ["rq", "s", into], ["y"], "y"),
    ]
    tensors = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = onnx.helper.make_graph(whole, "pairs", [value("x", 1, SHAPE)], [value("y", 1, SHAPE)], tensors)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)


def both_forms(folder: Path, model: onnx.ModelProto) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of the model and of its integer operators."""
    found = []
    for name, made in (("pairs", model), ("operators", as_operators(model))):
        onnx.save(made, folder / f"{name}.onnx")
        feeds = {"x": np.linspace(-1, 5, 50, dtype=np.float32).reshape(SHAPE)}
        found.append(planned.run_file(folder / f"{name}.onnx", feeds, "off")["y"])
    return found[0], found[1]


@pytest.mark.parametrize(
    ("limit", "zero", "is_absorbed"), [(6.0, 0, False), (25.5, 0, True), (100.0, 0, True), (100.0, 20, False)]
)
def test_a_clip_goes_only_where_saturation_does_its_work(
    tmp_path: Path, limit: float, zero: int, is_absorbed: bool
) -> None:
    """The pair behind it reaches from -0.1 * zero to 0.1 * (255 - zero)."""
    constants = {
        "s": np.float32(0.1), "z": np.uint8(20), "w": np.full((1, 1, 1, 1), 100, np.int8), "wz": np.int8(0),
        "low": np.float32(0), "high": np.float32(limit), "rz": np.uint8(zero),
    }  # fmt: skip
    node = onnx.helper.make_node
    nodes = [
        node("DequantizeLinear", ["w", "s", "wz"], ["wd"], "wd"),
        node("Conv", ["d", "wd"], ["c"], "conv"),
        node("Clip", ["c", "low", "high"], ["r"], "clip"),
    ]
    wanted, found = both_forms(tmp_path, pairs_around(nodes, constants, "rz"))
    assert ("Clip" not in kinds(tmp_path / "operators.onnx")) == is_absorbed
    assert wanted.min() == 0
    assert wanted.max() == pytest.approx(min(limit, 0.1 * (255 - zero)))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("into", "is_integer"), [("z", True), ("signed", False), ("other", False)])
def test_a_layout_operator_works_on_integers_only_between_equal_pairs(
    tmp_path: Path, into: str, is_integer: bool
) -> None:
    constants = {"s": np.float32(0.1), "z": np.uint8(20), "signed": np.int8(20), "other": np.uint8(21)}
    nodes = [onnx.helper.make_node("Transpose", ["d"], ["r"], "turn", perm=[0, 1, 2, 3])]
    wanted, found = both_forms(tmp_path, pairs_around(nodes, constants, into))
    assert (len(onnx.load(tmp_path / "operators.onnx").graph.node) == 3) == is_integer
    np.testing.assert_array_equal(found, wanted)
