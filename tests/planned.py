"""Small real networks made in code, and all that a plan over one of them is written or simulated with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import NodeProto, TensorProto, helper, numpy_helper

from quantsieve import example
from quantsieve.calibrate import Calibration, calibrate
from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.prepare import prepare
from quantsieve.model.units import Structure, find_structure
from quantsieve.operators import as_operators
from quantsieve.plan import Options, Plan, find_options, place
from quantsieve.schemes import FLOAT, Scheme, discover
from quantsieve.schemes._formats import Formats
from quantsieve.schemes._static import by_name
from quantsieve.sizes import operator_costs
from quantsieve.targets.ort import OrtCpu
from quantsieve.weights import NO_CORRECTIONS, Ingredients
from quantsieve.writing import FLOAT_PLAN, count_bytes, write_plan

Feeds = dict[str, np.ndarray]
LEVELS = ("off", "basic", "extended", "all")
node = helper.make_node


STATIC = ("int8", "int8-channel")


@dataclass(frozen=True, slots=True)
class Kit:
    """A prepared model with its facts. feeds: the samples it was calibrated on, stacked."""

    original: onnx.ModelProto
    graph: Graph
    structure: Structure
    executor: Executor
    calibration: Calibration
    options: Options
    feeds: Feeds
    schemes: tuple[Scheme, ...] = discover()

    def under(self, formats: Formats) -> "Kit":
        """The same network to be planned in other integers."""
        schemes = tuple(scheme.under(formats) for scheme in discover())
        options = find_options(self.graph, self.structure, self.calibration, schemes)
        return replace(self, schemes=schemes, options=options)

    def parts(self, weight_type: str = "s8") -> Ingredients:
        schemes = by_name(self.schemes)
        return Ingredients(self.graph, self.structure, self.calibration, NO_CORRECTIONS, schemes, weight_type)

    def plan(self, *quantized: str, scheme: str = "int8") -> Plan:
        """These layers quantized, all that can be when none is named."""
        names = quantized or tuple(self.options.schemes)
        return Plan({n: scheme if scheme in self.options.schemes[n] else "int8" for n in names})

    def random_plan(self, seed: int, among: Sequence[str] = STATIC) -> Plan:
        """Each layer float with a chance of a half, otherwise in one of those of its schemes that are `among`."""
        draw = np.random.default_rng(seed)
        own = {n: [scheme for scheme in found if scheme in among] for n, found in self.options.schemes.items()}
        picks = {n: draw.choice([FLOAT] * len(found) + found) for n, found in own.items() if found}
        return Plan({name: str(pick) for name, pick in picks.items()})


def kit_of(model: onnx.ModelProto, feeds: Feeds) -> Kit:
    first = {name: array[:2] for name, array in feeds.items()}
    prepared, fact = prepare(ir.from_proto(model), [first], model.ByteSize())
    assert not [note for note in fact.notes if "left out" in note], fact.notes
    graph = Graph(prepared)
    structure = find_structure(graph)
    executor = Executor(graph, structure)
    count = len(next(iter(feeds.values())))
    calibration = calibrate(executor, [(feeds, count)])
    options = find_options(graph, structure, calibration, discover())
    return Kit(model, graph, structure, executor, calibration, options, feeds)


def exposed(kit: Kit) -> Kit:
    """The same network with the output of every layer as a graph output, so that a run shows all tensors."""
    model = onnx.ModelProto.FromString(kit.original.SerializeToString())
    have = {value.name for value in model.graph.output}
    more = [layer.output for layer in kit.structure.layers if layer.output not in have]
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in more)
    return kit_of(model, kit.feeds)


def save_plan(folder: Path, kit: Kit, plan: Plan, weight_type: str = "s8", name: str = "plan.onnx") -> Path:
    path = folder / name
    onnx.save(write_plan(kit.parts(weight_type), plan), path)
    return path


def save(folder: Path, model: ir.Model, name: str = "model.onnx") -> Path:
    path = folder / name
    onnx.save(ir.to_proto(model), path)
    return path


def run_file(path: Path, feeds: Mapping[str, np.ndarray], level: str = "all") -> Feeds:
    return OrtCpu(optimization=level).load(path)(feeds)


def gap(found: Feeds, wanted: Feeds) -> float:
    """Largest difference of two sets of outputs, in 255ths of their range."""
    return max(float(np.abs(found[n] - a).max()) / (float(np.ptp(a)) / 255) for n, a in wanted.items())


def bytes_changed(kit: Kit, plan: Plan, is_operators: bool = False) -> tuple[int, int]:
    """(predicted, found) change of the file's bytes by the plan."""
    parts = kit.parts()
    empty = write_plan(parts, FLOAT_PLAN).ByteSize()
    costs = count_bytes(parts, kit.options, empty)
    written = write_plan(parts, plan)
    if is_operators:
        costs, written = operator_costs(parts, kit.options, costs), as_operators(written)
    layers = sum(costs.layer_bytes[name][chosen] for name, chosen in plan.schemes.items() if chosen != FLOAT)
    rounded = place(kit.graph, kit.structure, plan, parts.schemes).rounded
    return layers + sum(costs.tensor_bytes[pair] for pair in rounded), written.ByteSize() - empty


