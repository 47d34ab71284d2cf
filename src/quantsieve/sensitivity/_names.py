"""Blocks told by names: paths up to a number whose siblings repeat.

A block is a path up to a number, `/layer1/layer1.0` or `block3a`, whose siblings (the same path with another number)
hold several weighted layers too and repeat a name inside; of several such paths in a name the longest is the block and
the shortest the stage.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

Names = Mapping[str, bool]  # of layers in graph order -> whether it has weights

# A number that ends a component or a word of it, with one small letter of a variant: `layer.5`, `block_3_`, `block3a_`.
_NUMBER = re.compile(r"(?<!\d)\d+[a-z]?(?=[_/.]|$)")


def blocks_by_name(weighted: Names) -> dict[str, str]:
    """The block of each layer whose name says one that holds others too."""
    accepted = _families(weighted)
    first = {family[:-2]: family for family in accepted if family.endswith("_#")}  # `block` beside `block_1`, `block_2`
    blocks = {}
    for layer in weighted:
        found = [prefix for family, prefix in _prefixes(layer) if family in accepted]
        found = found or [stem for stem in first if layer.startswith((f"{stem}/", f"{stem}."))]
        if found:
            blocks[layer] = max(found, key=len)
    sizes = Counter(blocks.values())
    return {layer: block for layer, block in blocks.items() if sizes[block] > 1}


def stages_by_name(weighted: Names, blocks: Mapping[str, str]) -> dict[str, str]:
    """The stage of each layer whose block has siblings in a path that has siblings itself."""
    accepted = _families(weighted)
    stages = {}
    for layer, block in blocks.items():
        outer = next((prefix for family, prefix in _prefixes(layer) if family in accepted), block)
        if outer != block:
            stages[layer] = outer
    return stages


def _families(weighted: Names) -> set[str]:
    """Paths with # for their number whose members are blocks."""
    members: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for layer, has_weights in weighted.items():
        if has_weights:
            for family, prefix in _prefixes(layer):
                members[family][prefix].add(layer)
    return {family for family, found in members.items() if _repeats(found)}


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
