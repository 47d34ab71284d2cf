"""Layers to keep float, picked from scores without a search.

Groups are ranked by score, worst first, and a top set of them is kept: the smallest that holds a share of all scores
(coverage), or those above a threshold. Nothing here knows of sizes or of how errors add up; `tune` does.

Shares and sums need numbers of 0 or more, higher where worse. A score in decibel counts as the noise that it stands
for, 10^(-dB / 10), a share of the signal, and so does a threshold; a score below 0 counts as 0, an infinite one as
`LARGEST`.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from quantsieve.errors import UsageError
from quantsieve.sensitivity.blocks import Group, aggregate, group
from quantsieve.sensitivity.metrics import LOWER, Meaning
from quantsieve.sensitivity.ranking import Score
from quantsieve.sensitivity.scan_document import ScanResult

SCHEMA = 1
NEAR = 0.99
LARGEST = 1e300  # sums of many such are finite


@dataclass(frozen=True, slots=True)
class Rule:
    """What is kept. Exactly one of coverage (0..1) and threshold (a score; above it is kept)."""

    coverage: float | None = None
    threshold: float | None = None
    aggregate: str = "sum"
    max_layers: int | None = None
    near: float = NEAR

    def __post_init__(self) -> None:
        if (self.coverage is None) == (self.threshold is None):
            found = "neither" if self.coverage is None else "both"
            raise UsageError("either a coverage or a threshold", found, "Give --coverage 0.9, or --threshold T.")
        if self.coverage is not None and not 0 <= self.coverage <= 1:
            raise UsageError("a coverage from 0 to 1", str(self.coverage), "It is a share: 0.9 is 90 %.")
        if self.threshold is not None and not 0 <= self.threshold < math.inf:
            raise UsageError("a threshold of 0 or more", str(self.threshold), "Worse scores are kept float.")
        if self.max_layers is not None and self.max_layers < 0:
            raise UsageError("max_layers of 0 or more", str(self.max_layers), "Give a larger one.")
        if not 0 < self.near <= 1:
            raise UsageError("near from above 0 to 1", str(self.near), "It is a ratio of scores: 0.99 by default.")
        aggregate(self.aggregate, [0.0])


@dataclass(frozen=True, slots=True)
class Cut:
    """Two groups that can hardly be told apart, of which one is kept and one is not."""

    kept: str
    quantized: str
    ratio: float  # score of the quantized one over that of the kept one; 1 when equal
    is_near: bool  # the ratio reaches what counts as near
    is_tie: bool  # the scan's samples leave their order open; never said of blocks

    @property
    def text(self) -> str:
        what = "near-equal scores" if self.is_near else "a tie"
        why = "; the samples of the scan leave their order open" if self.is_tie else ""
        return (
            f"the cut lies between {what}: {self.kept} is kept float and {self.quantized} is quantized, "
            f"with {self.ratio:.1%} of its score{why}"
        )


@dataclass(frozen=True, slots=True)
class PickResult:
    """What is kept float. Layers and groups worst first; coverage and mass are shares of all scores, 0..1."""

    scheme: str
    groups: tuple[tuple[Group, float], ...]  # the kept ones with their scores
    layers: tuple[str, ...]  # kept ones
    nodes: tuple[str, ...]  # of the user's own file that the kept layers are made of
    num_quantized: int
    coverage: float  # share of the groups' scores that the kept ones hold
    mass: float  # share of the layers' scores that the kept ones hold
    cut: Cut | None
    scan: ScanResult  # marked accordingly
    notes: tuple[str, ...]

    @property
    def num_kept(self) -> int:
        return len(self.layers)

    def document(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            "kind": "pick",
            "model": self.scan.model_file,
            "model_key": self.scan.model_key,
            "scheme": self.scheme,
            "coverage": self.coverage,
            "mass": self.mass,
            "num_kept": self.num_kept,
            "num_quantized": self.num_quantized,
            "groups": [{"name": g.name, "score": score, "layers": list(g.layers)} for g, score in self.groups],
            "layers": list(self.layers),
            "nodes_to_exclude": list(self.nodes),
            "near_cut": None
            if self.cut is None
            else {
                "kept": self.cut.kept,
                "quantized": self.cut.quantized,
                "ratio": self.cut.ratio,
                "tie": self.cut.is_tie,
            },
            "notes": list(self.notes),
        }


def scores_of(scan: ScanResult, scheme: str | None = None) -> tuple[str, tuple[Score, ...]]:
    """(scheme, one row a layer, worst first): under that scheme, or what stands for it where a layer has no choice.

    scheme: None is the first of the scan. Raises UsageError for one that was not scanned.
    """
    chosen = scheme if scheme is not None else scan.schemes[0] if scan.schemes else ""
    if chosen not in scan.schemes:
        raise UsageError(f"one of the scanned schemes {', '.join(scan.schemes)}", repr(chosen), "Choose one of them.")
    rows: dict[str, Score] = {}
    order = [chosen, *scan.schemes]
    for score in scan.layers:
        best = rows.get(score.layer)
        if best is None or _place(order, score.scheme) < _place(order, best.scheme):
            rows[score.layer] = score
    return chosen, tuple(sorted(rows.values(), key=lambda score: -scan.metric.worse(score.value)))


def _place(order: Sequence[str], scheme: str) -> int:
    return order.index(scheme) if scheme in order else len(order)


def pick_layers(scan: ScanResult, rule: Rule, scheme: str | None, blocks: Mapping[str, str | None]) -> PickResult:
    """What the rule keeps float. blocks: by layer; layers without one stand alone."""
    chosen, rows = scores_of(scan, scheme)
    value = {row.layer: mass_of(row.value, scan.metric) for row in rows}
    scored = [
        (found, aggregate(rule.aggregate, [value[layer] for layer in found.layers]))
        for found in group(list(value), blocks)
    ]
    scored.sort(key=lambda pair: -pair[1])
    scores = [score for _, score in scored]
    wanted = top_by_coverage(scores, rule.coverage) if rule.coverage is not None else 0
    if rule.threshold is not None:
        wanted = top_by_threshold(scores, mass_of(rule.threshold, scan.metric))
    count = limited([len(found.layers) for found, _ in scored], wanted, rule.max_layers)
    kept = tuple(scored[:count])
    inside = {layer for found, _ in kept for layer in found.layers}
    layers = tuple(row.layer for row in rows if row.layer in inside)
    nameless = [row.layer for row in rows if row.layer in inside and not row.nodes]
    notes = []
    if scan.metric.direction == LOWER:
        notes.append(f"scores of {scan.metric.name} in dB count as noise over signal, 10^(-dB / 10)")
    if count < wanted:
        what = f"{wanted - count} of the {wanted} layers or blocks that were asked for"
        notes.append(f"at most {rule.max_layers} layers may be kept: {what} are left out")
    cut = _cut(scored, count, rule.near, partial(_is_tie, scan, rows))
    if cut is not None:
        notes.append(cut.text)
    if nameless:
        notes.append(f"no node of the model's file bears a name for these layers: {', '.join(nameless)}")
    removed = [layer for layer in scan.keep_float if layer not in inside]
    if removed:
        notes.append(f"marked in the scan and not picked, so no longer marked: {', '.join(removed)}")
    return PickResult(
        scheme=chosen,
        groups=kept,
        layers=layers,
        nodes=tuple(dict.fromkeys(node for row in rows if row.layer in inside for node in row.nodes)),
        num_quantized=len(rows) - len(layers),
        coverage=_share(scores[:count], scores),
        mass=_share([value[layer] for layer in layers], list(value.values())),
        cut=cut,
        scan=scan.marked(inside),
        notes=tuple(notes),
    )


def mass_of(score: float, metric: Meaning) -> float:
    """What a score counts in shares and sums: 0..LARGEST, higher is worse."""
    error = 10 ** min(-score / 10, 300) if metric.direction == LOWER else score
    return min(max(0.0, error), LARGEST)


def top_by_coverage(scores: Sequence[float], coverage: float) -> int:
    """How many of the scores, highest first, hold at least `coverage` of their sum; the fewest."""
    goal = coverage * math.fsum(scores)
    # Sums are rounded once each (fsum), so they never fall as the set grows, and the whole reaches coverage 1.
    return bisect_left(range(len(scores) + 1), goal, key=lambda count: math.fsum(scores[:count]))


def top_by_threshold(scores: Sequence[float], threshold: float) -> int:
    """How many of the scores, highest first, lie above the threshold; one that equals it does not."""
    return sum(score > threshold for score in scores)


def limited(sizes: Sequence[int], count: int, most: int | None) -> int:
    """How many of the first `count` groups fit into `most` layers before one does not."""
    total = 0
    for index, size in enumerate(sizes[:count]):
        total += size
        if most is not None and total > most:
            return index
    return count


def _cut(
    scored: Sequence[tuple[Group, float]], count: int, near: float, is_tie: Callable[[Group, Group], bool]
) -> Cut | None:
    if not 0 < count < len(scored):
        return None
    (kept, above), (quantized, below) = scored[count - 1], scored[count]
    ratio = below / above if above > 0 else 1.0
    cut = Cut(kept.name, quantized.name, ratio, ratio >= near, is_tie(kept, quantized))
    return cut if cut.is_near or cut.is_tie else None


def _is_tie(scan: ScanResult, rows: Sequence[Score], kept: Group, quantized: Group) -> bool:
    """Whether two layers alone tie in the scan, with every row of other schemes between them; False for blocks."""
    if len(kept.layers) > 1 or len(quantized.layers) > 1:
        return False
    row = {row.layer: row for row in rows}
    first, last = sorted(scan.layers.index(row[found.layers[0]]) for found in (kept, quantized))
    return all(score.tie for score in scan.layers[first:last])


def _share(part: Sequence[float], whole: Sequence[float]) -> float:
    """1 where there is nothing to hold."""
    total = math.fsum(whole)
    return math.fsum(part) / total if total > 0 else 1.0
