"""Layers and tensors: what is decided together, and where rounding adds noise.

A layer is a weighted op (Conv, ConvTranspose, Gemm, MatMul) with the bias Add of a MatMul and the Relu or Clip(0, c)
after it; any other op that an integer kernel exists for (Add, Mul, pools, Concat, ...) is a layer of its own, with its
Relu or Clip. A lookup (Gather of the rows of a constant table, as embeddings are) is a layer whose weights alone can be
quantized. Every other node is a layer with a reason why it stays float, except layout ops (Reshape, Transpose,
MaxPool, ...), which only pass a tensor on. A tensor is a root value and what layout ops make of it.

The rule of fusing is onnxruntime's (measured with 1.32): Conv+Relu and Conv+Clip(0, c) become one QLinearConv when Q/DQ
stand after the activation only and the zero point is the type's minimum; a Clip with another lower bound does not fuse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quantsieve.model.graph import Graph, has_subgraphs, node_inputs

VERSION = 2

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
LOOKUP = "Gather"
# Ops with an integer kernel between DQ and Q (RUNTIME.md section 2), rounding their output; no weights.
INTEGER_OPS = (
    "Add", "Mul", "AveragePool", "GlobalAveragePool", "Concat", "LeakyRelu", "Sigmoid",
)  # fmt: skip
# Ops that only pass a tensor on: the same numbers elsewhere, so one scale serves all.
LAYOUT_OPS = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "MaxPool", "Identity", "Dropout")


@dataclass(frozen=True, slots=True)
class Layer:
    """The smallest group of nodes that is decided together."""

    name: str  # the user's own name of its main node
    op_type: str  # of the main node
    nodes: tuple[str, ...]  # prepared node names, main node first, activation last
    inputs: tuple[str, ...]  # activations that an integer kernel reads; () when it cannot be quantized
    output: str  # value behind the activation
    weight: str | None  # initializer
    bias: str | None  # initializer
    weight_shape: tuple[int, ...]
    channel_axis: int | None  # of the weight: the axis of output channels
    output_shape: tuple[int | None, ...] | None  # None where a dimension is not known before running
    num_params: int
    weight_bytes: int  # float32 bytes of weight and bias in the file
    macs: int  # multiply-adds of one sample, 0 when unknown or when it is no product of matrices
    refusal: str | None  # why no scheme can quantize it
    rounds_output: bool  # its integer kernel exists only with a rounded output (Gemm and MatMul can give float)

    @property
    def is_quantizable(self) -> bool:
        return self.refusal is None

    @property
    def is_lookup(self) -> bool:
        """Whether it only picks rows of its weights: there is nothing to multiply, and no activation that it reads."""
        return self.op_type == LOOKUP

    @property
    def is_product(self) -> bool:
        """Whether it multiplies with constant weights."""
        return self.weight is not None and not self.is_lookup


@dataclass(frozen=True, slots=True)
class Tensor:
    """An activation: a root value, and the values that layout ops make of it."""

    root: str
    members: tuple[str, ...]  # root first
    producer: str | None  # name of the layer that makes the root; None for a graph input
    readers: tuple[str, ...]  # names of quantizable layers that read a member


@dataclass(frozen=True, slots=True)
class Structure:
    """All layers in graph order and all tensors that some quantizable layer reads or makes."""

    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]

    @property
    def quantizable(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.is_quantizable)

    def layer(self, name: str) -> Layer:
        return next(layer for layer in self.layers if layer.name == name)


def find_structure(graph: Graph) -> Structure:
    """Layers and tensors of a prepared model."""
    layers: list[Layer] = []
    taken: set[str] = set()
    for node in graph.nodes:
        name = node.name or ""
        if name in taken or is_layout(node):
            continue
        layer = _layer(graph, node)
        taken.update(layer.nodes)
        layers.append(layer)
    return Structure(tuple(layers), _find_tensors(graph, layers))


def layout_root(graph: Graph, name: str) -> str:
    """The value that layout ops made `name` from; `name` itself when none did."""
    while True:
        node = graph.producers.get(name)
        if node is None or not is_layout(node) or node.inputs[0] is None or node.outputs[0].name != name:
            return name
        name = node.inputs[0].name or ""


def is_layout(node: ir.Node) -> bool:
    """Whether the node only passes a tensor on."""
    if node.op_type == "MaxPool" and len([v for v in node.outputs if v.name and v.uses()]) > 1:
        return False  # with indices it is no mere passing on
    return node.domain == "" and node.op_type in LAYOUT_OPS and bool(node.inputs)


def _layer(graph: Graph, node: ir.Node) -> Layer:
    refusal = _refusal(graph, node)
    nodes = [node]
    weight = bias = None
    if node.op_type in WEIGHTED and node.domain == "":
        weight = _constant_name(graph, node, 1)
        bias = _constant_name(graph, node, 2) if node.op_type != "MatMul" else None
    elif node.op_type == LOOKUP and refusal is None:
        weight = _constant_name(graph, node, 0)
    if refusal is None and node.op_type == "MatMul" and weight is not None:
        add = _bias_add(graph, node)
        if add is not None:
            nodes.append(add)
    if refusal is None and node.op_type != LOOKUP:
        activation = _activation(graph, nodes[-1])
        if activation is not None:
            nodes.append(activation)
    output = nodes[-1].outputs[0].name or "" if node.outputs else ""
    array = graph.constant(weight) if weight else None
    bias_array = graph.constant(bias) if bias else None
    num_params = sum(int(a.size) for a in (array, bias_array) if a is not None)
    weight_bytes = sum(int(a.nbytes) for a in (array, bias_array) if a is not None)
    shape = graph.shape(output)
    axis = _channel_axis(node, array)
    return Layer(
        name=node.name or "",
        op_type=node.op_type,
        nodes=tuple(n.name or "" for n in nodes),
        inputs=() if refusal or node.op_type == LOOKUP else _activation_inputs(graph, node),
        output=output,
        weight=weight,
        bias=bias,
        weight_shape=tuple(array.shape) if array is not None else (),
        channel_axis=axis,
        output_shape=shape,
        num_params=num_params,
        weight_bytes=weight_bytes,
        macs=_macs(graph, node),
        refusal=refusal,
        rounds_output=not (node.op_type in ("Gemm", "MatMul", LOOKUP) and len(nodes) == 1),
    )


def _activation_inputs(graph: Graph, node: ir.Node) -> tuple[str, ...]:
    names = [value.name or "" for value in node.inputs if value is not None and value.name]
    return tuple(dict.fromkeys(name for name in names if not graph.is_constant(name)))


def _constant_name(graph: Graph, node: ir.Node, index: int) -> str | None:
    if index >= len(node.inputs) or node.inputs[index] is None:
        return None
    name = node.inputs[index].name or ""  # type: ignore[union-attr]
    return name if graph.is_constant(name) else None


def _refusal(graph: Graph, node: ir.Node) -> str | None:
    """Why no integer kernel can take this node; None when one can."""
    if node.domain != "":
        return f"operator {node.domain}.{node.op_type} is outside the standard domain"
    if has_subgraphs(node):
        return f"{node.op_type} holds a subgraph and is one unit"
    if node.op_type == LOOKUP:
        return _lookup_refusal(graph, node)
    if node.op_type not in WEIGHTED + INTEGER_OPS:
        return f"no int8 scheme for {node.op_type}"
    if len(node.outputs) != 1:
        return f"{node.op_type} with {len(node.outputs)} outputs"
    names = [value.name or "" for value in node.inputs if value is not None and value.name]
    for name in [*names, node.outputs[0].name or ""]:
        if not graph.is_float32(name):
            value = graph.value(name)
            found = "unknown type" if value is None or value.dtype is None else value.dtype.name.lower()
            return f"{name} is {found}, not float32"
    if node.op_type in WEIGHTED:
        return _weighted_refusal(graph, node)
    if any(graph.is_constant(name) for name in names):
        return f"{node.op_type} with a constant operand"
    if node.op_type == "Concat" and len(names) < 2:
        return "Concat of one input"
    return None


def _lookup_refusal(graph: Graph, node: ir.Node) -> str | None:
    name = _constant_name(graph, node, 0)
    shape = graph.shape(name or "")
    is_table = name is not None and graph.is_float32(name) and shape is not None and len(shape) == 2
    if not is_table or _attribute(node, "axis", 0) not in (0, -2) or _constant_name(graph, node, 1) is not None:
        return f"no int8 scheme for {node.op_type}"
    array = graph.constant(name or "")
    if array is None or array.size == 0:
        return "its table is empty"
    if not np.isfinite(array).all():
        return f"its table {name} holds NaN or infinity"
    return None


def _weighted_refusal(graph: Graph, node: ir.Node) -> str | None:
    if graph.is_constant(node.inputs[0].name or ""):  # type: ignore[union-attr]
        return "the constant is the left operand"
    weight = _constant_name(graph, node, 1)
    if weight is None:
        if node.op_type == "MatMul" and node.inputs[1] is not None:
            return None
        return "its weight is computed, not constant"
    array = graph.constant(weight)
    if array is None or array.size == 0:
        return "its weight is empty"
    if not np.isfinite(array).all():
        return f"its weight {weight} holds NaN or infinity"
    if node.op_type in ("Gemm", "MatMul") and array.ndim != 2:
        return f"its weight has {array.ndim} dimensions, not 2"
    has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
    if has_bias:
        bias_name = _constant_name(graph, node, 2)
        if bias_name is None:
            return "its bias is computed, not constant"
        bias = graph.constant(bias_name)
        assert bias is not None
        if not np.isfinite(bias).all():
            return f"its bias {bias_name} holds NaN or infinity"
        if node.op_type == "Gemm" and bias.shape != (_gemm_columns(node, array),):
            return f"its bias has the shape {list(bias.shape)}, not one value a column"
    if node.op_type == "Gemm":
        for attribute, wanted in (("alpha", 1.0), ("beta", 1.0), ("transA", 0)):
            found = _attribute(node, attribute, wanted)
            if found != wanted:
                return f"Gemm with {attribute} = {found:g}"
    if node.op_type == "ConvTranspose" and _attribute(node, "group", 1) != 1:
        return "ConvTranspose with groups"
    return None


def _gemm_columns(node: ir.Node, weight: np.ndarray) -> int:
    return int(weight.shape[0] if _attribute(node, "transB", 0) else weight.shape[1])


def _attribute(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def _channel_axis(node: ir.Node, weight: np.ndarray | None) -> int | None:
    if weight is None:
        return None
    if node.op_type == "Conv":
        return 0
    if node.op_type == LOOKUP:
        return 0  # a row has one scale
    if node.op_type == "Gemm":
        return 0 if _attribute(node, "transB", 0) else 1
    return 1  # ConvTranspose [in, out, ...], MatMul [in, out]


def _bias_add(graph: Graph, node: ir.Node) -> ir.Node | None:
    """The Add of a constant vector that alone reads a MatMul."""
    reader = graph.sole_reader(node.outputs[0].name or "")
    if reader is None or reader.op_type != "Add" or reader.domain != "":
        return None
    constants = [graph.constant(v.name or "") for v in reader.inputs if v is not None]
    vector = next((c for c in constants if c is not None), None)
    return reader if vector is not None and vector.ndim <= 1 and np.isfinite(vector).all() else None


def _activation(graph: Graph, node: ir.Node) -> ir.Node | None:
    """The Relu or Clip(0, c) that alone reads the node's output."""
    reader = graph.sole_reader(node.outputs[0].name or "")
    if reader is None or reader.domain != "":
        return None
    if reader.op_type == "Relu":
        return reader
    if reader.op_type != "Clip" or len(reader.inputs) < 2 or reader.inputs[1] is None:
        return None
    low = graph.constant(reader.inputs[1].name or "")
    fixed = [v is None or graph.is_constant(v.name or "") for v in reader.inputs[1:]]
    return reader if low is not None and low.size == 1 and float(low.reshape(())) == 0.0 and all(fixed) else None


