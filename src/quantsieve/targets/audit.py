"""What onnxruntime really ran: the graph it saved after optimizing, mapped back to the nodes of the file.

Seen in onnxruntime 1.32: a fused kernel keeps the name of its heavy node (QLinearConv, QGemm, FusedConv) or
gets a suffix or prefix (`NAME_token_7` in NHWC, `NAME/MatMulAddFusion`, `fused NAME`); NCHWc kernels are
named by their *output tensor* (`TENSOR_nchwc`), which may be that of the fused activation; tensors are
renamed in both layouts. So: by name, then by tensor, and what the layout passes hid is looked up in the graph
without them. They change no precision.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from quantsieve.targets.base import Audit, Precision

_NOT_LAYERS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Constant"})
_NCHWC = "com.microsoft.nchwc"
_QDQ = frozenset({"QuantizeLinear", "DequantizeLinear"})
_WEIGHT_ONLY = frozenset({"MatMulNBits", "MatMulBnb4", "GatherBlockQuantized", "MatMulFpQ4"})
_INTEGER = re.compile(
    r"QLinear\w+|QGemm|QAttention|QOrdered\w+|\w+Integer|MatMulIntegerToFloat|MatMulInteger16|ConvIntegerToFloat"
    r"|DynamicQuantize(MatMul|LSTM)|QEmbedLayerNormalization|NhwcMaxPool|QMoE"
)
# Integer kernels whose result is float or int32; a following node is judged on its own.
_FLOAT_RESULT = re.compile(r"\w+ToFloat|DynamicQuantize\w+|\w+Integer(16)?|QAttention|QEmbed\w+|QMoE")
_SUFFIX = re.compile(r"(_token_\d+|_nchwc|/MatMulAddFusion|/Mat[Mm]ulTransposeFusion/?|/duplicated)$")
_FAMILIES = (
    ("Conv", re.compile(r"\w*ConvTranspose\w*|\w*Conv\w*")),
    ("MatMul", re.compile(r"\w*MatMul\w*|\w*Gemm")),
)


def audit_graph(original: onnx.GraphProto, ran: onnx.GraphProto, plain: onnx.GraphProto | None = None) -> Audit:
    """The precision that each node of `original` ran at in `ran`.

    ran: what the runtime saved at the level and with the options that measure.
    plain: what it saved without layout passes, same otherwise; asked only for nodes that `ran` does not show.
    """
    index = _Original.of(original)
    found = _precisions(index, ran)
    if plain is not None:
        found = {**_precisions(index, plain), **found}
    counts = Counter(f"{node.domain}:{node.op_type}" if node.domain else node.op_type for node in ran.node)
    return Audit(
        ran=tuple((label, found.get(label, "gone")) for label in index.nodes),
        op_counts=tuple(sorted(counts.items())),
        boundaries=_boundaries(ran),
    )


class Origins:
    """Nodes of an optimized graph, one after the other, traced back to the file."""

    def __init__(self, original: onnx.GraphProto):
        self._index = _Original.of(original)

    def label(self, node: onnx.NodeProto) -> str | None:
        """The node of the file that a kernel stands for: the heavy one of several; None for what has no node there."""
        label = self._index.named(node.name) if node.domain != _NCHWC else None
        if label is not None and _fits(self._index.nodes[label].op_type, node.op_type):
            return label
        made = _made_tensor(node)
        *_, last = ("", *self._index.upstream(made, _family(node.op_type), {}))
        return last or self._index.producer.get(self.tensor(made))

    def tensor(self, name: str) -> str:
        """The float tensor of the file that an integer one holds; the name itself for others."""
        return self._index.quantized_from.get(name, name)


def audit_layers(audit: Audit, layers: Mapping[str, Sequence[str]]) -> dict[str, Precision]:
    """The precision of each layer, given the names of its nodes; KeyError for names that the file lacks."""
    return {layer: audit.precision(nodes) for layer, nodes in layers.items()}


@dataclass(frozen=True, slots=True)
class _Original:
    """The file's nodes by label and by output tensor, and the Q outputs that follow a tensor."""

    nodes: dict[str, onnx.NodeProto] = field(default_factory=dict)
    producer: dict[str, str] = field(default_factory=dict)
    quantized_as: dict[str, list[str]] = field(default_factory=dict)
    quantized_from: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> _Original:
        index = cls()
        for node in graph.node:
            if node.op_type == "QuantizeLinear":
                index.quantized_as.setdefault(node.input[0], []).append(node.output[0])
                index.quantized_from[node.output[0]] = node.input[0]
            if node.op_type in _NOT_LAYERS:
                continue
            label = node.name or next(filter(None, node.output), "")
            index.nodes[label] = node
            index.producer.update((tensor, label) for tensor in node.output if tensor)
        return index

    def named(self, name: str) -> str | None:
        """The label that a name of the optimized graph goes back to, or None."""
        while name:
            if name in self.nodes:
                return name
            shorter = _SUFFIX.sub("", name).removeprefix("fused ")
            if shorter == name:  # a fusion that we do not know may have added `/Something`
                shorter = name.rpartition("/")[0]
            name = shorter
        return None

    def upstream(self, tensor: str, family: str, taken: Mapping[str, object]) -> Iterator[str]:
        """Labels from the producer of `tensor` up to the nearest node of `family`; nothing without one.

        tensor: an output of a node, or of the QuantizeLinear behind it.
        """
        last = self.producer.get(self.quantized_from.get(tensor, tensor))
        frontier: list[tuple[str, ...]] = [(last,)] if last is not None and family else []
        seen: set[str] = set()
        while frontier:
            path = frontier.pop(0)
            node = self.nodes[path[-1]]
            if _family(node.op_type) == family:
                yield from path
                return
            for label in (self.producer[name] for name in node.input if name in self.producer):
                if label not in seen and label not in taken:
                    seen.add(label)
                    frontier.append((*path, label))


