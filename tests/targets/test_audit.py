"""What ran as integers and what as floats, found in the graph that onnxruntime really made."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny_models
from onnx import helper
from tiny_models import constants, pair, save, value, weight

from quantsieve.targets.audit import audit_graph, audit_layers
from quantsieve.targets.base import Audit
from quantsieve.targets.ort import OrtCpu

LEVELS = ("extended", "all")


def audit(path: Path, level: str = "all") -> Audit:
    return OrtCpu(optimization=level).audit(path)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name_nodes", [True, False])
@pytest.mark.parametrize(("guard", "expected"), [(None, "int8"), ("Sum", "float"), ("Max", "float")])
def test_a_float_layer_that_onnxruntime_quantizes_at_load_is_seen(
    tmp_path: Path, guard: str | None, expected: str, name_nodes: bool, level: str
) -> None:
    path = tiny_models.float_layer_between_integers(tmp_path / "m.onnx", guard, name_nodes)
    found = audit(path, level)
    layers = {"one": ["conv1", "relu1"], "two": ["conv2", "relu2"], "three": ["conv3"]}
    if not name_nodes:
        layers = {"one": ["c1", "r1"], "two": ["c2", "r2"], "three": ["c3"]}
    assert audit_layers(found, layers) == {"one": "int8", "two": expected, "three": "int8"}
    assert "gone" not in [found.precision(nodes[:1]) for nodes in layers.values()]


@pytest.mark.parametrize("guard", [None, "Sum"])
def test_what_the_audit_says_of_the_float_layer_shows_in_the_outputs(tmp_path: Path, guard: str | None) -> None:
    # The differential test behind the one above: quantized weights move the output, guarded ones do not.
    path = tiny_models.float_layer_between_integers(tmp_path / "m.onnx", guard)
    x = {"x": np.random.default_rng(1).uniform(0, 12, tiny_models.IMAGE).astype(np.float32)}
    exact = OrtCpu(optimization="off").load(path)(x)["c3_d"]
    moved = float(np.mean(OrtCpu().load(path)(x)["c3_d"] != exact))
    if guard is None:
        assert moved > 0.05
    else:
        assert moved < 0.01  # rounding of ties may move single elements


def test_names_are_found_again_in_the_renamed_graph_of_the_layout_passes(tmp_path: Path) -> None:
    path = tiny_models.float_layer_between_integers(tmp_path / "m.onnx", "Sum")
    ran = OrtCpu()._optimized(path, "all")
    operators = {f"{node.domain}:{node.op_type}" for node in ran.node}
    assert {"com.microsoft.nchwc:Conv", "com.microsoft:QLinearConv"} <= operators
    found = dict(audit_graph(onnx.load(path).graph, ran).ran)
    assert (found["conv1"], found["conv2"], found["conv3"]) == ("int8", "float", "int8")


def test_a_layer_named_like_a_node_that_onnxruntime_inserts_is_not_taken_for_it(tmp_path: Path) -> None:
    path = tiny_models.float_layer_between_integers(tmp_path / "m.onnx", "Sum", float_name="Transpose")
    inserted = [node.op_type for node in OrtCpu()._optimized(path, "all").node if "Transpose" in node.name]
    assert "Transpose" in inserted
    assert dict(audit(path).ran)["Transpose"] == "float"


@pytest.mark.parametrize("level", LEVELS)
def test_every_layer_of_a_quantized_network_runs_as_integers(tmp_path: Path, level: str) -> None:
    found = dict(audit(tiny_models.quantized_network(tmp_path / "m.onnx"), level).ran)
    layers = ("conv1", "conv2", "add", "pool", "flatten", "gemm")
    assert {name: found[name] for name in layers} == dict.fromkeys(layers, "int8")
    assert found["tanh"] == "float"
    assert found["clip1"] in ("int8", "gone")


@pytest.mark.parametrize("level", ["off", "basic"])
def test_nothing_runs_as_integers_below_the_extended_level(tmp_path: Path, level: str) -> None:
    path = tiny_models.quantized_network(tmp_path / "m.onnx")
    assert {precision for _, precision in audit(path, level).ran} == {"float"}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name_nodes", [True, False])
def test_a_float_network_runs_in_float_whatever_it_is_fused_into(tmp_path: Path, name_nodes: bool, level: str) -> None:
    found = dict(audit(tiny_models.float_network(tmp_path / "m.onnx", name_nodes), level).ran)
    heavy = ("conv1", "conv2", "gemm") if name_nodes else ("c1", "c2", "y")
    assert {name: found[name] for name in heavy} == dict.fromkeys(heavy, "float")
    assert set(found.values()) <= {"float", "gone"}


def test_boundaries_and_operators_are_counted(tmp_path: Path) -> None:
    found = audit(tiny_models.quantized_network(tmp_path / "m.onnx"), "extended")
    counts = dict(found.op_counts)
    assert counts["QLinearConv"] == 2
    assert counts["com.microsoft:QGemm"] == 1
    assert found.boundaries == 2 == counts["QuantizeLinear"] + counts["DequantizeLinear"]


def quantized_op(path: Path, op: str, inputs: Sequence[str], nodes: Sequence[onnx.NodeProto]) -> Path:
    """x -> Q/DQ -> `op` -> Q/DQ, with what else `op` reads made by `nodes`."""
    every = [*pair("x"), *nodes, helper.make_node(op, list(inputs), ["o"], "op"), *pair("o")]
    return save(path, every, [value("x", [8, 8])], [value("o_d", None)], matrix_constants())


def matrix_constants() -> dict[str, np.ndarray | np.generic]:
    matrix = np.random.default_rng(0).integers(-127, 127, (8, 8)).astype(np.int8)
    return constants() | {
        "m_q": matrix,
        "shape": np.array([64]),
        "low": np.float32(-1),
        "high": np.float32(1),
    }


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("MatMul", ["x_d", "m"]),
        ("Gemm", ["x_d", "m"]),
        ("Add", ["x_d", "x_d"]),
        ("Mul", ["x_d", "x_d"]),
        ("Sigmoid", ["x_d"]),
        ("Softmax", ["x_d"]),
        ("Reshape", ["x_d", "shape"]),
        ("Transpose", ["x_d"]),
    ],
)
def test_an_op_with_an_integer_kernel_is_seen_as_integer(tmp_path: Path, op: str, inputs: list[str]) -> None:
    path = quantized_op(tmp_path / "m.onnx", op, inputs, [weight("m")] if "m" in inputs else [])
    assert dict(audit(path).ran)["op"] == "int8"


@pytest.mark.parametrize(("op", "inputs"), [("Sub", ["x_d", "x_d"]), ("Tanh", ["x_d"]), ("Div", ["x_d", "x_d"])])
def test_an_op_without_an_integer_kernel_is_seen_as_float(tmp_path: Path, op: str, inputs: list[str]) -> None:
    path = quantized_op(tmp_path / "m.onnx", op, inputs, [])
    found = audit(path)
    assert found.ran == (("op", "float"),)
    # Two Q, the DQ of the output, and a DQ of its own for every input.
    assert found.boundaries == 3 + len(inputs)


@pytest.mark.parametrize(("op", "kernel"), [("MatMul", "MatMulIntegerToFloat"), ("Gemm", "QGemm")])
def test_a_product_without_a_quantized_output_is_an_integer_kernel(tmp_path: Path, op: str, kernel: str) -> None:
    nodes = [
        *pair("x"),
        weight("m"),
        helper.make_node(op, ["x_d", "m"], ["o"], "op"),
        helper.make_node("Tanh", ["o"], ["y"], "tanh"),
    ]
    path = save(tmp_path / "m.onnx", nodes, [value("x", [8, 8])], [value("y", [8, 8])], matrix_constants())
    found = audit(path)
    assert dict(found.op_counts)[f"com.microsoft:{kernel}"] == 1
    assert found.ran == (("op", "int8"), ("tanh", "float"))


def test_a_dynamic_matmul_is_an_integer_kernel(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "dynamic"),
        helper.make_node("MatMulInteger", ["q", "m_q", "z", "s8_zero"], ["i"], "op"),
        helper.make_node("Cast", ["i"], ["f"], "cast", to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "w_scale"], ["both"], "scales"),
        helper.make_node("Mul", ["f", "both"], ["y"], "rescale"),
    ]
    path = save(tmp_path / "m.onnx", nodes, [value("x", [8, 8])], [value("y", [8, 8])], matrix_constants())
    found = dict(audit(path).ran)
    assert found["op"] == "int8"
    assert dict(audit(path, "off").ran) == {
        "op": "int8",
        "cast": "float",
        "scales": "float",
        "rescale": "float",
    }


def test_quantized_weights_under_float_activations_are_told_as_weight_only(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    blocks = {
        "w_q": draw.integers(-127, 127, (64, 8)).astype(np.int8),
        "s": np.full((4, 8), 0.01, np.float32),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["w_q", "s"], ["w"], "dq", axis=0, block_size=16),
        helper.make_node("MatMul", ["x", "w"], ["y"], "op"),
    ]
    path = save(tmp_path / "m.onnx", nodes, [value("x", [4, 64])], [value("y", [4, 8])], blocks, opset=21)
    assert audit(path).ran == (("op", "weight-only"),)


@pytest.mark.parametrize(
    ("op", "shape", "expected"),
    [
        ("Conv", tiny_models.IMAGE, "float"),
        # The DequantizeLinear of a matrix becomes MatMulNBits where no integer kernel takes it.
        ("Gemm", (8, 8), "weight-only"),
        ("MatMul", (8, 8), "weight-only"),
    ],
)
def test_sixteen_bit_activations_reach_no_integer_kernel(
    tmp_path: Path, op: str, shape: tuple[int, ...], expected: str
) -> None:
    zero = {"u16_zero": np.uint16(30000)}
    name = "w1" if op == "Conv" else "m"
    nodes = [
        *pair("x", zero="u16_zero"),
        weight(name),
        helper.make_node(op, ["x_d", name], ["o"], "op"),
        *pair("o", zero="u16_zero"),
    ]
    inputs, outputs = [value("x", shape)], [value("o_d", None)]
    path = save(tmp_path / "m.onnx", nodes, inputs, outputs, matrix_constants() | zero, opset=21)
    assert audit(path).ran == (("op", expected),)


def test_a_clip_inside_the_range_of_its_quantizer_keeps_the_convolution_float(tmp_path: Path) -> None:
    path = tiny_models.quantized_network(tmp_path / "m.onnx", high=6)  # the Q can hold 12.75
    found = dict(audit(path).ran)
    assert (found["conv1"], found["conv2"]) == ("float", "int8")


def test_the_quantized_weights_of_a_float_layer_are_no_boundary(tmp_path: Path) -> None:
    path = tiny_models.quantized_network(tmp_path / "m.onnx", high=6)
    found = audit(path)
    # Q and DQ before the float Conv, Q behind it, DQ at the end; and the DQ of its weights.
    assert found.boundaries == 4
    assert dict(found.op_counts)["DequantizeLinear"] == 3


def test_fused_matmul_and_activation_keep_their_precision(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "block/matmul"),
        helper.make_node("Add", ["m", "b"], ["a"], "block/add"),
        helper.make_node("Relu", ["a"], ["y"], "block/relu"),
        helper.make_node("Identity", ["low"], ["unused"], "folded"),
    ]
    draw = np.random.default_rng(0)
    matrix = draw.normal(size=(8, 8)).astype(np.float32)
    weights = {"w": matrix, "b": np.ones(8, np.float32), "low": np.int8(1)}
    path = save(tmp_path / "m.onnx", nodes, [value("x", [4, 8])], [value("y", [4, 8])], weights)
    found = audit(path)
    assert dict(found.op_counts) == {"com.microsoft:FusedGemm": 1}
    assert dict(found.ran)["block/matmul"] == "float"
    assert dict(found.ran)["folded"] == "gone"


def test_a_layer_is_mixed_only_when_its_remaining_nodes_disagree() -> None:
    found = Audit((("a", "int8"), ("b", "float"), ("c", "gone"), ("d", "int8")), (), 0)
    assert [found.precision(names) for names in ("ad", "ab", "ac", "c")] == ["int8", "mixed", "int8", "gone"]


def test_a_name_that_the_file_lacks_is_an_error() -> None:
    with pytest.raises(KeyError, match="conv9"):
        audit_layers(Audit((("conv1", "int8"),), (), 0), {"layer": ["conv9"]})
