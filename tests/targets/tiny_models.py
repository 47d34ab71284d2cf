"""Tiny ONNX models for the tests of the targets: good, quantized, and failing in every way."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

CHANNELS = 8
IMAGE = (1, 3, 8, 8)


def save(
    path: Path,
    nodes: Sequence[NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: dict[str, np.ndarray | np.generic] | None = None,
    opset: int = 17,
) -> Path:
    """`path`, where a model of these nodes now lies."""
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "tiny", list(inputs), list(outputs), tensors)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("nobody.knows", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10 if opset > 20 else 8), path)
    return path


def value(name: str, shape: Sequence[int | str] | None, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def pair(tensor: str, scale: str = "scale", zero: str = "u8_zero") -> list[NodeProto]:
    """QuantizeLinear and DequantizeLinear on `tensor`, giving `tensor_q` and `tensor_d`."""
    return [
        helper.make_node("QuantizeLinear", [tensor, scale, zero], [f"{tensor}_q"], f"q_{tensor}"),
        helper.make_node("DequantizeLinear", [f"{tensor}_q", scale, zero], [f"{tensor}_d"], f"dq_{tensor}"),
    ]


def weight(name: str) -> NodeProto:
    return helper.make_node("DequantizeLinear", [f"{name}_q", "w_scale", "s8_zero"], [name], f"dq_{name}")


def conv(inputs: list[str], output: str, name: str) -> NodeProto:
    return helper.make_node("Conv", inputs, [output], name, pads=[1, 1, 1, 1])


def constants() -> dict[str, np.ndarray | np.generic]:
    """Scales, zero points and weights that the quantized models share."""
    draw = np.random.default_rng(0)
    return {
        "scale": np.float32(0.05),
        "u8_zero": np.uint8(0),
        "u8_middle": np.uint8(128),
        "w_scale": np.float32(0.01),
        "s8_zero": np.int8(0),
        "w1_q": draw.integers(-127, 127, (CHANNELS, 3, 3, 3)).astype(np.int8),
        "w2": draw.normal(size=(CHANNELS, CHANNELS, 3, 3)).astype(np.float32),
        "w3_q": draw.integers(-127, 127, (CHANNELS, CHANNELS, 3, 3)).astype(np.int8),
        "w4_q": draw.integers(-127, 127, (CHANNELS, 10)).astype(np.int8),
    }


def remove_names(nodes: Sequence[NodeProto]) -> None:
    for node in nodes:
        node.ClearField("name")


def scaled(path: Path, factor: float = 2.0) -> Path:
    """y = factor * x, both (2,)."""
    node = helper.make_node("Mul", ["x", "factor"], ["y"], "mul")
    return save(path, [node], [value("x", [2])], [value("y", [2])], {"factor": np.float32(factor)})


def float_layer_between_integers(
    path: Path, guard: str | None, name_nodes: bool = True, float_name: str = "conv2"
) -> Path:
    """conv1 int8, conv2 with float weights and a Relu between DQ and Q, conv3 int8.

    Unguarded, onnxruntime quantizes conv2 at load; `guard` puts that one-input op behind its Relu.
    """
    nodes = [
        *pair("x"),
        weight("w1"),
        conv(["x_d", "w1"], "c1", "conv1"),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        *pair("r1"),
        conv(["r1_d", "w2"], "c2", float_name),
        helper.make_node("Relu", ["c2"], ["r2"], "relu2"),
    ]
    last = "r2"
    if guard is not None:
        nodes.append(helper.make_node(guard, ["r2"], ["g2"], "guard2"))
        last = "g2"
    nodes += [*pair(last), weight("w3"), conv([f"{last}_d", "w3"], "c3", "conv3"), *pair("c3")]
    if not name_nodes:
        remove_names(nodes)
    shape = [1, CHANNELS, 8, 8]
    return save(path, nodes, [value("x", IMAGE)], [value("c3_d", shape)], constants())


def quantized_network(path: Path, high: float = 20) -> Path:
    """Conv + Clip, Conv, Add, GlobalAveragePool, Flatten, Gemm: all between Q and DQ; then a float Tanh."""
    nodes = [
        *pair("x"),
        weight("w1"),
        conv(["x_d", "w1"], "c1", "conv1"),
        helper.make_node("Clip", ["c1", "low", "high"], ["r1"], "clip1"),
        *pair("r1"),
        weight("w3"),
        conv(["r1_d", "w3"], "c2", "conv2"),
        *pair("c2", zero="u8_middle"),
        helper.make_node("Add", ["r1_d", "c2_d"], ["a"], "add"),
        *pair("a", zero="u8_middle"),
        helper.make_node("GlobalAveragePool", ["a_d"], ["p"], "pool"),
        *pair("p", zero="u8_middle"),
        helper.make_node("Flatten", ["p_d"], ["f"], "flatten"),
        *pair("f", zero="u8_middle"),
        weight("w4"),
        helper.make_node("Gemm", ["f_d", "w4"], ["z"], "gemm"),
        *pair("z", zero="u8_middle"),
        helper.make_node("Tanh", ["z_d"], ["y"], "tanh"),
    ]
    # The Clip ends above the 12.75 that the Q can hold: only then onnxruntime drops it and fuses the Conv.
    limits = {"low": np.float32(0), "high": np.float32(high)}
    return save(path, nodes, [value("x", IMAGE)], [value("y", [1, 10])], constants() | limits)


def float_network(path: Path, name_nodes: bool = True) -> Path:
    """Conv + Relu, Conv + Add + Relu in 16 channels (which onnxruntime runs in NCHWc), pool, Gemm."""
    nodes = [
        conv(["x", "w1"], "c1", "conv1"),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        conv(["r1", "w2"], "c2", "conv2"),
        helper.make_node("Add", ["r1", "c2"], ["a"], "add"),
        helper.make_node("Relu", ["a"], ["r2"], "relu2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "w3"], ["y"], "gemm"),
    ]
    if not name_nodes:
        remove_names(nodes)
    draw = np.random.default_rng(0)
    shapes = {"w1": (16, 3, 3, 3), "w2": (16, 16, 3, 3), "w3": (16, 10)}
    weights = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return save(path, nodes, [value("x", IMAGE)], [value("y", [1, 10])], weights)


def not_onnx(path: Path) -> Path:
    path.write_bytes(b"this is no protobuf of a model")
    return path


def unknown_op(path: Path) -> Path:
    node = helper.make_node("Frobnicate", ["x"], ["y"], "frobnicate", domain="nobody.knows")
    return save(path, [node], [value("x", [2])], [value("y", [2])])


def double_conv(path: Path) -> Path:
    """A float64 Conv, for which onnxruntime has no kernel."""
    double = TensorProto.DOUBLE
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv")
    shape = [1, 1, 4, 4]
    return save(path, [node], [value("x", shape, double)], [value("y", shape, double)], {"w": np.ones((1, 1, 1, 1))})


def gather(path: Path) -> Path:
    """y = table[index]; the table has 3 rows, so index 7 is an error at run time."""
    node = helper.make_node("Gather", ["table", "index"], ["y"], "gather")
    table = np.arange(3, dtype=np.float32)
    int64 = TensorProto.INT64
    return save(path, [node], [value("index", [1], int64)], [value("y", [1])], {"table": table})


def endless(path: Path) -> Path:
    """A Loop without a trip count whose condition stays true."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"], "go"),
            helper.make_node("Identity", ["state"], ["next"], "step"),
        ],
        "body",
        [
            value("i", [], TensorProto.INT64),
            value("go", [], TensorProto.BOOL),
            value("state", [2]),
        ],
        [value("go_on", [], TensorProto.BOOL), value("next", [2])],
    )
    node = helper.make_node("Loop", ["", "yes", "x"], ["y"], "loop", body=body)
    return save(path, [node], [value("x", [2])], [value("y", [2])], {"yes": np.bool_(True)})


def huge(path: Path) -> Path:
    """y = as many zeros as the input says."""
    node = helper.make_node("ConstantOfShape", ["n"], ["y"], "fill")
    return save(path, [node], [value("n", [1], TensorProto.INT64)], [value("y", ["n"])])


def strings(path: Path) -> Path:
    """Two outputs of other types than float: the words as they came, and the index of the largest number."""
    nodes = [
        helper.make_node("Identity", ["words"], ["same_words"], "same"),
        helper.make_node("ArgMax", ["x"], ["best"], "best", axis=0, keepdims=0),
    ]
    inputs = [value("words", [2], TensorProto.STRING), value("x", [2])]
    outputs = [value("same_words", [2], TensorProto.STRING), value("best", [], TensorProto.INT64)]
    return save(path, nodes, inputs, outputs)


def external_weights(path: Path) -> Path:
    """y = x + w, where w lies in a file of its own beside the model."""
    node = helper.make_node("Add", ["x", "w"], ["y"], "add")
    save(path, [node], [value("x", [4096])], [value("y", [4096])], {"w": np.ones(4096, np.float32)})
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location=path.stem + ".weights", size_threshold=0)
    return path