def _family(op_type: str) -> str:
    return next((name for name, pattern in _FAMILIES if pattern.fullmatch(op_type)), "")


def _precisions(index: _Original, graph: onnx.GraphProto) -> dict[str, Precision]:
    """Precision by label, for all nodes of the file that the optimized graph still shows."""
    made = _made(graph)
    found: dict[str, Precision] = {}
    nameless: list[tuple[onnx.NodeProto, Precision]] = []
    for node, precision in made:
        label = index.named(node.name) if node.domain != _NCHWC else None
        if label is not None and _fits(index.nodes[label].op_type, node.op_type):
            found.setdefault(label, precision)
        else:
            nameless.append((node, precision))
    for node, precision in nameless:
        for label in index.upstream(_made_tensor(node), _family(node.op_type), found):
            found.setdefault(label, precision)
    by_tensor = {tensor: precision for node, precision in made for tensor in node.output if tensor}
    for tensor, label in index.producer.items():
        names = [tensor, *index.quantized_as.get(tensor, ())]
        made_by = next((name for name in names if name in by_tensor), None)
        if made_by is not None:
            found.setdefault(label, by_tensor[made_by])
    return found


def _made_tensor(node: onnx.NodeProto) -> str:
    # Layout passes rename the tensors, but name an NCHWc kernel after the one it had.
    return node.name.removesuffix("_nchwc") if node.domain == _NCHWC else next(iter(node.output), "")


def _fits(original: str, made: str) -> bool:
    # A name may be shared with a tensor or a prefix of another name: heavy kernels must be of one family.
    return _family(original) in ("", _family(made))


def _made(graph: onnx.GraphProto) -> list[tuple[onnx.NodeProto, Precision]]:
    """Each node of the optimized graph with its precision, in its order; a Q that stayed is 'float'."""
    quantized: set[str] = set()
    made: list[tuple[onnx.NodeProto, Precision]] = []
    for node in graph.node:
        precision = _precision(node, quantized)
        is_integer = precision == "int8" and not _FLOAT_RESULT.fullmatch(node.op_type)
        if is_integer and node.op_type == "QGemm":
            is_integer = len(node.input) > 7  # with y_scale; without one QGemm returns float
        if is_integer or node.op_type == "QuantizeLinear":
            quantized.update(filter(None, node.output))
        made.append((node, precision))
    return made


def _precision(node: onnx.NodeProto, quantized: set[str]) -> Precision:
    if node.op_type in _QDQ:
        return "float"
    if node.op_type in _WEIGHT_ONLY:
        return "weight-only"
    # MaxPool, Transpose, Reshape and their like have one kernel for all types: what they read decides.
    reads_integers = bool(node.input) and node.input[0] in quantized
    return "int8" if reads_integers or _INTEGER.fullmatch(node.op_type) else "float"


def _boundaries(graph: onnx.GraphProto) -> int:
    constants = {tensor.name for tensor in graph.initializer}
    return sum(node.op_type in _QDQ and node.input[0] not in constants for node in graph.node)
