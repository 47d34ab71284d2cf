"""A read-only view of a prepared model: its nodes in order, who makes and who reads each value, its constants.

The view answers questions; it never changes the model. Values are named by strings, as in the file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class GraphValue:
    """An input or output of the graph. shape: int fixed, str symbolic, None unknown; None when the rank is unknown."""

    name: str
    dtype: str  # numpy's name, 'str' for text
    shape: tuple[int | str | None, ...] | None


class Graph:
    """View of `model`, which the caller does not change while the view is in use."""

    def __init__(self, model: ir.Model):
        self.model = model
        self.nodes: tuple[ir.Node, ...] = tuple(model.graph)
        self.by_name: Mapping[str, ir.Node] = {node.name or "": node for node in self.nodes}
        self.position: Mapping[str, int] = {node.name or "": i for i, node in enumerate(self.nodes)}

    @property
    def opset(self) -> int:
        return self.model.opset_imports.get("", 1)

    @cached_property
    def inputs(self) -> tuple[GraphValue, ...]:
        return tuple(_graph_value(value) for value in self.model.graph.inputs)

    @cached_property
    def outputs(self) -> tuple[GraphValue, ...]:
        return tuple(_graph_value(value) for value in self.model.graph.outputs)

    @cached_property
    def output_names(self) -> frozenset[str]:
        return frozenset(value.name for value in self.outputs)

    @cached_property
    def producers(self) -> Mapping[str, ir.Node]:
        return {value.name: node for node in self.nodes for value in node.outputs if value.name}

    @cached_property
    def readers(self) -> Mapping[str, tuple[ir.Node, ...]]:
        """Nodes of the main graph that read a value, once each; a node reads what its subgraphs read from outside."""
        found: dict[str, dict[str, ir.Node]] = {}
        for node in self.nodes:
            for name in node_inputs(node):
                found.setdefault(name, {})[node.name or ""] = node
        return {name: tuple(nodes.values()) for name, nodes in found.items()}

    def sole_reader(self, name: str) -> ir.Node | None:
        """The only node that reads the value, None when there are several, none, or it is a graph output."""
        readers = self.readers.get(name, ())
        return readers[0] if len(readers) == 1 and name not in self.output_names else None

    def is_constant(self, name: str) -> bool:
        return name in self.model.graph.initializers

    def tensor(self, name: str) -> ir.TensorProtocol | None:
        """The initializer of that name, whose numbers may lie in a file; None when there is none."""
        value = self.model.graph.initializers.get(name)
        return None if value is None else value.const_value

    def constant(self, name: str) -> np.ndarray | None:
        """The initializer of that name as an array (possibly a memory map), None when there is none."""
        tensor = self.tensor(name)
        return None if tensor is None else np.asarray(tensor.numpy())

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of all initializers, in the order of the file."""
        return tuple(self.model.graph.initializers)

    def constant_proto(self, name: str) -> onnx.TensorProto:
        """The initializer of that name."""
        tensor = self.tensor(name)
        assert tensor is not None
        return tensor_proto(name, tensor)

    @cached_property
    def skeleton(self) -> onnx.ModelProto:
        """The model without initializers and without shapes of values in between: they cost bytes, and every runtime
        infers them. Not to be changed."""
        model = ir.to_proto(self.model)
        del model.graph.initializer[:], model.graph.value_info[:]
        found = onnx.ModelProto()
        found.CopyFrom(model)  # what was deleted keeps its memory as long as the message
        return found

    def value(self, name: str) -> ir.Value | None:
        node = self.producers.get(name)
        if node is not None:
            return next(value for value in node.outputs if value.name == name)
        return next((value for value in self.model.graph.inputs if value.name == name), None)

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        """The inferred shape, unknown and symbolic dimensions as None; None when nothing is known."""
        value = self.value(name) or self.model.graph.initializers.get(name)
        if value is None or value.shape is None:
            return None
        return tuple(dim if isinstance(dim, int) else None for dim in value.shape)

    def is_float32(self, name: str) -> bool:
        value = self.value(name) or self.model.graph.initializers.get(name)
        return value is not None and value.dtype == ir.DataType.FLOAT


def node_inputs(node: ir.Node) -> Iterator[str]:
    """Names that a node reads: its inputs without the empty ones, then what its subgraphs take from outside."""
    for value in node.inputs:
        if value is not None and value.name:
            yield value.name
    for graph in _subgraphs(node):
        yield from _outer_names(graph)


def inner_constants(node: ir.Node) -> Iterator[ir.Value]:
    """Initializers that the node's subgraphs hold, at any depth."""
    for graph in _subgraphs(node):
        yield from graph.initializers.values()
        for inner in graph:
            yield from inner_constants(inner)


def has_subgraphs(node: ir.Node) -> bool:
    return next(_subgraphs(node), None) is not None


def _subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def _outer_names(graph: ir.Graph) -> Iterator[str]:
    inner = {value.name for value in graph.inputs} | set(graph.initializers)
    for node in graph:
        for name in node_inputs(node):
            if name not in inner:
                yield name
        inner.update(value.name for value in node.outputs)
    for value in graph.outputs:
        if value.name and value.name not in inner:
            yield value.name


def _graph_value(value: ir.Value) -> GraphValue:
    if value.dtype is None:
        dtype = "float32"
    elif value.dtype == ir.DataType.STRING:
        dtype = "str"
    else:
        dtype = str(value.dtype.numpy())
    shape: tuple[int | str | None, ...] | None = None
    if value.shape is not None:
        shape = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
    return GraphValue(value.name or "", dtype, shape)


def tensor_proto(name: str, tensor: ir.TensorProtocol) -> onnx.TensorProto:
    """The tensor with its numbers, under that name."""
    if tensor.dtype == ir.DataType.STRING:
        return onnx.numpy_helper.from_array(tensor.numpy(), name)
    return onnx.TensorProto(
        name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy(), raw_data=tensor.tobytes()
    )
