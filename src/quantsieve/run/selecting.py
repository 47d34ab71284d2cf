"""The layers of a prepared model against the nodes of the user's own file, and what a selection keeps float of them."""

from collections.abc import Mapping
from pathlib import Path

from quantsieve.model.graph import Graph
from quantsieve.model.load import open_model
from quantsieve.model.units import Structure, is_layout
from quantsieve.selection import Node, Selected, Selection, Unit, select
from quantsieve.sensitivity.origin import original_positions


def select_layers(
    selection: Selection, original: Path, prepared: Graph, structure: Structure, given: Mapping[str, str]
) -> Selected:
    """What the selection keeps float. given: name the user gave, by name in the prepared model, where they differ.

    Raises UsageError for an entry that matches nothing.
    """
    graph = Graph(open_model(original))
    nodes = [Node(node.name or "", node.op_type, is_layout(node)) for node in graph.nodes]
    places = original_positions(graph, prepared, structure.layers, given)
    units = [Unit(layer.name, layer.op_type, places[layer.name], layer.refusal) for layer in structure.layers]
    return select(selection, nodes, units)