def _macs(graph: Graph, node: ir.Node) -> int:
    """Multiply-adds of one sample; axis 0 is the batch and counts once, unknown dimensions make it 0."""
    if node.domain != "" or node.op_type not in WEIGHTED or len(node.inputs) < 2:
        return 0
    values = (node.inputs[0], node.inputs[1], node.outputs[0])
    read, weight, made = (graph.shape(value.name or "") if value else None for value in values)
    if read is None or weight is None or made is None:
        return 0
    if node.op_type in ("Conv", "ConvTranspose"):
        # Each weight meets every place of the output once, and transposed, every place of the input.
        return _product(weight) * _product((made if node.op_type == "Conv" else read)[2:])
    if len(weight) == 2:
        return _product(weight) * _product(made[1:-1])
    return _product(read[-1:]) * _product(made[1:])  # each output is a sum over the last axis of the left operand


def _product(dims: Sequence[int | None]) -> int:
    """Of all dimensions; 0 when one is unknown."""
    return 0 if any(dim is None for dim in dims) else math.prod(dim for dim in dims if dim is not None)


def _find_tensors(graph: Graph, layers: list[Layer]) -> tuple[Tensor, ...]:
    maker = {layer.output: layer.name for layer in layers}
    for layer in layers:
        for name in layer.nodes:
            for value in graph.by_name[name].outputs:
                maker.setdefault(value.name or "", layer.name)
    members: dict[str, list[str]] = {}
    readers: dict[str, list[str]] = {}
    for layer in layers:
        if not layer.is_quantizable:
            continue
        for name in layer.inputs:
            root = layout_root(graph, name)
            members.setdefault(root, [root])
            readers.setdefault(root, []).append(layer.name)
        members.setdefault(layer.output, [layer.output])
    for node in graph.nodes:  # graph order, so that a chain of layout ops is followed to its end
        if is_layout(node):
            root = layout_root(graph, node.outputs[0].name or "")
            if root in members:
                members[root].append(node.outputs[0].name or "")
    return tuple(
        Tensor(root, tuple(dict.fromkeys(names)), maker.get(root), tuple(dict.fromkeys(readers.get(root, []))))
        for root, names in members.items()
    )


def unreached(graph: Graph, structure: Structure) -> tuple[str, ...]:
    """Nodes that belong to no layer and are no layout op; empty for every model (invariant 4)."""
    owned = {name for layer in structure.layers for name in layer.nodes}
    return tuple(n.name or "" for n in graph.nodes if (n.name or "") not in owned and not is_layout(n))


def reads(graph: Graph, layer: Layer) -> tuple[str, ...]:
    """Every value from outside that the layer's nodes read, constants too, once each."""
    made = {v.name for name in layer.nodes for v in graph.by_name[name].outputs}
    names = (n for name in layer.nodes for n in node_inputs(graph.by_name[name]))
    return tuple(dict.fromkeys(name for name in names if name not in made))
