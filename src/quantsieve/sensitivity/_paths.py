"""Paths of activations through a graph: which nodes depend on an input, and what lies between two values."""

from quantsieve.model.graph import Graph, node_inputs
from quantsieve.model.units import WEIGHTED


class Paths:
    """Nodes of one graph by position."""

    def __init__(self, graph: Graph):
        self.nodes = graph.nodes
        self.reads = [tuple(node_inputs(node)) for node in graph.nodes]
        self.maker = {value.name: i for i, node in enumerate(graph.nodes) for value in node.outputs if value.name}
        self._active = {value.name for value in graph.inputs if not graph.is_constant(value.name)}
        for node, names in zip(graph.nodes, self.reads, strict=True):
            if not self._active.isdisjoint(names):
                self._active.update(value.name for value in node.outputs if value.name)
        self.is_weighted = [self._has_fixed_operand(index) for index in range(len(self.nodes))]

    def is_active(self, name: str) -> bool:
        """Whether a value depends on an input of the graph."""
        return name in self._active

    def _has_fixed_operand(self, index: int) -> bool:
        return self.nodes[index].op_type in WEIGHTED and not all(map(self.is_active, self.reads[index][:2]))

    def is_product(self, index: int) -> bool:
        """Whether a node multiplies matrices of which none is fixed, or is an attention in one."""
        node, names = self.nodes[index], self.reads[index]
        if "Attention" in node.op_type:
            return True
        return node.op_type in ("MatMul", "Einsum") and len(names) > 1 and all(map(self.is_active, names))

    def made_at(self, name: str) -> int:
        """Position of the node that makes a value; -1 for an input of the graph."""
        return self.maker.get(name, -1)

    def between(self, start: str, end: str) -> frozenset[int]:
        """Nodes on the paths from one value to another, those that read `start` and make `end` included."""
        first = self.made_at(start)
        waiting, before = [end], set()
        while waiting:
            index = self.made_at(waiting.pop())
            if index > first and index not in before:
                before.add(index)
                waiting += self.reads[index]
        made, found = {start}, set()
        for index in sorted(before):
            if not made.isdisjoint(self.reads[index]):
                found.add(index)
                made.update(value.name for value in self.nodes[index].outputs if value.name)
        return frozenset(found)
