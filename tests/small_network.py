"""A trained-looking classifier that tunes in about two seconds, and data for it, both made in code."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper

CLASSES = 4
IMAGE = (3, 8, 8)
LAYERS = ("conv1", "conv2", "dense")


def save_model(
    path: Path,
    nodes: list[NodeProto],
    constants: dict[str, np.ndarray],
    shape: tuple[int, ...] = IMAGE,
    outputs: int = CLASSES,
) -> Path:
    """`path`, where a model x [batch, *shape] -> logits [batch, outputs] of these nodes now lies."""
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", outputs])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def network(path: Path, seed: int = 0) -> Path:
    """Conv + Relu, Conv + Relu with uneven channels, GlobalAveragePool, Flatten, Gemm."""
    draw = np.random.default_rng(seed)
    second = draw.normal(size=(8, 8, 3, 3)) * 0.3 * np.geomspace(0.02, 3, 8)[:, None, None, None]
    constants = {
        "w1": (draw.normal(size=(8, 3, 3, 3)) * 0.3).astype(np.float32),
        "b1": (draw.normal(size=8) * 0.1).astype(np.float32),
        "w2": second.astype(np.float32),
        "w3": (draw.normal(size=(8, CLASSES)) / np.geomspace(0.02, 3, 8)[:, None]).astype(np.float32),
        "b3": np.zeros(CLASSES, np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], "conv2", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["c2"], ["r2"], "relu2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["logits"], "dense"),
    ]
    return save_model(path, nodes, constants)


def unquantizable(path: Path) -> Path:
    """A model without one layer that a scheme could quantize: ReduceMean, then Tanh."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], "mean", axes=[2, 3], keepdims=0),
        helper.make_node("Tanh", ["m"], ["logits"], "tanh"),
    ]
    return save_model(path, nodes, {}, outputs=3)


def images(count: int, seed: int = 1) -> np.ndarray:
    """float32 [count, *IMAGE]"""
    draw = np.random.default_rng(seed)
    return (draw.normal(size=(count, *IMAGE)) * draw.uniform(0.3, 2, (count, 1, 1, 1))).astype(np.float32)


def arrays(model: Path, count: int = 120, seed: int = 1) -> dict[str, np.ndarray]:
    """Images `x`, and `labels` that are the model's own answers but for every tenth."""
    x = images(count, seed)
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    labels = session.run(None, {"x": x})[0].argmax(axis=1).astype(np.int64)
    labels[::10] = (labels[::10] + 1) % CLASSES
    return {"x": x, "labels": labels}


def save_arrays(path: Path, found: dict[str, np.ndarray]) -> Path:
    np.savez(path, **found)
    return path
