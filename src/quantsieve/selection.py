"""Layers that the user chooses by hand: which nodes or op types are to be quantized, and which never.

The rules are those of onnxruntime's `quantize_static`: where nodes are named to be quantized, all others stay float;
op types likewise; where both are named, a layer needs both; exclusion wins. An entry is an exact name, or `re:PATTERN`,
which must match the whole name. Names are of nodes in the user's own file, or of layers. A layer is matched by name
when any of its nodes is, and by op type when its operator is: the bias Add of a MatMul and the Relu of a Conv go with
their layer.

Nothing here reads a model: what nodes and layers there are is given.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from quantsieve.errors import UsageError
from quantsieve.plan import KEPT_BY, nearest

PATTERN = "re:"
_MOST_NAMES = 5  # in one reason of a note
_GONE = "it belongs to no layer: it only makes constants, or nothing reads it"
_LAYOUT = "it only passes a tensor on, and has the format of that tensor"


@dataclass(frozen=True, slots=True)
class Selection:
    """Entries of each option, sorted; () where it was not given. Raises UsageError for a bad regular expression."""

    nodes_to_exclude: tuple[str, ...] = ()
    nodes_to_quantize: tuple[str, ...] = ()
    op_types_to_exclude: tuple[str, ...] = ()
    op_types_to_quantize: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            for entry in getattr(self, field.name):
                _check_entry(entry, option(field.name))

    @classmethod
    def of(
        cls,
        nodes_to_exclude: Iterable[str] = (),
        nodes_to_quantize: Iterable[str] = (),
        op_types_to_exclude: Iterable[str] = (),
        op_types_to_quantize: Iterable[str] = (),
    ) -> "Selection":
        """Of entries in any order; a text is one entry. Raises UsageError for what is no text or no regular
        expression."""
        given = (nodes_to_exclude, nodes_to_quantize, op_types_to_exclude, op_types_to_quantize)
        names = (field.name for field in fields(cls))
        return cls(*(_entries(entries, option(name)) for name, entries in zip(names, given, strict=True)))

    def document(self) -> dict[str, list[str]]:
        """As strict JSON can say it: the options that were given."""
        found = {field.name: list(getattr(self, field.name)) for field in fields(self)}
        return {name: entries for name, entries in found.items() if entries}


EVERYTHING = Selection()


class Node(NamedTuple):
    """A node of the user's own file; name: '' where it has none."""

    name: str
    op_type: str
    is_layout: bool = False  # it only passes a tensor on


class Unit(NamedTuple):
    """A layer; nodes: its positions in the user's own file. refusal: why no scheme can quantize it."""

    name: str
    op_type: str
    nodes: tuple[int, ...]
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Selected:
    """kept: by layer that could be quantized and is not to be, the reason. notes: what each entry matched, and why what
    was to be quantized stays float."""

    kept: Mapping[str, str]
    notes: tuple[str, ...]


NOTHING = Selected({}, ())


class _Match(NamedTuple):
    """What one entry matched: positions of nodes, and layers by name."""

    entry: str
    nodes: frozenset[int]
    layers: frozenset[str]


def select(selection: Selection, nodes: Sequence[Node], units: Sequence[Unit]) -> Selected:
    """The layers that the selection keeps float.

    nodes: of the user's own file. units: all layers. Raises UsageError for an entry that matches nothing.
    """
    found = {
        field.name: _matches(getattr(selection, field.name), field.name, nodes, units) for field in fields(selection)
    }
    if not any(found.values()):
        return NOTHING
    layers = {name: {layer for match in matches for layer in match.layers} for name, matches in found.items()}
    kept = {}
    for unit in units:
        by = _kept_by(unit.name, layers, selection)
        if by is not None and unit.refusal is None:
            kept[unit.name] = f"{KEPT_BY}{option(by)}"
    able = sum(unit.refusal is None for unit in units)
    notes = [_told(name, matches, units) for name, matches in found.items() if matches]
    for name in ("nodes_to_quantize", "op_types_to_quantize"):
        notes += _left_float(option(name), found[name], nodes, units, kept)
    notes.append(f"{len(kept)} of the {_count(able, 'layer')} that could be quantized stay float by hand")
    return Selected(kept, tuple(notes))


def option(name: str) -> str:
    """'--nodes-to-exclude' of 'nodes_to_exclude'."""
    return f"--{name.replace('_', '-')}"


def _kept_by(layer: str, layers: Mapping[str, Collection[str]], selection: Selection) -> str | None:
    """The option that keeps the layer float; None when it may be quantized."""
    for name in ("nodes_to_exclude", "op_types_to_exclude"):
        if layer in layers[name]:
            return name
    for name in ("nodes_to_quantize", "op_types_to_quantize"):
        if getattr(selection, name) and layer not in layers[name]:
            return name
    return None


# --- matching ---------------------------------------------------------------------------------------------------


