"""A written file held against what was asked for: layers kept float by hand are there as they were, and each quantized
layer reads its weights from integers.

What a runtime makes of the file is another question: see `targets/audit.py`.
"""

from collections.abc import Collection, Iterator, Mapping

import onnx

from quantsieve.errors import UnsupportedModel
from quantsieve.model.graph import Graph
from quantsieve.model.units import Layer, Structure
from quantsieve.plan import Plan

_INTEGERS = (
    onnx.TensorProto.INT4, onnx.TensorProto.UINT4, onnx.TensorProto.INT8, onnx.TensorProto.UINT8,
    onnx.TensorProto.INT16, onnx.TensorProto.UINT16,
)  # fmt: skip
_FOURTH = ("QLinearConv", "QLinearMatMul", "QGemm")  # whose weight is the fourth input
_BETWEEN = ("DequantizeLinear", "Cast", "Mul")  # what the writer puts between integers and who reads them


def check_written(
    written: onnx.GraphProto, graph: Graph, structure: Structure, plan: Plan, kept: Collection[str]
) -> None:
    """Raises UnsupportedModel when the file does something else than asked; it names the first layer that differs.

    graph: the prepared model. kept: names of layers that have to be float.
    """
    file = _File(written)
    for layer in structure.quantizable:
        if layer.name in kept and plan.is_quantized(layer.name):
            found: str | None = f"the plan makes it {plan.scheme(layer.name)}"
        elif layer.name in kept:
            found = next(file.changes(graph, layer), None)
        else:
            found = file.float_weight(layer) if plan.is_quantized(layer.name) else None
        if found is not None:
            raise UnsupportedModel(
                f"{layer.name} {'float' if layer.name in kept else 'quantized'} in the written file",
                found,
                "The file is not what was asked for: please report it with the model.",
            )


class _File:
    """The written graph by names."""

    def __init__(self, written: onnx.GraphProto):
        self.nodes: Mapping[str, onnx.NodeProto] = {node.name: node for node in written.node}
        self.makers: Mapping[str, onnx.NodeProto] = {name: node for node in written.node for name in node.output}
        self.constants: Mapping[str, onnx.TensorProto] = {tensor.name: tensor for tensor in written.initializer}

    def changes(self, graph: Graph, layer: Layer) -> Iterator[str]:
        """What is not as in the prepared model: nodes, constants, and what passes between the layer's own nodes."""
        inside = {value.name for name in layer.nodes for value in graph.by_name[name].outputs} - {layer.output}
        for name in layer.nodes:
            node, asked = self.nodes.get(name), graph.by_name[name]
            if node is None or node.op_type != asked.op_type:
                yield f"no {asked.op_type} of the name {name}"
                continue
            for index, value in enumerate(asked.inputs):
                wanted = "" if value is None else value.name or ""
                if not (graph.is_constant(wanted) or wanted in inside):
                    continue
                found = node.input[index] if index < len(node.input) else ""
                if found != wanted:
                    yield f"{name} reading {found!r} instead of {wanted!r}"
                elif graph.is_constant(wanted) and not self._holds(graph, wanted):
                    yield f"other numbers in {wanted!r}"

    def _holds(self, graph: Graph, name: str) -> bool:
        tensor, wanted = self.constants.get(name), graph.constant_proto(name)
        return tensor is not None and tensor.SerializeToString() == wanted.SerializeToString()

    def float_weight(self, layer: Layer) -> str | None:
        """Why the layer's weight is not read from integers; None when it is, or when there is none."""
        if layer.weight is None:
            return None
        node = self.nodes.get(layer.nodes[0])
        if node is None:
            return f"no {layer.op_type} of the name {layer.nodes[0]}"
        weight = node.input[0 if layer.is_lookup else 3 if node.op_type in _FOURTH else 1]
        return None if self._is_made_of_integers(weight) else f"its weight as {weight!r}"

    def _is_made_of_integers(self, name: str) -> bool:
        while name not in self.constants:
            maker = self.makers.get(name)
            if maker is None or maker.op_type not in _BETWEEN:
                return False
            name = maker.input[0]
        return self.constants[name].data_type in _INTEGERS
