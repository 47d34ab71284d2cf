"""The same model with integer operators where it has Q/DQ pairs around float ones (QOperator format).

Works on the file that `writing` made of a plan, so both forms hold the same integers at the same places. Nodes keep the
names of those that they stand for. A float operator between DequantizeLinear and QuantizeLinear becomes the QLinear
operator that computes the same: of ONNX's own (QLinearConv, QLinearMatMul), or of onnxruntime's domain. A Relu or Clip
in front of the QuantizeLinear goes where saturation does its work. What has no integer operator stays as it is: 16-bit
pairs, ConvTranspose, float layers. Layout operators between equal pairs work on the integers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

MICROSOFT = "com.microsoft"
_BYTES = (np.dtype(np.int8), np.dtype(np.uint8))
# Operators of one input that have a QLinear form, with the attributes that it takes.
_UNARY = {
    "AveragePool": {"auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides"},
    "GlobalAveragePool": set(),
    "LeakyRelu": {"alpha"},
    "Sigmoid": set(),
}
_LAYOUT = {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity"}
_POOL_OPSET = _CLIP_OPSET = 12  # from which MaxPool and Clip take 8-bit integers


def as_operators(model: onnx.ModelProto, floats: Collection[str] = ()) -> onnx.ModelProto:
    """A new model; `model` is not touched. floats: names of nodes that stay float operators, as their layers do."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    opset = next(entry.version for entry in made.opset_import if entry.domain in ("", "ai.onnx"))
    _Rewriter(made.graph, opset).rewrite(floats)
    used = {node.domain for node in made.graph.node}
    if MICROSOFT in used and all(entry.domain != MICROSOFT for entry in made.opset_import):
        made.opset_import.add(domain=MICROSOFT, version=1)
    return made


@dataclass(frozen=True, slots=True)
class _Integers:
    """A value or constant of 8-bit integers with the names and numbers of its scale and zero point."""

    name: str
    scale_name: str
    zero_name: str
    scale: np.ndarray
    zero_point: np.ndarray
    axis: int

    @property
    def inputs(self) -> tuple[str, str, str]:
        return self.name, self.scale_name, self.zero_name


