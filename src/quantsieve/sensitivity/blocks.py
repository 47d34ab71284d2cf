"""Layers in groups, and a score for a group: by operator, by a map of regular expressions, or found automatically.

Found by names: a block is a path up to a number, `/layer1/layer1.0` or `block3a`, whose siblings (the same path with
another number) hold several weighted layers too and repeat a name inside; of several such paths in a name the longest
counts. Where names say nothing, by the graph: what lies between two nodes that every path passes, with more than one
weighted layer, is a block; in a residual network these are its stages.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantsieve.errors import InputError, UsageError
from quantsieve.model.graph import Graph, node_inputs
from quantsieve.model.units import Structure

Names = Mapping[str, bool]  # of layers in graph order -> whether it has weights

AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "max": max,
    "mean": lambda values: math.fsum(values) / len(values),
}

# A number that ends a component or a word of it, with one small letter of a variant: `layer.5`, `block_3_`, `block3a_`.
_NUMBER = re.compile(r"(?<!\d)\d+[a-z]?(?=[_/.]|$)")
_MOST_SHARE = 0.5  # of weighted layers that a segment of the graph may hold: a whole neck with its heads is no block
_LEAST_SHARE = 0.5  # of weighted layers that names must put into blocks, else the graph is asked


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are decided together."""

    name: str
    layers: tuple[str, ...]


def aggregate(how: str, values: Sequence[float]) -> float:
    """The score of a group from those of its layers. Raises UsageError for another word than sum, max or mean."""
    if how not in AGGREGATES:
        raise UsageError(f"one of {', '.join(AGGREGATES)}", repr(how), "Choose how scores of a block are put together.")
    return float(AGGREGATES[how](values))


# --- groups ---------------------------------------------------------------------------------------------------------


def group(layers: Sequence[str], blocks: Mapping[str, str | None]) -> tuple[Group, ...]:
    """Groups in the order of their first layers; a layer without a block stands alone under its own name."""
    members: dict[tuple[bool, str], list[str]] = {}
    for layer in layers:
        block = blocks.get(layer)
        members.setdefault((block is not None, layer if block is None else block), []).append(layer)
    return tuple(Group(name, tuple(found)) for (_, name), found in members.items())


def match(layers: Sequence[str], patterns: Mapping[str, str]) -> dict[str, str]:
    """The block of each layer that some pattern is found in; the first pattern that matches wins.

    patterns: name of the block -> regular expression, searched anywhere in the layer's name.
    Raises InputError for an expression that is none.
    """
    compiled = {}
    for name, pattern in patterns.items():
        try:
            compiled[name] = re.compile(pattern)
        except re.error as error:
            raise InputError(
                f"a regular expression for the block {name}", f"{pattern!r} ({error})", "Correct the map of blocks."
            ) from error
    found = {}
    for layer in layers:
        block = next((name for name, pattern in compiled.items() if pattern.search(layer)), None)
        if block is not None:
            found[layer] = block
    return found


# --- found automatically --------------------------------------------------------------------------------------------


def find_blocks(graph: Graph, structure: Structure) -> dict[str, str]:
    """The block of each quantizable layer that has one, from the names, or from the graph where they say nothing."""
    weighted = {layer.name: layer.weight is not None for layer in structure.quantizable}
    named = blocks_by_name(weighted)
    told = sum(weighted[name] for name in named)
    if told >= _LEAST_SHARE * sum(weighted.values()) and named:
        return named
    return blocks_by_graph(graph, structure)


def blocks_by_name(weighted: Names) -> dict[str, str]:
    """The block of each layer whose name says one that holds others too."""
    members: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for layer, has_weights in weighted.items():
        if has_weights:
            for family, prefix in _prefixes(layer):
                members[family][prefix].add(layer)
    accepted = {family for family, found in members.items() if _repeats(found)}
    first = {family[:-2]: family for family in accepted if family.endswith("_#")}  # `block` beside `block_1`, `block_2`
    blocks = {}
    for layer in weighted:
        found = [prefix for family, prefix in _prefixes(layer) if family in accepted]
        found = found or [stem for stem in first if layer.startswith((f"{stem}/", f"{stem}."))]
        if found:
            blocks[layer] = max(found, key=len)
    sizes = Counter(blocks.values())
    return {layer: block for layer, block in blocks.items() if sizes[block] > 1}


def _prefixes(name: str) -> Iterator[tuple[str, str]]:
    """(family, block) for each number in a name: the block is the name up to it, the family has # in its place."""
    for number in _NUMBER.finditer(name):
        yield f"{name[: number.start()]}#", name[: number.end()]


def _repeats(members: Mapping[str, set[str]]) -> bool:
    """Whether two siblings hold several layers and share a name inside, numbers aside."""
    insides = [
        {re.sub(r"\d+", "#", layer[len(prefix) :]) for layer in layers}
        for prefix, layers in members.items()
        if len(layers) > 1
    ]
    seen: set[str] = set()
    for inside in insides:
        if seen & inside:
            return True
        seen |= inside
    return False


def blocks_by_graph(graph: Graph, structure: Structure) -> dict[str, str]:
    """The block of each layer between two neighbouring cut nodes that have several weighted layers between them, but
    not most of the network's."""
    segment_of = _segments(graph)
    members: dict[int, list[str]] = defaultdict(list)
    weighted: dict[int, int] = defaultdict(int)
    for layer in structure.quantizable:
        segment = segment_of[layer.nodes[0]]
        members[segment].append(layer.name)
        weighted[segment] += layer.weight is not None
    blocks = {}
    for segment, layers in members.items():
        if 1 < weighted[segment] <= _MOST_SHARE * sum(weighted.values()):
            blocks.update(dict.fromkeys(layers, f"{layers[0]} .. {layers[-1]}"))
    return blocks


def _segments(graph: Graph) -> dict[str, int]:
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
