"""Deep models with random weights, and all that a scan of them needs, made in code."""

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from quantsieve import schemes
from quantsieve.calibrate import Calibration, calibrate
from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.units import find_structure
from quantsieve.plan import find_options, forced_tensors
from quantsieve.schemes import Scheme
from quantsieve.schemes._static import by_name
from quantsieve.sensitivity.screen import Rows
from quantsieve.sensitivity.suffix import Prices, Probes, Source, find_sources, scan_batch
from quantsieve.weights import NO_CORRECTIONS

WIDTH, SIZE = 8, 5
node = helper.make_node


def deep(
    blocks: int, is_residual: bool = True, classes: int = 5, tail: tuple[str, ...] = (), step: int | None = None
) -> onnx.ModelProto:
    """x [n, 3, SIZE, SIZE] -> y [n, classes]: convolutions, each block of its own size. tail: operators of one input
    behind the head; step: block whose branch is rounded to whole numbers."""
    draw = np.random.default_rng(3)
    nodes, constants = [], []

    def conv(name: str, read: str, num_in: int, gain: float) -> str:
        spread = np.exp(0.5 * draw.standard_normal((WIDTH, 1, 1, 1)))
        weight = draw.standard_normal((WIDTH, num_in, 3, 3)) * spread * gain / np.sqrt(9 * num_in)
        constants.append(numpy_helper.from_array(weight.astype(np.float32), f"{name}_w"))
        constants.append(numpy_helper.from_array((0.1 * draw.standard_normal(WIDTH)).astype(np.float32), f"{name}_b"))
        nodes.append(node("Conv", [read, f"{name}_w", f"{name}_b"], [name], name, pads=[1] * 4))
        nodes.append(node("Relu", [name], [f"{name}_r"], f"{name}_relu"))
        return f"{name}_r"

    value = conv("stem", "x", 3, 1.4)
    for index in range(blocks):
        gain = np.exp(0.5 * draw.standard_normal())
        branch = conv(f"b{index}", value, WIDTH, gain / np.sqrt(blocks) * 2 if is_residual else 1.15)
        if index == step:
            nodes.append(node("Round", [branch], ["whole"], "whole"))
            branch = "whole"
        if is_residual:
            nodes.append(node("Add", [branch, value], [f"s{index}"], f"add{index}"))
            branch = f"s{index}"
        value = branch
    nodes.append(node("GlobalAveragePool", [value], ["pooled"], "pool"))
    nodes.append(node("Flatten", ["pooled"], ["flat"], "flatten"))
    head = draw.standard_normal((WIDTH, classes)).astype(np.float32)
    constants.append(numpy_helper.from_array(head, "head_w"))
    names = [*(f"head{i}" for i in range(len(tail))), "y"]
    nodes.append(node("MatMul", ["flat", "head_w"], names[:1], "head"))
    constants.append(numpy_helper.from_array(np.asarray(1), "axis"))
    for op_type, read, made in zip(tail, names[:-1], names[1:], strict=True):
        nodes.append(node(op_type, [read, "axis"] if op_type == "CumSum" else [read], [made], made))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, SIZE, SIZE])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", classes])]
    graph = helper.make_graph(nodes, "deep", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def images(count: int, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    scale = draw.uniform(0.5, 2, (count, 1, 1, 1))
    return {"x": (draw.standard_normal((count, 3, SIZE, SIZE)) * scale).astype(np.float32)}


@dataclass(frozen=True)
class Deep:
    """A model, calibrated; its sources, and the rows of its layers."""

    executor: Executor
    calibration: Calibration
    schemes: tuple[Scheme, ...]
    sources: tuple[Source, ...]
    rows: Rows

    def probes(self, feeds: dict[str, np.ndarray], workers: int = 1) -> Probes:
        known = by_name(self.schemes)
        return Probes(self.executor, feeds, len(feeds["x"]), self.calibration, NO_CORRECTIONS, known, workers)

    def exact(self, feeds: dict[str, np.ndarray]) -> Prices:
        known, count = by_name(self.schemes), len(feeds["x"])
        return scan_batch(self.executor, feeds, count, self.sources, self.calibration, NO_CORRECTIONS, known)

    def scores(self, prices: Prices) -> np.ndarray:
        return np.asarray([prices.mean()[list(row)].sum() for row in self.rows.sources])


def opened(model: onnx.ModelProto) -> Deep:
    graph = Graph(ir.from_proto(model))
    executor = Executor(graph, find_structure(graph))
    calibration = calibrate(executor, [(images(16, 1), 16)])
    known = (schemes.get("int8"), schemes.get("int8-channel"))
    options = find_options(graph, executor.structure, calibration, known)
    sources = find_sources(executor, options, known)
    empty = Prices(sources, np.zeros((len(sources), 1)), np.zeros((len(sources), 1)))
    rows = tuple(
        tuple(empty.switched(x.name, s, forced_tensors(graph, x, schemes.get(s))))
        for x in executor.structure.quantizable
        for s in options.schemes.get(x.name, ())
    )
    return Deep(executor, calibration, known, sources, Rows(rows))
