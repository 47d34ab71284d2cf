"""A model with subgraphs: an If and a Loop between layers."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

node = helper.make_node


def value(name: str, shape: Sequence[int | str] | None = None, elem: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def model(tensor: Callable[..., onnx.TensorProto]) -> onnx.ModelProto:
    """An If and a Loop whose bodies read activations and a constant from outside.

    tensor: makes an initializer from its name and shape.
    """
    positive = helper.make_graph([node("Mul", ["m", "w2"], ["then_y"], name="then_op")], "then", [], [value("then_y")])
    negative = helper.make_graph([node("Neg", ["m"], ["else_y"], name="else_op")], "else", [], [value("else_y")])
    body = helper.make_graph(
        [
            node("Add", ["state", "m"], ["sum"], name="loop_add"),
            node("Mul", ["sum", "half"], ["next"], name="loop_mul"),
            node("Identity", ["going"], ["go"], name="loop_go"),
        ],
        "body",
        [value("i", [], TensorProto.INT64), value("going", [], TensorProto.BOOL), value("state")],
        [value("go", [], TensorProto.BOOL), value("next")],
    )
    nodes = [
        node("MatMul", ["x", "w1"], ["m"], name="mul"),
        node("ReduceSum", ["m"], ["total"], name="total", keepdims=0),
        node("Greater", ["total", "zero"], ["flag"], name="flag"),
        node("If", ["flag"], ["chosen"], name="if", then_branch=positive, else_branch=negative),
        node("Loop", ["count", "", "chosen"], ["looped"], name="loop", body=body),
        node("MatMul", ["looped", "w3"], ["y"], name="last"),
    ]
    constants = [
        tensor("w1", 6, 6), tensor("w2", 1, 6), tensor("w3", 6, 4),
        numpy_helper.from_array(np.float32(0), "zero"), numpy_helper.from_array(np.float32(0.5), "half"),
        numpy_helper.from_array(np.int64(3), "count"),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "g", [value("x", ["n", 6])], [value("y", ["n", 4])], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
