"""Transformer blocks in a graph, and their two halves.

A residual Add sums a value and what a branch makes of the same value. A branch in which activations are multiplied with
each other twice, queries with keys and the result with values, is attention; several in a row (to itself, then to an
encoder) are one. The next branch behind, with two weighted layers or more, without such products and with nothing
weighted in between, is the block's MLP. Norms, biases of position and masks lie where they may.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantsieve.model.graph import Graph
from quantsieve.sensitivity._paths import Paths

ATTENTION, MLP = "attention", "mlp"

_ATTENTION_WORD = re.compile(r"att(n|ention)", re.IGNORECASE)
_MLP_WORD = re.compile(r"mlp|ffn|feed_?forward|intermediate|(?<![a-z])(fc|linear)_?[12](?!\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Residual:
    """Positions of an Add and of the nodes of its branch, the Add included; name of the value that jumps over it."""

    add: int
    shortcut: str
    branch: frozenset[int]


def transformers(graph: Graph) -> list[tuple[frozenset[int], frozenset[int]]]:
    """Positions of the nodes of both halves, attention and MLP, of each transformer block in graph order."""
    paths = Paths(graph)
    if not any(map(paths.is_product, range(len(paths.nodes)))):  # each sum costs a walk over what it jumps over
        return []
    found: list[tuple[frozenset[int], frozenset[int]]] = []
    attentions: list[_Residual] = []  # of the block that has no MLP yet
    adds: set[int] = set()  # of all attentions
    for residual in _residuals(paths):
        products = sum(paths.is_product(index) for index in residual.branch)
        weighted = sum(paths.is_weighted[index] for index in residual.branch)
        follows = bool(attentions) and _is_next(paths, attentions[-1], residual)
        if (products > 1 or _is_fused(paths, residual)) and adds.isdisjoint(residual.branch):
            attentions = [*attentions, residual] if follows else [residual]
            adds.add(residual.add)
        elif follows and weighted > 1 and not products:
            found.append((frozenset().union(*(x.branch for x in attentions)), residual.branch))
            attentions = []
    return found


def _residuals(paths: Paths) -> list[_Residual]:
    found = []
    for index, node in enumerate(paths.nodes):
        names = paths.reads[index]
        if node.op_type != "Add" or len(names) != 2 or not all(map(paths.is_active, names)):
            continue
        shortcut, end = sorted(names, key=paths.made_at)
        branch = paths.between(shortcut, end)
        if branch:
            found.append(_Residual(index, shortcut, branch | {index}))
    return found


def _is_fused(paths: Paths, residual: _Residual) -> bool:
    return any("Attention" in paths.nodes[index].op_type for index in residual.branch)


def _is_next(paths: Paths, last: _Residual, residual: _Residual) -> bool:
    """Whether the shortcut of the second is what the first gives, behind a norm or as it is."""
    name = paths.nodes[last.add].outputs[0].name or ""
    if residual.shortcut == name:
        return True
    passed = paths.between(name, residual.shortcut)
    return bool(passed) and not any(paths.is_weighted[index] for index in passed)


def halves_by_word(layers: Sequence[str]) -> dict[str, str]:
    """The half of each layer of one block whose name says it, in words that modules of transformers have."""
    found = {}
    for layer in layers:
        if _ATTENTION_WORD.search(layer):
            found[layer] = ATTENTION
        elif _MLP_WORD.search(layer):
            found[layer] = MLP
    return found


def whole(layers: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """The half of every layer of one block, of which some are known; {} unless there are two.

    layers: in graph order. What is not known goes with the attention before the first layer of the MLP, else with it.
    """
    if set(known.values()) != {ATTENTION, MLP}:
        return {}
    first = next(i for i, layer in enumerate(layers) if known.get(layer) == MLP)
    return {layer: known.get(layer, ATTENTION if i < first else MLP) for i, layer in enumerate(layers)}