def exact_weight_type() -> str:
    """The type that this machine multiplies exactly, as a run would choose it."""
    return "u8" if OrtCpu().probe_saturation().saturates else "s8"


def _model(nodes: list[NodeProto], constants: Mapping[str, np.ndarray], shape: list[int], outputs: dict[str, list]):
    graph = helper.make_graph(
        nodes,
        "planned",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
        doc_string="a graph to be planned",
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model.doc_string = "a model to be planned"
    helper.set_model_props(model, {"labels": "a,b,c", "origin": "made in code"})
    return model


class _Constants(dict[str, np.ndarray]):
    """Weights of unit gain whose channels have very uneven ranges: one scale a tensor is a bad scale for them."""

    def __init__(self, seed: int):
        super().__init__()
        self.draw = np.random.default_rng(seed)

    def weights(self, name: str, *shape: int, channels: int = 0) -> str:
        fan_in = np.prod(shape) / shape[channels]
        spread = np.geomspace(0.1, 2, shape[channels])
        along = [-1 if axis == channels else 1 for axis in range(len(shape))]
        self[name] = (self.draw.normal(size=shape) / np.sqrt(fan_in) * spread.reshape(along)).astype(np.float32)
        return name

    def bias(self, name: str, size: int) -> str:
        self[name] = (self.draw.normal(size=size) * 0.2).astype(np.float32)
        return name


def convolutions() -> Kit:
    """Conv+Relu, depthwise Conv+Clip(0, 6), a residual Add, MaxPool, Concat, an output in the middle, pool, Gemm."""
    c = _Constants(0)
    c |= {"zero": np.float32(0), "six": np.float32(6)}
    one, three = {"kernel_shape": [1, 1]}, {"pads": [1, 1, 1, 1]}
    nodes = [
        node("Conv", ["x", c.weights("w1", 8, 3, 3, 3), c.bias("b1", 8)], ["c1"], "stem", **three),
        node("Relu", ["c1"], ["r1"], "stem_relu"),
        node("Conv", ["r1", c.weights("w2", 8, 1, 3, 3), c.bias("b2", 8)], ["c2"], "depthwise", group=8, **three),
        node("Clip", ["c2", "zero", "six"], ["r2"], "depthwise_clip"),
        node("Conv", ["r2", c.weights("w3", 8, 8, 1, 1), c.bias("b3", 8)], ["c3"], "linear", **one),
        node("Add", ["c3", "r1"], ["middle"], "residual"),
        node("MaxPool", ["middle"], ["m"], "halve", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["m", c.weights("w4", 8, 8, 3, 3), c.bias("b4", 8)], ["c4"], "left", **three),
        node("Relu", ["c4"], ["r4"], "left_relu"),
        node("Conv", ["m", c.weights("w5", 8, 8, 1, 1)], ["c5"], "right", **one),
        node("Clip", ["c5", "zero", "six"], ["r5"], "right_clip"),
        node("Concat", ["r4", "r5"], ["both"], "join", axis=1),
        node("GlobalAveragePool", ["both"], ["p"], "pool"),
        node("Flatten", ["p"], ["f"], "flatten"),
        node("Gemm", ["f", c.weights("w6", 16, 10, channels=1), c.bias("b6", 10)], ["logits"], "classify"),
    ]
    model = _model(nodes, c, [3, 8, 8], {"logits": ["batch", 10], "middle": ["batch", 8, 8, 8]})
    return kit_of(model, {"x": np.random.default_rng(1).normal(size=(16, 3, 8, 8)).astype(np.float32)})


def reshaped() -> Kit:
    """Conv+Relu, Reshape, Gemm with transB and a square weight, Relu, Gemm."""
    c = _Constants(2)
    c["flat"] = np.array([0, 64], np.int64)
    nodes = [
        node("Conv", ["x", c.weights("w1", 4, 1, 3, 3), c.bias("b1", 4)], ["c1"], "conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"], "conv_relu"),
        node("Reshape", ["r1", "flat"], ["f"], "to_row"),
        node("Gemm", ["f", c.weights("w2", 64, 64), c.bias("b2", 64)], ["g"], "square", transB=1),
        node("Relu", ["g"], ["r2"], "square_relu"),
        node("Gemm", ["r2", c.weights("w3", 64, 5, channels=1), c.bias("b3", 5)], ["scores"], "last"),
    ]
    model = _model(nodes, c, [1, 4, 4], {"scores": ["batch", 5]})
    return kit_of(model, {"x": np.random.default_rng(3).normal(size=(16, 1, 4, 4)).astype(np.float32)})


