"""Networks whose layers stand one behind the other, made in code, and scales of their channels."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx import NodeProto, helper

from quantsieve.model.graph import Graph
from quantsieve.model.joints import Joint, find_joints
from quantsieve.model.prepare import plain_session, prepare
from quantsieve.model.units import find_structure
from small_network import save_model

IMAGE = (4, 6, 6)


class Chain:
    """Nodes one behind the other, x [batch, *IMAGE] first."""

    def __init__(self, seed: int = 0):
        self.draw = np.random.default_rng(seed)
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.last, self.channels, self.side = "x", IMAGE[0], IMAGE[1]

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.constants)}"
        self.constants[name] = self.draw.normal(size=shape).astype(np.float32)
        return name

    def fixed(self, value: float) -> str:
        self.constants[name := f"c{len(self.constants)}"] = np.asarray(value, np.float32)
        return name

    def op(self, op_type: str, *inputs: str, name: str = "", **attributes: object) -> "Chain":
        made = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, [self.last, *inputs], [made], name or made, **attributes))
        self.last = made
        return self

    def conv(self, channels: int, kernel: int = 1, group: int = 1, bias: bool = True, name: str = "") -> "Chain":
        weight = self.weight(channels, self.channels // group, kernel, kernel)
        biases = [self.weight(channels)] if bias else []
        self.channels = channels
        pad = kernel // 2
        return self.op("Conv", weight, *biases, name=name, group=group, pads=[pad] * 4)

    def transposed(self, channels: int) -> "Chain":
        weight = self.weight(self.channels, channels, 1, 1)
        self.channels = channels
        return self.op("ConvTranspose", weight)

    def gemm(self, columns: int, turned: bool = False) -> "Chain":
        self.op("Flatten")
        rows = self.channels * self.side**2
        weight = self.weight(*((columns, rows) if turned else (rows, columns)))
        self.channels, self.side = columns, 1
        return self.op("Gemm", weight, self.weight(columns), transB=int(turned))

    def matmul(self, columns: int) -> "Chain":
        weight = self.weight(self.channels, columns)
        self.channels = columns
        return self.op("MatMul", weight).op("Add", self.weight(columns))

    def save(self, path: Path) -> Path:
        self.nodes[-1].output[0] = "logits"
        return save_model(path, self.nodes, self.constants, IMAGE, self.channels)


def feeds_of(count: int = 2, seed: int = 5) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    return [{"x": draw.normal(size=(1, *IMAGE)).astype(np.float32)} for _ in range(count)]


def found_in(path: Path) -> tuple[ir.Model, tuple[Joint, ...]]:
    model, _ = prepare(ir.load(path), feeds_of(), path.stat().st_size)
    graph = Graph(model)
    return model, find_joints(graph, find_structure(graph))


def outputs(model: ir.Model, feeds: Sequence[dict[str, np.ndarray]]) -> list[np.ndarray]:
    session = plain_session(model)
    return [session.run(None, feed)[0] for feed in feeds]


def powers(joints: Sequence[Joint], seed: int = 1, most: int = 6) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        joint.maker.layer: np.exp2(draw.integers(-most, most + 1, joint.num_channels)).astype(np.float32)
        for joint in joints
    }


def mobile(path: Path, seed: int = 0, bound: float = 1e9) -> Path:
    """Expansion, depthwise convolution and projection, twice; then a classifier."""
    chain = Chain(seed)
    for _ in range(2):
        for channels, kernel, group in ((16, 1, 1), (16, 3, 16)):
            chain.conv(channels, kernel, group).op("Clip", chain.fixed(0), chain.fixed(bound))
        chain.conv(8)
    chain.op("GlobalAveragePool")
    chain.side = 1
    return chain.gemm(6).save(path)
