"""Which nodes of the user's own file a layer stands for: between what the layer reads and what it makes.

A layer is a fused group of the prepared model, where a BatchNorm may have been folded away, a node renamed or a
function inlined. Values keep their names, so in the original graph the layer is what lies between them on a path of
activations; constants and what only makes weights do not belong to it. A value that the original lacks, as within a
function that was inlined, stands for those around it that the original has: then the layer is the call.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from quantsieve.model.graph import Graph, node_inputs
from quantsieve.model.units import Layer, reads


def original_nodes(
    graph: Graph, prepared: Graph, layers: Sequence[Layer], given: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """By layer, names of its nodes in the original, in graph order; () where none has a name there.

    graph: of the original file. prepared: where the layers are. given: name the user gave, by name in the prepared
    model, where they differ.
    """
    found = original_positions(graph, prepared, layers, given)
    names = {layer: [graph.nodes[i].name or "" for i in positions] for layer, positions in found.items()}
    return {layer: tuple(dict.fromkeys(name for name in own if name)) for layer, own in names.items()}


def original_positions(
    graph: Graph, prepared: Graph, layers: Sequence[Layer], given: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """By layer, positions of its nodes in the original, in graph order; arguments as for `original_nodes`."""
    fed = {value.name for value in graph.inputs if not graph.is_constant(value.name)}
    active = set()  # positions of nodes that depend on an input
    for index, node in enumerate(graph.nodes):
        if not fed.isdisjoint(node_inputs(node)):
            active.add(index)
            fed.update(value.name or "" for value in node.outputs)
    makers = {value.name: i for i, node in enumerate(graph.nodes) for value in node.outputs if value.name}
    named: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        named.setdefault(node.name or "", []).append(index)
    found = {}
    for layer in layers:
        positions = _between(graph, prepared, makers, active, layer)
        if not positions:
            names = [given.get(name, name) for name in layer.nodes]
            positions = {index for name in names if name for index in named.get(name, ())}
        found[layer.name] = tuple(sorted(positions))
    return found


def _between(graph: Graph, prepared: Graph, makers: Mapping[str, int], active: set[int], layer: Layer) -> set[int]:
    """Positions of the nodes on paths from the layer's inputs to its output; empty where no such value is known."""
    known = {*makers, *(value.name for value in graph.inputs)}
    inputs = layer.inputs or reads(prepared, layer)  # a lookup, and what cannot be quantized, have none
    ends = _nearest(inputs, known, lambda name: _reads_of(prepared, name))
    waiting, positions = list(_nearest([layer.output], known, lambda name: _made_from(prepared, name))), set()
    while waiting:
        name = waiting.pop()
        index = makers.get(name)
        if name in ends or index is None or index not in active or index in positions:
            continue
        positions.add(index)
        waiting += node_inputs(graph.nodes[index])
    return positions


def _nearest(names: Iterable[str], known: set[str], onward: Callable[[str], Iterable[str]]) -> set[str]:
    """The values, with those that are unknown replaced by the first known ones onward from them."""
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += onward(name) if name not in known else ()
    return seen & known


def _reads_of(prepared: Graph, name: str) -> Iterable[str]:
    producer = prepared.producers.get(name)
    return () if producer is None else node_inputs(producer)


def _made_from(prepared: Graph, name: str) -> Iterable[str]:
    return [value.name or "" for reader in prepared.readers.get(name, ()) for value in reader.outputs]
