"""What the rules of a backward graph build with: a node as they see it, and the graph under way."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from quantsieve.model import aside
from quantsieve.model.execute import Executor, make_model
from quantsieve.model.graph import node_inputs

Arrays = Mapping[str, np.ndarray]
Cotangents = Sequence[str | None]  # by output of a node
OPSET = 18
SEED = "/seed/"  # before the name of an output: its cotangent


class NoGradient(Exception):
    """The model cannot be run backwards. Holds the reason."""


class Node:
    """inputs: names, '' where left out."""

    def __init__(self, node: ir.Node):
        self.inputs = [value.name or "" if value is not None else "" for value in node.inputs]
        self.outputs = [value.name or "" for value in node.outputs]
        self.op_type = node.op_type
        self.name = node.name or ""
        self.attributes = {
            name: helper.get_attribute_value(ir.to_proto(attribute)) for name, attribute in node.attributes.items()
        }

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)


class Builder:
    """Nodes, constants and reads of a backward graph; `wanted`: values that a target reaches, as floats; `given`: large
    constants, which are fed to every run, so that those in files need no copy."""

    def __init__(self, executor: Executor, values: Arrays, targets: set[str]):
        self.graph = executor.graph
        self.values = values
        self.reads: dict[str, None] = {}
        self.given: dict[str, np.ndarray] = {}
        self.wanted = set(targets)
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._parts: dict[str, list[str]] = {}
        for node in self.graph.nodes:
            if any(name in self.wanted for name in node_inputs(node)):
                made = [value.name or "" for value in node.outputs]
                self.wanted |= {name for name in made if name in values and values[name].dtype.kind == "f"}
        if any(values[name].dtype != np.float32 for name in self.wanted if name in values):
            raise NoGradient("values that are not float32")

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """The value of a new node."""
        return self._made(op_type, inputs, 1, attributes)

    def second(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """The second value of a new node."""
        return self._made(op_type, inputs, 2, attributes)

    def _made(self, op_type: str, inputs: Sequence[str], count: int, attributes: Mapping[str, Any]) -> str:
        names = [f"/backward/{len(self._nodes)}/{index}" for index in range(count)]
        self._nodes.append(helper.make_node(op_type, inputs, names, **attributes))
        return names[-1]

    def ints(self, *values: int) -> str:
        return self.array(np.asarray(values, np.int64))

    def number(self, value: float) -> str:
        return self.array(np.asarray(value, np.float32))

    def array(self, array: np.ndarray) -> str:
        name = f"/constant/{len(self._constants)}"
        self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        constant = self.graph.constant(name)
        return tuple((self.values[name] if constant is None else constant).shape)

    def value(self, name: str) -> str:
        """A value of the forward run, to be read."""
        constant = self.graph.constant(name)
        if constant is None:
            self.reads[name] = None
        elif constant.nbytes > aside.LARGE:
            self.given[name] = constant
        elif name not in self._constants:
            self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(constant), name)
        return name

    def constant(self, node: Node, index: int) -> np.ndarray:
        """An input that has to be an initializer. Raises NoGradient."""
        found = self.graph.constant(node.inputs[index])
        if found is None:
            raise NoGradient(f"the operator {node.op_type} reads a computed value where it should read a constant")
        return found

    def add(self, name: str, cotangent: str) -> None:
        self._parts.setdefault(name, []).append(cotangent)

    def cotangent(self, name: str) -> str | None:
        parts = self._parts.get(name, [])
        if len(parts) > 1:
            self._parts[name] = parts = [self.op("Sum", *parts)]
        return parts[0] if parts else None

    def summed(self, cotangent: str, shape: Sequence[int], wanted: Sequence[int]) -> str:
        """A cotangent of a broadcast value, summed to the value's own shape."""
        if tuple(shape) == tuple(wanted):
            return cotangent
        lead = len(shape) - len(wanted)
        axes = [a for a in range(len(shape)) if a < lead or (wanted[a - lead] == 1 and shape[a] != 1)]
        if axes:
            cotangent = self.op("ReduceSum", cotangent, self.ints(*axes), keepdims=1)
        return self.op("Reshape", cotangent, self.ints(*wanted))

    def model(self, seeds: Iterable[str], outputs: Iterable[str]) -> onnx.ModelProto:
        read = {name: self.values[name] for name in self.reads} | self.given
        elem = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in read.items()}
        types = {name: helper.make_tensor_type_proto(found, None) for name, found in elem.items()}
        types |= {SEED + name: helper.make_tensor_type_proto(TensorProto.FLOAT, None) for name in seeds}
        names = tuple(dict.fromkeys(outputs))
        return make_model(self._nodes, types, names, list(self._constants.values()), [("", OPSET)], 8)
