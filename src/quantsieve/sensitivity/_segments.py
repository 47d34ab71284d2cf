"""Blocks told by the graph alone: what lies between two nodes that every path passes.

In a residual network these are its blocks. More than one weighted layer has to lie there, and not most of them.
"""

from collections import defaultdict

from quantsieve.model.graph import Graph, node_inputs
from quantsieve.model.units import Structure

_MOST_SHARE = 0.5  # of weighted layers that a segment of the graph may hold: a whole neck with its heads is no block


def blocks_by_graph(graph: Graph, structure: Structure) -> dict[str, str]:
    """The block of each layer between two neighbouring cut nodes that have several weighted layers between them, but
    not most of the network's."""
    segment_of = segments(graph)
    members: dict[int, list[str]] = defaultdict(list)
    weighted: dict[int, int] = defaultdict(int)
    for layer in structure.quantizable:
        segment = segment_of[layer.nodes[0]]
        members[segment].append(layer.name)
        weighted[segment] += layer.is_product
    blocks = {}
    for segment, layers in members.items():
        if 1 < weighted[segment] <= _MOST_SHARE * sum(weighted.values()):
            blocks.update(dict.fromkeys(layers, f"{layers[0]} .. {layers[-1]}"))
    return blocks


def segments(graph: Graph) -> dict[str, int]:
    """By node, the number of its segment; a segment ends with a cut node.

    In any topological order a node lies on every path exactly when no edge jumps over it. Inputs of the graph are no
    nodes: a mask that every layer reads binds nothing.
    """
    reach = [0] * len(graph.nodes)  # position of the last reader
    for node in graph.nodes:
        for name in node_inputs(node):
            producer = graph.producers.get(name)
            if producer is not None:
                source = graph.position[producer.name or ""]
                reach[source] = max(reach[source], graph.position[node.name or ""])
    found: dict[str, int] = {}
    segment = furthest = 0
    for index, node in enumerate(graph.nodes):
        found[node.name or ""] = segment
        if furthest <= index:  # no edge from before jumps over it
            segment += 1
        furthest = max(furthest, reach[index])
    return found
