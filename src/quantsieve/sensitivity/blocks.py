"""Layers in groups, by a map of regular expressions or as they were found, and a score for a group."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quantsieve.errors import InputError, UsageError

AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "max": max,
    "mean": lambda values: math.fsum(values) / len(values),
}


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