def tokens() -> Kit:
    """MatMul+Add+Relu, MatMul+Add, a residual Add, Sigmoid, a MatMul without bias, on [batch, 6, 16]."""
    return _products([6])


def rows() -> Kit:
    """The same on [batch, 16], where onnxruntime makes a Gemm of MatMul and Add."""
    return _products([])


def _products(places: list[int]) -> Kit:
    c = _Constants(4)
    nodes = [
        node("MatMul", ["x", c.weights("w1", 16, 16, channels=1)], ["m1"], "up"),
        node("Add", ["m1", c.bias("b1", 16)], ["a1"], "up_bias"),
        node("Relu", ["a1"], ["r1"], "up_relu"),
        node("MatMul", ["r1", c.weights("w2", 16, 16, channels=1)], ["m2"], "down"),
        node("Add", ["m2", c.bias("b2", 16)], ["a2"], "down_bias"),
        node("Add", ["a2", "r1"], ["s"], "residual"),
        node("Sigmoid", ["s"], ["g"], "squash"),
        node("MatMul", ["g", c.weights("w3", 16, 3, channels=1)], ["scores"], "head"),
    ]
    model = _model(nodes, c, [*places, 16], {"scores": ["batch", *places, 3]})
    return kit_of(model, {"x": np.random.default_rng(5).normal(size=(16, *places, 16)).astype(np.float32)})


def single_product(product: str, weight: float = 1.0, bias: float = 0.2) -> Kit:
    """One layer with a square weight of uneven rows and columns: Gemm 'transposed' or 'plain', or a 'matmul'."""
    c = _Constants(6)
    c.weights("w", 16, 16, channels=0)
    c["w"] = (c["w"] * np.geomspace(2, 0.1, 16) * weight).astype(np.float32)
    c["w"][0] *= 3
    c["b"] = (c.draw.normal(size=16) * bias + bias).astype(np.float32)
    made = {
        "transposed": node("Gemm", ["x", "w", "b"], ["y"], "product", transB=1),
        "plain": node("Gemm", ["x", "w", "b"], ["y"], "product"),
        "matmul": node("MatMul", ["x", "w"], ["y"], "product"),
    }[product]
    if product == "matmul":
        del c["b"]
    model = _model([made], c, [16], {"y": ["batch", 16]})
    return kit_of(model, {"x": np.random.default_rng(7).normal(size=(16, 16)).astype(np.float32)})


