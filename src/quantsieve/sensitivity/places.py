"""The groups that layers are found in, from names and from the graph, in three sizes, each a split of the one before.

A stage: blocks of one resolution in a row, or a detection head. A block: what names repeat, a transformer block or what
lies between two nodes that every path passes, or a head where names say nothing more. A half: attention or MLP of a
transformer block.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantsieve.model.graph import Graph
from quantsieve.model.units import Layer, Structure
from quantsieve.sensitivity._halves import ATTENTION, MLP, halves_by_word, transformers, whole
from quantsieve.sensitivity._heads import find_heads
from quantsieve.sensitivity._names import blocks_by_name, stages_by_name
from quantsieve.sensitivity._segments import blocks_by_graph

_LEAST_SHARE = 0.5  # of weighted layers that names must put into blocks, else the graph is asked


@dataclass(frozen=True, slots=True)
class Place:
    """Names of the groups that a layer was found in, from the largest to the smallest; None where it is in none."""

    stage: str | None = None
    block: str | None = None
    half: str | None = None


def find_places(graph: Graph, structure: Structure) -> dict[str, Place]:
    """The place of each quantizable layer."""
    layers = structure.quantizable
    tags = _halves_by_graph(graph, layers)
    heads = find_heads(graph, structure)
    weighted = {layer.name: layer.is_product for layer in layers}
    named = blocks_by_name(weighted)
    is_told = bool(named) and sum(weighted[name] for name in named) >= _LEAST_SHARE * sum(weighted.values())
    blocks = {layer: f"transformer.{number}" for layer, (number, _) in tags.items()}
    blocks = {**blocks, **named} if is_told else {**_within(blocks_by_graph(graph, structure), heads), **blocks}
    halves = _halves(blocks, {layer: half for layer, (_, half) in tags.items()}, [layer.name for layer in layers])
    stages = (stages_by_name(weighted, blocks) if is_told else {}) or _stages_by_size(layers, blocks)
    return {
        name: Place(heads.get(name, stages.get(name)), blocks.get(name, heads.get(name)), halves.get(name))
        for name in weighted
    }


def _within(blocks: Mapping[str, str], heads: Mapping[str, str]) -> dict[str, str]:
    """Blocks that lie in one head or outside them all: behind the first output the last nodes look like a chain."""
    around: dict[str, set[str | None]] = defaultdict(set)
    for layer, block in blocks.items():
        around[block].add(heads.get(layer))
    return {layer: block for layer, block in blocks.items() if len(around[block]) == 1}


def _halves_by_graph(graph: Graph, layers: Sequence[Layer]) -> dict[str, tuple[int, str]]:
    """(number of the transformer block, half) of each layer that is in one."""
    by_position = {}
    for number, (attention, mlp) in enumerate(transformers(graph)):
        by_position.update(dict.fromkeys(attention, (number, ATTENTION)))
        by_position.update(dict.fromkeys(mlp, (number, MLP)))
    places = {layer.name: graph.position[layer.nodes[0]] for layer in layers}
    return {name: by_position[place] for name, place in places.items() if place in by_position}


def _halves(blocks: Mapping[str, str], tags: Mapping[str, str], order: Sequence[str]) -> dict[str, str]:
    """`BLOCK/attention` or `BLOCK/mlp` of each layer of a block that has both: from the graph, or else from names."""
    members: dict[str, list[str]] = defaultdict(list)
    for layer in order:
        if layer in blocks:
            members[blocks[layer]].append(layer)
    found = {}
    for block, layers in members.items():
        known = {layer: tags[layer] for layer in layers if layer in tags}
        split = whole(layers, known) or whole(layers, halves_by_word(layers))
        found.update({layer: f"{block}/{half}" for layer, half in split.items()})
    return found


def _stages_by_size(layers: Sequence[Layer], blocks: Mapping[str, str]) -> dict[str, str]:
    """Blocks in a row whose last layers make one height and width, where these are known and differ somewhere."""
    sizes: dict[str, tuple[int | None, ...]] = {}
    for layer in layers:
        if layer.name in blocks:
            sizes[blocks[layer.name]] = (layer.output_shape or ())[2:]
    runs: list[list[str]] = []
    for block, size in sizes.items():
        if not size or None in size:
            return {}
        if runs and sizes[runs[-1][-1]] == size:
            runs[-1].append(block)
        else:
            runs.append([block])
    if len(runs) < 2:
        return {}
    names = {block: _span(run) for run in runs if len(run) > 1 for block in run}
    return {layer: names[block] for layer, block in blocks.items() if block in names}


def _span(blocks: Sequence[str]) -> str:
    return f"{blocks[0].split(' .. ')[0]} .. {blocks[-1].split(' .. ')[-1]}"
