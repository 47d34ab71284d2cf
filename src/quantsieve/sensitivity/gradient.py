"""Gradients of the outputs at chosen values, by a graph of standard operators that runs the model backwards.

For a function y(x), the cotangent of x is c_x = J^T c_y, where J = dy/dx: <c_y, J d> = <c_x, d> for any small d, so
that one backward run tells what every small change anywhere does to one combination of the outputs. A node adds
c_in = J_node^T c_out to each of its inputs; `RULES` holds that product for each operator. Operators without a rule, on
the way from a chosen value to an output, are refused with their name. Shapes are those of one batch.

Two sessions: forward, which gives every value, and backward, which reads those that its rules need.
"""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from quantsieve.errors import UnsupportedModel
from quantsieve.model.aside import folder_of
from quantsieve.model.execute import Executor, Piece, piece_options
from quantsieve.model.graph import has_subgraphs, node_inputs
from quantsieve.sensitivity._backward import SEED, Arrays, Builder, Node
from quantsieve.sensitivity._backward import NoGradient as NoGradient
from quantsieve.sensitivity._rules import RULES


class Forward:
    """The model in one session that gives all its values. Raises NoGradient, as all here does."""

    def __init__(self, executor: Executor):
        graph = executor.graph
        model = ir.to_proto(graph.model)
        have = {output.name for output in model.graph.output}
        made = [name for node in model.graph.node for name in node.output if name in executor.types]
        tensors = [name for name in made if executor.types[name].HasField("tensor_type")]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in have)
        options = piece_options()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        self._piece = _opened("the forward run", model, options, folder=folder_of(graph.model))

    def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Every tensor that a node makes, and the feeds."""
        return dict(feeds) | _ran(self._piece, feeds)


class Backward:
    """The backward graph of one model for one batch shape."""

    def __init__(self, executor: Executor, values: Arrays, targets: Sequence[str], outputs: Sequence[str]):
        """values: of a forward run; targets: values whose cotangents are asked for; outputs: that are seeded."""
        graph = executor.graph
        builder = Builder(executor, values, set(targets))
        for name in outputs:
            if name in builder.wanted:
                builder.add(name, SEED + name)
        for node in reversed(graph.nodes):
            names = [value.name or "" for value in node.outputs]
            cotangents = [builder.cotangent(name) for name in names]
            reads = [value.name if value is not None else None for value in node.inputs]
            if not any(cotangents) or not any(name in builder.wanted for name in node_inputs(node)):
                continue
            rule = RULES.get(node.op_type) if node.domain == "" and not has_subgraphs(node) else None
            if rule is None:
                raise NoGradient(f"the operator {node.op_type} has no rule")
            for index, cotangent in rule(builder, Node(node), cotangents).items():
                if reads[index] in builder.wanted:
                    builder.add(reads[index] or "", cotangent)
        self.reached = tuple(name for name in dict.fromkeys(targets) if builder.cotangent(name))
        if not self.reached:
            raise NoGradient("no value changes an output but by steps")
        self._outputs = {name: builder.cotangent(name) or "" for name in self.reached}
        self._seeds = tuple(name for name in outputs if name in builder.wanted)
        self._reads = tuple(builder.reads)
        model = builder.model(self._seeds, self._outputs.values())
        self._piece = _opened("the backward run", model, piece_options(), builder.given)

    def run(self, values: Arrays, seeds: Arrays) -> dict[str, np.ndarray]:
        """Cotangents of the targets that reach an output, shaped as the targets. seeds: by output, shaped as it."""
        feeds = {name: values[name] for name in self._reads} | {SEED + name: seeds[name] for name in self._seeds}
        made = _ran(self._piece, feeds)
        return {name: made[cotangent] for name, cotangent in self._outputs.items()}


def _opened(
    name: str,
    model: onnx.ModelProto,
    options: onnxruntime.SessionOptions,
    given: Arrays = MappingProxyType({}),
    folder: Path | None = None,
) -> Piece:
    try:
        return Piece(name, model, options, given, folder)
    except UnsupportedModel as error:
        raise NoGradient(f"onnxruntime refuses {name}: {error.__cause__}"[:300]) from error


def _ran(piece: Piece, feeds: Arrays) -> dict[str, np.ndarray]:
    try:
        return piece.arrays(feeds)
    except Exception as error:  # onnxruntime raises classes of its own without a common base
        raise NoGradient(f"{piece.name} fails: {error}"[:300]) from error