def _matches(entries: Sequence[str], name: str, nodes: Sequence[Node], units: Sequence[Unit]) -> tuple[_Match, ...]:
    find = _by_type if name.startswith("op_types") else _by_name
    found = tuple(find(entry, nodes, units) for entry in entries)
    unknown = [match.entry for match in found if not match.nodes and not match.layers]
    if unknown:
        raise _unknown(unknown, name, nodes, units)
    return found


def _by_name(entry: str, nodes: Sequence[Node], units: Sequence[Unit]) -> _Match:
    hits = frozenset(i for i, node in enumerate(nodes) if node.name and _fits(entry, node.name))
    layers = (unit.name for unit in units if not hits.isdisjoint(unit.nodes) or _fits(entry, unit.name))
    return _Match(entry, hits, frozenset(layers))


def _by_type(entry: str, nodes: Sequence[Node], units: Sequence[Unit]) -> _Match:
    hits = frozenset(i for i, node in enumerate(nodes) if _fits(entry, node.op_type))
    layers = (unit.name for unit in units if any(_fits(entry, found) for found in _types(unit, nodes)))
    return _Match(entry, hits, frozenset(layers))


def _types(unit: Unit, nodes: Sequence[Node]) -> set[str]:
    """The layer's operator; that of the call as well where it comes out of a function."""
    own = {nodes[i].op_type for i in unit.nodes}
    return {unit.op_type} if unit.op_type in own else {unit.op_type, *own}


def _fits(entry: str, name: str) -> bool:
    if entry.startswith(PATTERN):
        return re.fullmatch(entry[len(PATTERN) :], name) is not None
    return entry == name


def _entries(entries: Iterable[str], option: str) -> tuple[str, ...]:
    found = (entries,) if isinstance(entries, str) else tuple(entries)
    for entry in found:
        if not isinstance(entry, str):
            raise UsageError(f"names for {option}", repr(entry), "Give texts: names, or `re:PATTERN`.")
    return tuple(sorted(set(found)))


def _check_entry(entry: str, option: str) -> None:
    if not entry.startswith(PATTERN):
        return
    try:
        re.compile(entry[len(PATTERN) :])
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(
            f"a regular expression of Python behind `{PATTERN}` for {option}",
            f"{entry!r} ({error})",
            "Correct it; a name with special characters is matched as it is without `re:`.",
        ) from error


def _unknown(entries: Sequence[str], name: str, nodes: Sequence[Node], units: Sequence[Unit]) -> UsageError:
    entry = entries[0]
    more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
    bare = entry.removeprefix(PATTERN)
    hint = " A pattern has to match the whole name." if entry.startswith(PATTERN) else ""
    if name.startswith("op_types"):
        types = sorted({*(node.op_type for node in nodes), *(unit.op_type for unit in units)})
        todo = f"The model has {', '.join(types)}."
        return UsageError(f"op types of the model for {option(name)}", f"{entry!r}{more}, which it lacks", todo + hint)
    known = dict.fromkeys([*(node.name for node in nodes if node.name), *(unit.name for unit in units)])
    return UsageError(
        f"nodes or layers of the model for {option(name)}",
        f"{entry!r}{more}, which names none",
        nearest(bare, known) + hint,
    )


# --- notes ------------------------------------------------------------------------------------------------------


def _told(name: str, matches: Sequence[_Match], units: Sequence[Unit]) -> str:
    refused = {unit.name for unit in units if unit.refusal is not None}
    texts = []
    for match in matches:
        text = f"{match.entry!r} matches {_count(len(match.nodes), 'node')}, {_count(len(match.layers), 'layer')}"
        never = len(match.layers & refused)
        texts.append(text + (f" ({never} of them float in any case)" if never else ""))
    return f"{option(name)}: {'; '.join(texts)}"


def _left_float(
    option: str, matches: Sequence[_Match], nodes: Sequence[Node], units: Sequence[Unit], kept: Mapping[str, str]
) -> Iterator[str]:
    """One note a reason for what was to be quantized and stays float."""
    owners: dict[int, list[Unit]] = {}
    for unit in units:
        for i in unit.nodes:
            owners.setdefault(i, []).append(unit)
    chosen = {layer for match in matches for layer in match.layers}
    reasons: dict[str, list[str]] = {}
    for i in sorted({i for match in matches for i in match.nodes}):
        found = [_why_float(unit, unit.name in chosen, kept) for unit in owners.get(i, ())]
        reason = (_LAYOUT if nodes[i].is_layout else _GONE) if not found else found[0]
        if None not in found and reason is not None:
            name = nodes[i].name or next((unit.name for unit in owners.get(i, ())), f"an unnamed {nodes[i].op_type}")
            reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield f"{option}: float stays {', '.join(names[:_MOST_NAMES])}{more}: {reason}"


def _why_float(unit: Unit, is_chosen: bool, kept: Mapping[str, str]) -> str | None:
    """Why a node of the layer is not quantized; None when it is."""
    if unit.refusal is not None:
        return unit.refusal
    if not is_chosen:
        return f"it goes with its layer, whose operator is {unit.op_type}"
    return kept.get(unit.name)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