class _Rewriter:
    """Edits one graph; lives for one call. Where a value has several readers nothing is absorbed."""

    def __init__(self, graph: onnx.GraphProto, opset: int):
        self.graph = graph
        self.opset = opset
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.makers = {name: node for node in graph.node for name in node.output}
        self.outputs = {value.name for value in graph.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in _read(node):
                self.readers.setdefault(name, []).append(node)
        self.made: dict[str, onnx.NodeProto] = {}  # by the name of the last node that it stands for
        self.gone: set[str] = set()
        self.limits: dict[str, str] = {}  # names of constants by what they are

    def rewrite(self, floats: Collection[str]) -> None:
        for node in self.graph.node:
            if node.domain == "" and node.name not in floats:
                self._try(node)
        nodes = [self.made.get(node.name, node) for node in self.graph.node if node.name not in self.gone]
        nodes = _without_dead(nodes, self.outputs)
        used = {name for node in nodes for name in _read(node)} | self.outputs
        used |= {value.name for value in self.graph.input}
        kept = [tensor for tensor in self.graph.initializer if tensor.name in used]
        made = used | {name for node in nodes for name in node.output}
        told = [value for value in self.graph.value_info if value.name in made]
        del self.graph.node[:], self.graph.initializer[:], self.graph.value_info[:]
        self.graph.value_info.extend(told)
        self.graph.node.extend(nodes)
        self.graph.initializer.extend(kept)

    # --- what is there ----------------------------------------------------------------------------------------

    def _constant(self, name: str) -> np.ndarray | None:
        tensor = self.constants.get(name)
        return None if tensor is None else onnx.numpy_helper.to_array(tensor)

    def _parameters(self, node: onnx.NodeProto, name: str) -> _Integers | None:
        """Of a pair's half on 8 bits, holding `name`."""
        if node.domain != "" or len(node.input) < 3:
            return None
        scale, zero = self._constant(node.input[1]), self._constant(node.input[2])
        if scale is None or zero is None or zero.dtype not in _BYTES:
            return None
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        return _Integers(name, node.input[1], node.input[2], scale, zero, axis)

    def _read_as_integers(self, name: str) -> _Integers | None:
        maker = self.makers.get(name)
        if maker is None or maker.op_type != "DequantizeLinear":
            return None
        return self._parameters(maker, maker.input[0])

    def _activation(self, name: str) -> _Integers | None:
        found = self._read_as_integers(name)
        return found if found is not None and found.scale.ndim == 0 else None

    def _sole_reader(self, name: str) -> onnx.NodeProto | None:
        found = self.readers.get(name, [])
        return found[0] if len(found) == 1 and name not in self.outputs else None

    def _quantized(self, node: onnx.NodeProto) -> tuple[_Integers, list[onnx.NodeProto]] | None:
        """What the node's output becomes, and the nodes up to its QuantizeLinear; None when nothing rounds it."""
        chain, reader = [node], self._sole_reader(node.output[0])
        if reader is not None and reader.op_type in ("Relu", "Clip") and reader.domain == "":
            chain.append(reader)
            reader = self._sole_reader(reader.output[0])
        if reader is None or reader.op_type != "QuantizeLinear":
            return None
        found = self._parameters(reader, reader.output[0])
        sides = [side for name in node.input if (side := self._activation(name)) and side.name not in self.constants]
        if found is None or any(side.zero_point.dtype != found.zero_point.dtype for side in sides):
            return None  # no operator has activations of both types
        if found.scale.ndim or (len(chain) > 1 and not self._saturates_alike(chain[1], found)):
            return None
        return found, [*chain, reader]

    def _saturates_alike(self, activation: onnx.NodeProto, into: _Integers) -> bool:
        """Whether rounding into these integers cuts off what the Relu or Clip(0, c) does."""
        limits, limit = np.iinfo(into.zero_point.dtype), self._limit(activation)
        if limit is None or int(into.zero_point) != limits.min:
            return False
        return limit >= float(into.scale) * (limits.max - limits.min - 0.5)

    def _limit(self, activation: onnx.NodeProto) -> float | None:
        """Upper limit of a Relu, infinite, or Clip from 0 on; None for other limits."""
        if activation.op_type == "Relu":
            return np.inf
        names = [*activation.input[1:], "", ""]
        low, high = self._constant(names[0]), self._constant(names[1])
        if low is None or low.size != 1 or float(low.reshape(())) != 0 or (names[1] and high is None):
            return None
        return np.inf if high is None else float(high.reshape(()))

    # --- what is made of it -----------------------------------------------------------------------------------

    def _try(self, node: onnx.NodeProto) -> None:
        makers: Mapping[str, Callable[[onnx.NodeProto], None]] = {
            "Conv": self._conv, "MatMul": self._matmul, "Gemm": self._gemm, "Add": self._binary, "Mul": self._binary,
            "Concat": self._concat, "Relu": self._cut_off, "Clip": self._cut_off, "MaxPool": self._layout,
            **dict.fromkeys(_UNARY, self._unary), **dict.fromkeys(_LAYOUT, self._layout),
        }  # fmt: skip
        make = makers.get(node.op_type)
        if make is not None and node.name not in self.gone:
            make(node)

    def _replace(
        self, chain: list[onnx.NodeProto], op_type: str, inputs: Iterable[str], output: str, domain: str = MICROSOFT
    ) -> onnx.NodeProto:
        """A node with the name and attributes of the chain's first, in the place of its last."""
        made = onnx.NodeProto(op_type=op_type, domain=domain, name=chain[0].name, input=inputs, output=[output])
        made.attribute.extend(chain[0].attribute)
        self.gone.update(node.name for node in chain[:-1])
        self.made[chain[-1].name] = made
        return made

    def _weight(self, name: str, axis: int, read: _Integers | None) -> _Integers | None:
        """Integers that are constant, with one scale or one along `axis`, of a type that is multiplied with `read`."""
        found = self._read_as_integers(name)
        if found is None or found.name not in self.constants or (found.scale.ndim and found.axis != axis):
            return None
        is_signed = read is None or read.zero_point.dtype == np.int8
        return None if is_signed and found.zero_point.dtype == np.uint8 else found

    def _bias(self, node: onnx.NodeProto, read: _Integers, weight: _Integers) -> str | None:
        """Name of the int32 bias in steps of both scales, '' when there is none; None for what is no such bias."""
        if len(node.input) < 3 or not node.input[2]:
            return ""
        maker = self.makers.get(node.input[2])
        if maker is None or maker.op_type != "DequantizeLinear" or maker.input[0] not in self.constants:
            return None
        scale, steps = self._constant(maker.input[1]), read.scale * weight.scale
        if scale is None or scale.shape != np.shape(steps) or not np.allclose(scale, steps, rtol=1e-6, atol=0):
            return None
        return maker.input[0]

    def _conv(self, node: onnx.NodeProto) -> None:
        read, rounded = self._activation(node.input[0]), self._quantized(node)
        weight = self._weight(node.input[1], 0, read)
        if read is None or weight is None or rounded is None:
            return
        bias, (into, chain) = self._bias(node, read, weight), rounded
        if bias is not None:
            inputs = [*read.inputs, *weight.inputs, into.scale_name, into.zero_name, *([bias] if bias else [])]
            self._replace(chain, "QLinearConv", inputs, into.name, domain="")

    def _gemm(self, node: onnx.NodeProto) -> None:
        is_transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        read = self._activation(node.input[0])
        weight = self._weight(node.input[1], 0 if is_transposed else 1, read)
        if read is None or weight is None:
            return
        bias, rounded = self._bias(node, read, weight), self._quantized(node)
        if bias is None:
            return
        inputs = [*read.inputs, *weight.inputs, bias]
        if rounded is None:
            made = self._replace([node], "QGemm", inputs if bias else inputs[:-1], node.output[0])
        else:
            into, chain = rounded
            made = self._replace(chain, "QGemm", [*inputs, into.scale_name, into.zero_name], into.name)
        kept = [attribute for attribute in made.attribute if attribute.name in ("alpha", "transA", "transB")]
        del made.attribute[:]
        made.attribute.extend(kept)

    def _matmul(self, node: onnx.NodeProto) -> None:
        """With a rounded output QLinearMatMul, with a float one, as in front of an Add of a bias, a product of integers
        that gives floats."""
        read, rounded = self._activation(node.input[0]), self._quantized(node)
        is_constant = node.input[1] in self.makers and self.makers[node.input[1]].input[0] in self.constants
        other = self._weight(node.input[1], 1, read) if is_constant else self._activation(node.input[1])
        if read is None or other is None:
            return
        if rounded is not None:
            into, chain = rounded
            inputs = [*read.inputs, *other.inputs, into.scale_name, into.zero_name]
            self._replace(chain, "QLinearMatMul", inputs, into.name, domain="")
        elif is_constant:
            inputs = [read.name, other.name, read.scale_name, other.scale_name, read.zero_name, other.zero_name]
            self._replace([node], "MatMulIntegerToFloat", inputs, node.output[0])

    def _binary(self, node: onnx.NodeProto) -> None:
        sides, rounded = [self._activation(name) for name in node.input], self._quantized(node)
        if rounded is not None and all(side is not None for side in sides):
            into, chain = rounded
            inputs = [name for side in sides if side is not None for name in side.inputs]
            self._replace(chain, f"QLinear{node.op_type}", [*inputs, into.scale_name, into.zero_name], into.name)

    def _unary(self, node: onnx.NodeProto) -> None:
        read, rounded = self._activation(node.input[0]), self._quantized(node)
        if read is not None and rounded is not None and {a.name for a in node.attribute} <= _UNARY[node.op_type]:
            into, chain = rounded
            inputs = [*read.inputs, into.scale_name, into.zero_name]
            self._replace(chain, f"QLinear{node.op_type}", inputs, into.name)

    def _concat(self, node: onnx.NodeProto) -> None:
        sides, rounded = [self._activation(name) for name in node.input], self._quantized(node)
        if rounded is not None and all(side is not None for side in sides):
            into, chain = rounded
            inputs = [name for side in sides if side is not None for name in side.inputs]
            self._replace(chain, "QLinearConcat", [into.scale_name, into.zero_name, *inputs], into.name)

    def _layout(self, node: onnx.NodeProto) -> None:
        """On integers, between pairs that are equal; further inputs, such as a shape, stay."""
        alike = self._alike(node)
        if alike is not None and (node.op_type != "MaxPool" or self.opset >= _POOL_OPSET) and len(node.output) == 1:
            read, into, chain = alike
            self._replace(chain, node.op_type, [read.name, *node.input[1:]], into.name, domain="")

    def _cut_off(self, node: onnx.NodeProto) -> None:
        """A Relu or Clip(0, c) between equal pairs, which symmetric formats have: Clip on integers."""
        alike, limit = self._alike(node), self._limit(node)
        if alike is None or limit is None or self.opset < _CLIP_OPSET:
            return
        read, into, chain = alike
        most = min(int(np.iinfo(into.zero_point.dtype).max), int(into.zero_point) + np.rint(limit / float(into.scale)))
        inputs = [read.name, into.zero_name, self._integer(np.asarray(most, into.zero_point.dtype))]
        del self._replace(chain, "Clip", inputs, into.name, domain="").attribute[:]

    def _alike(self, node: onnx.NodeProto) -> tuple[_Integers, _Integers, list[onnx.NodeProto]] | None:
        """(what is read, what is made, nodes up to QuantizeLinear) of a node between pairs with the same parameters."""
        read, reader = self._activation(node.input[0]), self._sole_reader(node.output[0])
        if read is None or reader is None or reader.op_type != "QuantizeLinear":
            return None
        into = self._parameters(reader, reader.output[0])
        if into is None or into.zero_point.dtype != read.zero_point.dtype:
            return None
        if not (np.array_equal(into.scale, read.scale) and np.array_equal(into.zero_point, read.zero_point)):
            return None
        return read, into, [node, reader]

    def _integer(self, value: np.ndarray) -> str:
        """Name of a constant of one integer."""
        key = f"{value}{value.dtype.name}"
        if key not in self.limits:
            name = f"c{len(self.limits) + 1}"
            while name in self.constants or name in self.makers or name in self.readers:
                name += "_"
            self.limits[key] = name
            self.constants[name] = onnx.numpy_helper.from_array(value, name)
            self.graph.initializer.append(self.constants[name])
        return self.limits[key]


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads, those that its subgraphs take from outside too."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
            for nested in inner.node:
                yield from _read(nested)
            yield from (value.name for value in inner.output)


def _without_dead(nodes: list[onnx.NodeProto], outputs: set[str]) -> list[onnx.NodeProto]:
    """The nodes but for dequantized values that nobody reads any more."""
    read = {name for node in nodes for name in _read(node)} | outputs
    return [node for node in nodes if node.op_type != "DequantizeLinear" or node.output[0] in read]
