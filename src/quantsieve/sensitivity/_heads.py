"""Heads: groups of layers behind the last tensor that all share, each of which works for some of the results alone.

Results are told apart at the last weighted layers, those with no weighted layer between them and an output: by the
outputs that they reach, else by names or channels that return for each level of a pyramid. A layer belongs to the
results whose last layers it reaches. Layers that reach all are the trunk; what reaches less is a head, the largest sets
first, and only beside another that it does not include: the late stages of a backbone with several outputs are none.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from quantsieve.model.graph import Graph, node_inputs
from quantsieve.model.units import Layer, Structure

_MOST_SHARE = 0.5  # of weighted layers that one head may hold
_NUMBER = re.compile(r"(?:^|(?<=[._/:]))\d+(?=[._/:]|$)")
_SHAPES = ("Shape", "Size")  # what reads the shape of a tensor does not work with it

Kinds = Mapping[str, str]  # last layer -> kind of result


def find_heads(graph: Graph, structure: Structure) -> dict[str, str]:
    """The head, `head/KIND`, of each quantizable layer in one; a kind is named by outputs, names or channels."""
    kinds = _kinds(graph, structure)
    labels = list(dict.fromkeys(kinds.values()))
    bit = {label: 1 << i for i, label in enumerate(labels)}
    mask = _results(graph, {layer: bit[label] for layer, label in kinds.items()})
    of_layer = {layer.name: mask[layer.nodes[0]] for layer in structure.layers}
    total = (1 << len(labels)) - 1
    weighted = [layer.name for layer in structure.layers if layer.is_product]
    parts = {of_layer[name] for name in weighted if of_layer[name] < total}
    largest = [part for part in parts if not any(part != other and part | other == other for other in parts)]
    if len(largest) < 2:
        return {}
    shared = total
    for part in largest:
        shared &= part
    heads = {}
    for part in largest:
        inside = {
            name
            for name, found in of_layer.items()
            if found and found | part == part and sum(found | other == other for other in largest) == 1
        }
        if 1 < sum(name in inside for name in weighted) <= _MOST_SHARE * len(weighted):
            name = "head/" + _join([label for label in labels if bit[label] & part & ~shared])
            heads.update({layer.name: name for layer in structure.quantizable if layer.name in inside})
    return heads


def _join(labels: Sequence[str]) -> str:
    word = " channels"
    if all(label.endswith(word) for label in labels):
        return "+".join(label.removesuffix(word) for label in labels) + word
    return "+".join(labels)


def _results(graph: Graph, own: Mapping[str, int]) -> dict[str, int]:
    """By node, bits of the results that it works for: those that it reaches, or behind them, that it comes from."""
    after: dict[str, int] = {}
    for node in reversed(graph.nodes):
        found = own.get(node.name or "", 0)
        for reader in _readers(graph, node.name or ""):
            found |= after[reader]
        after[node.name or ""] = found
    before: dict[str, int] = {}
    for node in graph.nodes:
        name = node.name or ""
        found = own.get(name, 0)
        for value in node_inputs(node):
            producer = graph.producers.get(value)
            found |= before[producer.name or ""] if producer is not None else 0
        before[name] = found
    return {name: found or before[name] for name, found in after.items()}


def _readers(graph: Graph, node: str) -> list[str]:
    outputs = graph.by_name[node].outputs
    readers = (reader for value in outputs for reader in graph.readers.get(value.name or "", ()))
    return [reader.name or "" for reader in readers if reader.op_type not in _SHAPES]


# --- kinds of results -----------------------------------------------------------------------------------------------


def _kinds(graph: Graph, structure: Structure) -> Kinds:
    """The kind of result that each last layer gives; {} where there is but one."""
    weighted = {layer.nodes[0]: layer for layer in structure.layers if layer.is_product}
    reached: dict[str, frozenset[str]] = {}  # outputs without a weighted layer between
    for node in reversed(graph.nodes):
        name = node.name or ""
        found = {value.name or "" for value in node.outputs if value.name in graph.output_names}
        for reader in _readers(graph, name):
            if reader not in weighted:
                found |= reached[reader]
        reached[name] = frozenset(found)
    last = [layer for node, layer in weighted.items() if reached[node]]
    outputs = {layer.name: frozenset(map(_stem, reached[layer.nodes[0]])) for layer in last}
    if len(set(outputs.values())) > 1:
        return {name: "+".join(sorted(map(_plain, stems))) for name, stems in outputs.items()}
    for labels in (_by_names(last), _by_channels(last)):
        if 1 < len(set(labels.values())) < len(last):  # one that returns, as for levels of a pyramid
            return labels
    alone: dict[str, Hashable] = {layer.name: reached[layer.nodes[0]] for layer in last}
    if len(set(alone.values())) > 1:
        return {layer.name: "+".join(sorted(reached[layer.nodes[0]])) for layer in last}
    return {}


def _by_names(last: Sequence[Layer]) -> dict[str, str]:
    """The first part of the name, numbers aside, that not all have."""
    parts = {layer.name: _stem(layer.name).strip("/").split("/") for layer in last}
    common = set.intersection(*map(set, parts.values())) if parts else set()
    told = {name: [part for part in found if part not in common] for name, found in parts.items()}
    members: dict[str, set[str]] = defaultdict(set)
    for found in told.values():
        members[_plain(found[0]) if found else ""].add("/".join(found))
    is_clear = all(len(stems) == 1 for stems in members.values())
    return {name: _plain(found[0] if is_clear and found else "/".join(found)) for name, found in told.items()}


def _by_channels(last: Sequence[Layer]) -> dict[str, str]:
    sizes = {layer.name: layer.weight_shape[layer.channel_axis or 0 :][:1] for layer in last}  # () of a vector
    return {name: f"{size[0]} channels" if size else "vectors" for name, size in sizes.items()}


def _stem(name: str) -> str:
    return _NUMBER.sub("#", name)


def _plain(stem: str) -> str:
    return re.sub(r"[._/:]*#", "", stem).strip("._/:") or stem
