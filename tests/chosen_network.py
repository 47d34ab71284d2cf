"""A network with what makes choosing by name hard: folded BatchNorm, a shared weight, odd names, nodes without one."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import small_network


def network(path: Path) -> Path:
    """Layers: /stem/conv:0 (with BatchNorm and Relu), body a and body b (Convs of one weight and one bias, each
    with a Relu), sum, the pool (unnamed: its output is p), dense (MatMul and Add), head:gemm (transB), act/tanh."""
    draw = np.random.default_rng(5)
    constants = {name: (draw.uniform(0.5, 1.5, 8)).astype(np.float32) for name in ("scale", "shift", "mean", "var")}
    constants |= {
        "w1": (draw.normal(size=(8, 3, 3, 3)) * 0.3).astype(np.float32),
        "w2": (draw.normal(size=(8, 8, 3, 3)) * 0.15).astype(np.float32),
        "b2": (draw.normal(size=8) * 0.1).astype(np.float32),
        "wm": (draw.normal(size=(8, 8)) * 0.4).astype(np.float32),
        "bm": (draw.normal(size=8) * 0.1).astype(np.float32),
        "wg": (draw.normal(size=(small_network.CLASSES, 8)) * 0.4).astype(np.float32),
        "bg": np.zeros(small_network.CLASSES, np.float32),
    }
    norm = ["c1", "scale", "shift", "mean", "var"]
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], "/stem/conv:0", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", norm, ["n1"], "/stem/norm:0"),
        helper.make_node("Relu", ["n1"], ["r1"], "/stem/relu 0"),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], "body a", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("Conv", ["r2", "w2", "b2"], ["c3"], "body b", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c3"], ["r3"], "relu, b"),
        helper.make_node("Add", ["r3", "r1"], ["s"], "sum"),
        helper.make_node("GlobalAveragePool", ["s"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("MatMul", ["f", "wm"], ["m"], "dense"),
        helper.make_node("Add", ["m", "bm"], ["d"], "dense/bias"),
        helper.make_node("Tanh", ["d"], ["t"], "act/tanh"),
        helper.make_node("Gemm", ["t", "wg", "bg"], ["logits"], "head:gemm", transB=1),
    ]
    return small_network.save_model(path, nodes, constants)


def tied(path: Path) -> Path:
    """ids [batch, 5] -> scores [batch, 5, 16]: the embedding `words`, behind an Add on the ids, and the
    product `last`, which share their table."""
    table = np.random.default_rng(6).normal(size=(16, 16)).astype(np.float32)
    nodes = [
        helper.make_node("Add", ["ids", "one"], ["next"], "next"),
        helper.make_node("Gather", ["table", "next"], ["w"], "words"),
        helper.make_node("Relu", ["w"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "table"], ["scores"], "last"),
    ]
    graph = helper.make_graph(
        nodes,
        "tied",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", 5])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 5, 16])],
        [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.asarray(1, np.int64), "one")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
