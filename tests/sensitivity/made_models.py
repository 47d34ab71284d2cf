"""Transformers and detectors made in code, under names that tell their parts or under numbers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 8


class Network:
    """Nodes in order. name: of the nodes, from their module and operator."""

    def __init__(self, name: Callable[[str, str], str]):
        self.draw = np.random.default_rng(0)
        self.name = name
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def op(self, op_type: str, module: str, *inputs: str, **attributes: object) -> str:
        output = f"v{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(op_type, inputs, [output], self.name(module, op_type), **attributes)  # type: ignore[arg-type]
        )
        return output

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        values = (self.draw.normal(size=shape) / max(1, np.prod(shape[1:])) ** 0.5).astype(np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def ints(self, *values: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, np.int64), name))
        return name

    def dense(self, module: str, source: str, out: int = WIDTH, inner: int = WIDTH) -> str:
        found = self.op("MatMul", module, source, self.weight(inner, out))
        return self.op("Add", f"{module}/bias", found, self.weight(out))

    def conv(self, module: str, source: str, inner: int, out: int, stride: int = 1) -> str:
        attributes = {"pads": [1, 1, 1, 1], "strides": [stride, stride]}
        return self.op("Conv", module, source, self.weight(out, inner, 3, 3), **attributes)

    def save(self, path: Path, inputs: dict[str, Sequence[object]], outputs: dict[str, str]) -> Path:
        """`path`, where the model now lies. outputs: name -> value."""
        for name, value in outputs.items():
            self.nodes.append(helper.make_node("Identity", [value], [name], f"to_{name}"))
        graph = helper.make_graph(
            self.nodes,
            "made",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],  # type: ignore[arg-type]
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(onnx.shape_inference.infer_shapes(model), path)
        return path


def numbers() -> Callable[[str, str], str]:
    """Names that only count."""
    count = iter(range(10_000))
    return lambda module, op_type: f"{op_type}_{next(count)}"


def transformer(path: Path, name: Callable[[str, str], str], norm: str = "before", cross: bool = False) -> Path:
    """Two blocks over tokens [batch, 4, 8], with a mask that all read; then a mean and a classifier.

    norm: 'before' or 'after' the branches. cross: a second attention a block, to a memory that all blocks read.
    """
    net = Network(name)
    mask = net.op("Mul", "mask", net.op("Sub", "mask/off", "m", net.weight(1)), net.weight(1))
    memory = net.dense("memory/project", "memory") if cross else ""

    def layer_norm(module: str, source: str) -> str:
        return net.op("LayerNormalization", module, source, net.weight(WIDTH), net.weight(WIDTH), axis=-1)

    def attention(module: str, source: str, other: str) -> str:
        query, key, value = (
            net.dense(f"{module}/{x}", y) for x, y in (("query", source), ("key", other), ("value", other))
        )
        turned = net.op("Transpose", f"{module}/turn", key, perm=[0, 2, 1])
        scores = net.op("Add", f"{module}/masked", net.op("MatMul", f"{module}/scores", query, turned), mask)
        weights = net.op("Softmax", f"{module}/softmax", scores, axis=-1)
        return net.dense(f"{module}/out", net.op("MatMul", f"{module}/mix", weights, value))

    def residual(module: str, source: str, branch: Callable[[str], str]) -> str:
        if norm == "before":
            return net.op("Add", f"{module}/sum", source, branch(layer_norm(f"{module}/norm", source)))
        return layer_norm(f"{module}/norm", net.op("Add", f"{module}/sum", branch(source), source))

    def mlp(module: str) -> Callable[[str], str]:
        def branch(source: str) -> str:
            inner = net.dense(f"{module}/up", source, 2 * WIDTH)
            cubed = net.op("Mul", f"{module}/square", inner, inner)  # as in GELU: an Add that is no residual sum
            inner = net.op("Add", f"{module}/gelu", inner, net.op("Tanh", f"{module}/tanh", cubed))
            return net.dense(f"{module}/down", inner, WIDTH, 2 * WIDTH)

        return branch

    last = net.dense("embed", "x")
    for block in range(2):
        at = f"encoder/layer.{block}"
        last = residual(f"{at}/attention", last, lambda source, at=at: attention(f"{at}/attention", source, source))
        if cross:
            last = residual(f"{at}/cross", last, lambda source, at=at: attention(f"{at}/cross", source, memory))
        last = residual(f"{at}/mlp", last, mlp(f"{at}/mlp"))
    logits = net.dense("classifier", net.op("ReduceMean", "mean", last, axes=[1], keepdims=0), 3)
    inputs: dict[str, Sequence[object]] = {"x": ["batch", 4, WIDTH], "m": ["batch", 1, 4]}
    if cross:
        inputs["memory"] = ["batch", 4, WIDTH]
    return net.save(path, inputs, {"logits": logits})


def detector(path: Path, name: Callable[[str, str], str], outputs: str) -> Path:
    """A backbone of three steps and a neck that mixes its levels, then two towers a level: 4 boxes and 5 classes.

    outputs: 'one' joins all in one tensor; 'kinds' are boxes and scores; 'levels' are boxes_0, scores_0, boxes_1, ...
    """
    net = Network(name)
    features, last = [], "x"
    for step in range(3):
        last = net.op(
            "Relu", f"backbone/relu{step}", net.conv(f"backbone/conv{step}", last, 3 if not step else 4, 4, 2)
        )
        features.append(last)
    pooled = [net.op("GlobalAveragePool", f"neck/pool{i}", feature) for i, feature in enumerate(features)]
    mixed = net.op("Concat", "neck/join", *pooled, axis=1)
    gate = net.op("Conv", "neck/mix", mixed, net.weight(4, 12, 1, 1))
    made: dict[str, list[str]] = {"boxes": [], "scores": []}
    for level, feature in enumerate(features):
        stem = net.conv(f"head/stems.{level}", net.op("Mul", f"neck/gate{level}", feature, gate), 4, 4)
        for kind, channels in (("boxes", 4), ("scores", 5)):
            tower = net.op("Relu", f"head/{kind}.{level}/relu", net.conv(f"head/{kind}.{level}/conv", stem, 4, 4))
            found = net.conv(f"head/{kind}_preds.{level}", tower, 4, channels)
            if kind == "scores":
                found = net.op("Sigmoid", f"head/sigmoid.{level}", found)
            made[kind].append(found)
    if outputs == "levels":
        named = {f"{kind}_{i}": value for kind, values in made.items() for i, value in enumerate(values)}
        return net.save(path, {"x": ["batch", 3, 16, 16]}, named)

    def flat(channels: int, value: str) -> str:
        return net.op("Reshape", f"flat/{value}", value, net.ints(0, channels, -1))

    if outputs == "one":
        pairs = enumerate(zip(made["boxes"], made["scores"], strict=True))
        levels = [net.op("Concat", f"level.{i}", a, b, axis=1) for i, (a, b) in pairs]
        joined = net.op("Concat", "all", *(flat(9, level) for level in levels), axis=2)
        return net.save(path, {"x": ["batch", 3, 16, 16]}, {"detections": joined})
    named = {
        kind: net.op("Concat", f"all/{kind}", *(flat(channels, value) for value in made[kind]), axis=2)
        for kind, channels in (("boxes", 4), ("scores", 5))
    }
    return net.save(path, {"x": ["batch", 3, 16, 16]}, named)
