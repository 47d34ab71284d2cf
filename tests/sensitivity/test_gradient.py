"""Every rule gives what small changes of its input do to its output; what has none is refused by name."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.units import find_structure
from quantsieve.sensitivity._rules import RULES
from quantsieve.sensitivity.gradient import Backward, Forward, NoGradient

node = helper.make_node
STEP = 5e-3
IMAGE, ROWS = (2, 4, 6, 6), (2, 3, 8)


def weights(*shape, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)


def ints(*values):
    return np.asarray(values, np.int64)


def one(op_type, *constants, shape=ROWS, opset=18, **attributes):
    """Case of one node that reads x, then constants (None: left out)."""
    names = ["" if constant is None else f"c{i}" for i, constant in enumerate(constants)]
    held = {name: np.asarray(constant) for name, constant in zip(names, constants, strict=True) if name}
    return [node(op_type, ["x", *names], ["y"], op_type, **attributes)], held, shape, opset


def two(op_type, *constants, **attributes):
    """Case of two operands that both depend on x; the second is of one row, which is broadcast."""
    nodes = [
        node("Sigmoid", ["x"], ["s"], "soft"),
        node("ReduceMean", ["s", "axes"], ["r"], "mean", keepdims=1),
        node(op_type, ["x", "r"], ["y"], op_type, **attributes),
    ]
    return nodes, {"axes": ints(1)}, ROWS, 18


def products(op_type, shapes, **attributes):
    """Case of a product of two values that both depend on x."""
    nodes = [
        node("Reshape", ["x", "left_shape"], ["left"], "left"),
        node("Tanh", ["x"], ["t"], "tanh"),
        node("Reshape", ["t", "right_shape"], ["right"], "right"),
        node(op_type, ["left", "right"], ["y"], op_type, **attributes),
    ]
    return nodes, {"left_shape": ints(*shapes[0]), "right_shape": ints(*shapes[1])}, (2, 3, 4), 18


def split():
    nodes = [node("Split", ["x", "parts"], ["a", "b"], "split", axis=2), node("Mul", ["b", "b"], ["y"], "square")]
    return nodes, {"parts": ints(3, 5)}, ROWS, 18


def concat():
    nodes = [node("Tanh", ["x"], ["t"], "tanh"), node("Concat", ["t", "c", "x"], ["y"], "concat", axis=1)]
    return nodes, {"c": weights(2, 5, 8)}, ROWS, 18


def where():
    nodes = [node("Tanh", ["x"], ["t"], "tanh"), node("Where", ["mask", "t", "x"], ["y"], "where")]
    return nodes, {"mask": weights(2, 3, 8) > 0}, ROWS, 18


def several_readers():
    """x is read by three nodes, and one value by nobody that counts."""
    nodes = [
        node("Tanh", ["x"], ["t"], "tanh"),
        node("Mul", ["x", "t"], ["m"], "mul"),
        node("Shape", ["t"], ["s"], "shape"),
        node("Reshape", ["m", "s"], ["k"], "shaped"),
        node("Sum", ["k", "x", "t"], ["y"], "sum"),
    ]
    return nodes, {}, ROWS, 18


def beside(op_type):
    """Of a step, which has no slope, beside a way that has one; the numbers keep apart from where steps are."""
    nodes = [
        node("Add", ["x", "c"], ["z"], "shift"),
        node(op_type, ["z"], ["s"], op_type),
        node("Mul", ["s", "x"], ["y"], "product"),
    ]
    return nodes, {"c": np.float32(0.01)}, ROWS, 18


def positive(case):
    """The same on exp(x), for operators that are defined above 0 only."""
    nodes, held, shape, opset = case
    nodes[0].input[0] = "e"
    return [node("Exp", ["x"], ["e"], "exp"), *nodes], held, shape, opset


KERNEL = weights(6, 4, 3, 3)
CASES = {
    **{name: one(name) for name in ("Relu", "Sigmoid", "Tanh", "Erf", "Exp", "Softplus", "Abs", "Neg", "Identity")},
    **{name: one(name) for name in ("Elu", "HardSwish", "Softmax", "LogSoftmax", "Dropout")},
    **{name: positive(one(name)) for name in ("Log", "Sqrt", "Reciprocal")},
    **{name: two(name) for name in ("Add", "Sub", "Mul", "Div", "Sum")},
    "LeakyRelu": one("LeakyRelu", alpha=0.3), "Elu, alpha": one("Elu", alpha=0.5),
    "PRelu": one("PRelu", np.abs(weights(3, 1))), "HardSigmoid": one("HardSigmoid", alpha=0.3),
    "Clip": one("Clip", np.float32(-0.52), np.float32(0.8)), "Clip, above": one("Clip", None, np.float32(0.52)),
    "Clip, attributes": one("Clip", opset=10, min=-0.52, max=0.8),
    "Gelu": one("Gelu", opset=20), "Pow": one("Pow", np.float32(2)), "Pow, half": positive(one("Pow", np.float32(0.5))),
    "Cast": one("Cast", to=TensorProto.FLOAT), "Where": where(), "Concat": concat(), "Split": split(),
    **{name: beside(name) for name in ("Floor", "Ceil", "Round", "Sign")},
    "Conv": one("Conv", KERNEL, weights(6), shape=IMAGE, pads=[1, 1, 1, 1]),
    "Conv, strides": one("Conv", KERNEL, shape=IMAGE, strides=[2, 2], pads=[0, 1, 1, 0]),
    "Conv, dilated groups": one("Conv", weights(8, 2, 3, 3), shape=IMAGE, group=2, dilations=[2, 1], pads=[2, 0, 1, 1]),
    "Conv, depthwise": one("Conv", weights(4, 1, 3, 3), shape=IMAGE, group=4, strides=[2, 1], auto_pad="SAME_UPPER"),
    "Conv, same lower": one("Conv", weights(6, 4, 2, 2), shape=IMAGE, auto_pad="SAME_LOWER"),
    "Conv, wide pads": one("Conv", weights(6, 4, 1, 1), shape=IMAGE, pads=[1, 1, 1, 1]),
    "ConvTranspose": one("ConvTranspose", weights(4, 3, 3, 3), shape=IMAGE, strides=[2, 2], output_padding=[1, 1]),
    "ConvTranspose, groups": one("ConvTranspose", weights(4, 2, 2, 2), shape=IMAGE, group=2, pads=[1, 0, 0, 1]),
    "AveragePool": one("AveragePool", shape=IMAGE, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]),
    "AveragePool, pads count": one("AveragePool", shape=IMAGE, kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1),
    "AveragePool, ceil": one("AveragePool", shape=IMAGE, kernel_shape=[3, 3], strides=[2, 4], ceil_mode=1),
    "AveragePool, kernel beyond": one("AveragePool", shape=(2, 4, 1, 6), kernel_shape=[3, 2], strides=[3, 2]),
    "GlobalAveragePool": one("GlobalAveragePool", shape=IMAGE),
    "MaxPool": one("MaxPool", shape=IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    "Resize": one("Resize", None, np.asarray([1, 1, 2, 3], np.float32), shape=IMAGE, mode="nearest",
                  coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    "Gemm": one("Gemm", weights(8, 5), weights(5), shape=(2, 8), alpha=0.5, beta=2.0),
    "Gemm, turned": one("Gemm", weights(5, 2), shape=(2, 8), transA=1, transB=1),
    **{f"Gemm, both {a}{b}": products("Gemm", ((6, 4) if not a else (4, 6), (4, 6) if not b else (6, 4)),
                                      transA=a, transB=b) for a in (0, 1) for b in (0, 1)},
    "Gemm, bias": ([node("Gemm", ["c", "k", "x"], ["y"], "gemm", beta=0.5)],
                   {"c": weights(3, 4), "k": weights(4, 8)}, (1, 8), 18),
    "MatMul": one("MatMul", weights(8, 5)), "MatMul, both": products("MatMul", ((2, 3, 4), (2, 4, 3))),
    "MatMul, broadcast": products("MatMul", ((2, 3, 4), (4, 6))),
    "ReduceMean": one("ReduceMean", ints(1, -1)), "ReduceMean, attribute": one("ReduceMean", opset=13, axes=[1]),
    "ReduceSum": one("ReduceSum", ints(0), keepdims=0), "ReduceSum, all": one("ReduceSum"),
    "Softmax, axis": one("Softmax", axis=1),
    "LayerNormalization": one("LayerNormalization", weights(8) + 1, weights(8)),
    "LayerNormalization, two axes": one("LayerNormalization", weights(3, 8) + 1, axis=1),
    "BatchNormalization": one("BatchNormalization", weights(4) + 1, weights(4), weights(4), np.abs(weights(4)) + 1,
                              shape=IMAGE),
    "Reshape": one("Reshape", ints(4, -1)), "Flatten": one("Flatten"), "Unsqueeze": one("Unsqueeze", ints(1)),
    "Squeeze": one("Squeeze", ints(1), shape=(2, 1, 8)), "Transpose": one("Transpose", perm=[1, 2, 0]),
    "Transpose, default": one("Transpose"), "Expand": one("Expand", ints(4, 2, 3, 8), shape=(2, 1, 8)),
    "Pad": one("Pad", ints(0, 1, 0, 0, 0, 2)), "Gather": one("Gather", ints(2, 0, 2), axis=1),
    "Slice": one("Slice", ints(1, 7), ints(3, 0), ints(1, 2), ints(1, -2)), "several readers": several_readers(),
}  # fmt: skip


def executor_of(nodes, held, shape, opset):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    inferred = Graph(ir.from_proto(onnx.shape_inference.infer_shapes(model)))
    return Executor(inferred, find_structure(inferred))


def apart(shape):
    """Numbers at least 0.04 from each other, from 0 and from the limits of the cases: no kink within a step."""
    count = int(np.prod(shape))
    numbers = (np.arange(count) - count / 2 + 0.5) * 0.04
    return np.random.default_rng(1).permutation(numbers).reshape(shape).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_gives_what_a_small_change_of_the_input_does(name):
    executor = executor_of(*CASES[name])
    x = apart(CASES[name][2])
    draw = np.random.default_rng(2)
    change = draw.uniform(-1, 1, x.shape).astype(np.float32)
    forward = Forward(executor)
    values = forward.run({"x": x})
    seed = draw.standard_normal(values["y"].shape).astype(np.float32)
    found = Backward(executor, values, ["x"], ["y"]).run(values, {"y": seed}).get("x", np.zeros_like(x))
    assert found.shape == x.shape
    up, down = (forward.run({"x": x + sign * np.float32(STEP) * change})["y"] for sign in (1, -1))
    slope = (up.astype(np.float64) - down) / (2 * STEP)
    # Float32 outputs of size 1 leave 1e-5 of the slope; the third derivative a share of STEP**2.
    size = np.linalg.norm(slope) * np.linalg.norm(seed) + 1e-6
    assert abs((found.astype(np.float64) * change).sum() - (slope * seed).sum()) <= 2e-3 * size


def test_every_rule_has_a_case():
    assert set(RULES) <= {n.op_type for nodes, *_ in CASES.values() for n in nodes}


def test_cotangents_of_values_inside_are_those_of_the_rest_of_the_graph():
    nodes = [node("Tanh", ["x"], ["t"], "tanh"), node("MatMul", ["t", "w"], ["y"], "product")]
    executor = executor_of(nodes, {"w": weights(8, 5)}, ROWS, 18)
    values = Forward(executor).run({"x": apart(ROWS)})
    seed = np.ones_like(values["y"])
    found = Backward(executor, values, ["x", "t", "y"], ["y"]).run(values, {"y": seed})
    np.testing.assert_allclose(found["t"], seed @ weights(8, 5).T, rtol=1e-5)
    np.testing.assert_allclose(found["x"], found["t"] * (1 - np.tanh(apart(ROWS)) ** 2), rtol=1e-4)
    np.testing.assert_array_equal(found["y"], seed)


def test_an_operator_without_a_rule_is_refused_by_name():
    executor = executor_of([node("CumSum", ["x", "axis"], ["y"], "sum")], {"axis": np.asarray(1)}, ROWS, 18)
    values = Forward(executor).run({"x": apart(ROWS)})
    with pytest.raises(NoGradient, match="CumSum"):
        Backward(executor, values, ["x"], ["y"])


def test_a_model_of_steps_alone_is_refused():
    executor = executor_of([node("Round", ["x"], ["y"], "round")], {}, ROWS, 18)
    values = Forward(executor).run({"x": apart(ROWS)})
    with pytest.raises(NoGradient, match="no value"):
        Backward(executor, values, ["x"], ["y"])


def test_an_operator_without_a_rule_off_the_way_is_not_asked():
    nodes = [node("CumSum", ["c", "axis"], ["s"], "sum"), node("Mul", ["x", "s"], ["y"], "product")]
    executor = executor_of(nodes, {"axis": np.asarray(1), "c": weights(1, 3, 8)}, ROWS, 18)
    values = Forward(executor).run({"x": apart(ROWS)})
    seed = np.ones_like(values["y"])
    found = Backward(executor, values, ["x"], ["y"]).run(values, {"y": seed})["x"]
    np.testing.assert_allclose(found, np.broadcast_to(np.cumsum(weights(1, 3, 8), axis=1), ROWS), rtol=1e-5)