def two_products() -> Kit:
    """MatMul+Relu and MatMul, on [batch, 6, 16]."""
    c = _Constants(10)
    nodes = [
        node("MatMul", ["x", c.weights("w1", 16, 16, channels=1)], ["m1"], "up"),
        node("Relu", ["m1"], ["r1"], "up_relu"),
        node("MatMul", ["r1", c.weights("w2", 16, 3, channels=1)], ["y"], "down"),
    ]
    model = _model(nodes, c, [6, 16], {"y": ["batch", 6, 3]})
    return kit_of(model, {"x": np.random.default_rng(11).normal(size=(16, 6, 16)).astype(np.float32)})


def at_opset(opset: int) -> Kit:
    """Conv+Relu, pool and Gemm; `prepare` lifts an opset below 13 where it can."""
    c = _Constants(12)
    nodes = [
        node("Conv", ["x", c.weights("w1", 4, 3, 3, 3), c.bias("b1", 4)], ["c1"], "conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"], "relu"),
        node("GlobalAveragePool", ["r1"], ["p"], "pool"),
        node("Flatten", ["p"], ["f"], "flatten"),
        node("Gemm", ["f", c.weights("w2", 4, 5, channels=1), c.bias("b2", 5)], ["y"], "gemm"),
    ]
    model = _model(nodes, c, [3, 8, 8], {"y": ["batch", 5]})
    model.opset_import[0].version = opset
    return kit_of(model, {"x": np.random.default_rng(13).normal(size=(16, 3, 8, 8)).astype(np.float32)})


def fragile() -> Kit:
    """Conv+Relu, a Conv+Relu with weights near 1e-6 and biases near 5, Conv."""
    c = _Constants(8)
    one = {"kernel_shape": [1, 1]}
    nodes = [
        node("Conv", ["x", c.weights("w1", 8, 3, 1, 1), c.bias("b1", 8)], ["c1"], "first", **one),
        node("Relu", ["c1"], ["r1"], "first_relu"),
        node("Conv", ["r1", c.weights("w2", 8, 8, 1, 1), c.bias("b2", 8)], ["c2"], "tiny", **one),
        node("Relu", ["c2"], ["r2"], "tiny_relu"),
        node("Conv", ["r2", c.weights("w3", 4, 8, 1, 1), c.bias("b3", 4)], ["y"], "last", **one),
    ]
    c["w2"] *= np.float32(1e-6)
    c["b2"] += np.float32(5)
    model = _model(nodes, c, [3, 4, 4], {"y": ["batch", 4, 4, 4]})
    return kit_of(model, {"x": np.random.default_rng(9).normal(size=(8, 3, 4, 4)).astype(np.float32)})


def saturating() -> Kit:
    """x in 0..1 [batch, 1024], all weights alike: at x = 1 every product of integers is 255 * 127."""
    c = {"w": np.full((1024, 8), 0.01, np.float32)}
    model = _model([node("MatMul", ["x", "w"], ["y"], "product")], c, [1024], {"y": ["batch", 8]})
    return kit_of(model, {"x": np.linspace(0, 1, 16, dtype=np.float32)[:, None] * np.ones((1, 1024), np.float32)})


KITS: dict[str, Callable[[], Kit]] = {
    "convolutions": convolutions,
    "reshaped": reshaped,
    "tokens": tokens,
    "rows": rows,
}


def demo(count: int = 64) -> Kit:
    """The network of `quantsieve demo`, calibrated on its first samples."""
    with np.load(example.data_path()) as data:
        feeds = {"input": data["input"][:count]}
    return kit_of(onnx.load(example.model_path()), feeds)
