"""Dominance with ties among measured candidates, and the few that get a name.

Objectives, lower is better, all measured on the final samples: quality (loss of score; where two losses are
equal the relative squared error of the outputs decides), size of the file, latency. a is *faster* than b when
the 95 % interval of their paired ratio lies below 1 and a's median is the lower one, else they tie. a
*dominates* b when it is no worse in every objective and better in one.

Ties are not transitive: a ties b and b ties c, yet c may be faster than a. So "what nobody dominates" would
throw out c because of b, and b because of a, and lose the fastest model. The front is therefore the one set
in which no member dominates another and every candidate outside is dominated by a member. It exists and is
unique, since dominance has no cycle: around one, quality and size would be equal, and the medians would have
to fall forever. Without latency, and whenever ties happen to be transitive, it is the set of the undominated.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantsieve.evaluation import Estimate, Failed, Measured
from quantsieve.plan import Plan
from quantsieve.targets.timing import Latency, is_tie, ratio

VERSION = 1
SIZE_TIE = 0.005  # files whose sizes differ by less than this part are equally cheap


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, its file and all that is known of it. Predictions and simulations are never measurements."""

    id: str  # the plan's id
    origin: str  # of the plan: 'float', 'full int8', 'programme', 'first 5 float', 'ranking, 8 float'
    plan: Plan
    size_bytes: int
    search: Measured | Failed | None  # on the search samples
    final: Measured | Failed | None  # on the final samples: only survivors of the search samples have it
    latency: Latency | None
    latency_ms: tuple[float, ...]  # of the interleaved rounds, paired by position with the other candidates
    predicted_mse: float | None  # the additive model's, corrected with what was measured
    simulated_mse: float | None  # fake quantization in float arithmetic, on search samples
    measured_mse: float | None  # of the real file, on the same samples as the simulation
    ran: Mapping[str, str]  # layer -> 'int8', 'float' or 'gone', read back from the optimized graph
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The candidate to take, None when no measured one meets the budget; the reason says which rule chose
    it."""

    id: str | None
    reason: str


def is_measured(candidate: Candidate) -> bool:
    """True when the candidate has numbers on the final samples."""
    return isinstance(candidate.final, Measured)


def is_float(candidate: Candidate) -> bool:
    """True when the plan quantizes nothing."""
    return not candidate.plan.quantized()


def final_loss(candidate: Candidate) -> Estimate:
    """Loss of score on the final samples with its 95 % interval; exactly 0 for the float model, which is
    its own reference. The candidate must be measured."""
    return Estimate(0.0, 0.0, 0.0) if is_float(candidate) else _final(candidate).loss()


def dominates(a: Candidate, b: Candidate) -> bool:
    """True when a is no worse than b in every objective and better in at least one. Both must be measured."""
    signs = (_compare(_quality(a), _quality(b)), _compare(a.size_bytes, b.size_bytes), _compare_speed(a, b))
    return max(signs) <= 0 and min(signs) < 0


def find_front(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    """Ids of the front, by size, smallest first; empty only when nothing was measured on final samples."""
    return tuple(c.id for c in _front(candidates))


def recommend(candidates: Iterable[Candidate], max_drop: float, confident: bool) -> Recommendation:
    """The cheapest candidate whose loss on the final samples is at most `max_drop`.

    Cheapest is the smallest file; within 0.5 % of its size the lower measured squared error decides.
    confident: the high end of the loss's interval must be within the budget, not the point alone. A model
    with outputs that are not finite is never recommended.
    """
    measured = [c for c in candidates if is_measured(c)]
    asked = f"a loss of at most {_percent(max_drop)}" + (" (interval's high end)" if confident else "")
    meeting = [c for c in measured if _final(c).num_bad == 0 and _bound(c, confident) <= max_drop]
    if not meeting:
        return Recommendation(None, f"No measured model has {asked} on the final samples; {_best(measured)}.")
    smallest = min(c.size_bytes for c in meeting)
    near = [c for c in meeting if c.size_bytes <= smallest * (1 + SIZE_TIE)]
    # What dominates one of them is no larger and loses no more, so it is one of them (but for the interval's
    # end when `confident`): the choice is on the front.
    chosen = min(_front(near), key=lambda c: (_final(c).mse, *_order(c)))
    if all(is_float(c) for c in meeting):
        return Recommendation(
            chosen.id,
            f"No quantized model has {asked} on the final samples; {_best(measured)}. The float model stays.",
        )
    rule = "the smallest file"
    if len(near) > 1:
        share = _percent(SIZE_TIE)
        rule = f"the lowest squared error of {len(near)} files within {share} of the smallest one's size"
    return Recommendation(chosen.id, f"Of {len(meeting)} models with {asked} on the final samples, {rule}.")


def named(candidates: Iterable[Candidate], recommended: str | None = None) -> dict[str, str]:
    """Name -> id: 'recommended', 'best quality' (of the quantized), 'smallest', 'fastest' (lowest median); a
    name is absent when nobody bears it.

    Ties in loss go to the lower squared error, then to the smaller file; all other ties to the better
    quality.
    """
    measured = [c for c in candidates if is_measured(c)]
    front = _front(measured)
    best: dict[str, Candidate | None] = {
        "best quality": min((c for c in measured if not is_float(c)), key=_by_quality, default=None),
        "smallest": min(front, key=_order, default=None),
        "fastest": min((c for c in front if c.latency), key=lambda c: (_median(c), *_by_quality(c)), default=None),
    }
    names = {} if recommended is None else {"recommended": recommended}
    return names | {name: found.id for name, found in best.items() if found is not None}


def top_k(candidates: Iterable[Candidate], k: int) -> tuple[str, ...]:
    """At most k ids, none twice: the trade-off nearest the ideal, the best of each objective as `named` has
    them, then the rest of the front by distance from the ideal.

    The ideal has the lowest loss, size and latency of the front; each objective is scaled to 0..1 over the
    front.
    """
    measured = [c for c in candidates if is_measured(c)]
    front = _front(measured)
    distances = _distances(front)
    by_distance = [c.id for _, c in sorted(zip(distances, front, strict=True), key=lambda pair: pair[0])]
    return tuple(dict.fromkeys([*by_distance[:1], *named(measured).values(), *by_distance]))[: max(k, 0)]


def size_reduction_kept(size_bytes: int, float_bytes: int, full_bytes: int) -> float | None:
    """Share of full int8's size reduction: 1 at its size, 0 at the float size; None when full int8 saves
    nothing."""
    if full_bytes >= float_bytes:
        return None
    return (float_bytes - size_bytes) / (float_bytes - full_bytes)


def _front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """One pass suffices: a candidate comes after everything that dominates it, so only members need
    comparing."""
    front: list[Candidate] = []
    for candidate in sorted((c for c in candidates if is_measured(c)), key=_order):
        if not any(dominates(member, candidate) for member in front):
            front.append(candidate)
    return front


def _final(candidate: Candidate) -> Measured:
    assert isinstance(candidate.final, Measured), f"{candidate.id} is not measured"
    return candidate.final


def _quality(candidate: Candidate) -> tuple[float, float]:
    return final_loss(candidate).value, _final(candidate).mse


def _median(candidate: Candidate) -> float:
    return math.inf if candidate.latency is None else candidate.latency.median_ms


def _order(candidate: Candidate) -> tuple[float, ...]:
    return candidate.size_bytes, *_quality(candidate), _median(candidate)


def _by_quality(candidate: Candidate) -> tuple[float, ...]:
    return *_quality(candidate), candidate.size_bytes, _median(candidate)


def _compare(a: float | tuple[float, ...], b: float | tuple[float, ...]) -> int:
    return (a > b) - (a < b)  # type: ignore[operator]


def _compare_speed(a: Candidate, b: Candidate) -> int:
    """-1 when a is shown to be faster, 1 when b is, 0 for a tie. A model that was not timed is the slower
    one."""
    if a.latency is None or b.latency is None:
        return (a.latency is None) - (b.latency is None)
    sign = _compare(a.latency.median_ms, b.latency.median_ms)
    if not a.latency_ms or len(a.latency_ms) != len(b.latency_ms):  # not of the same rounds: intervals must part
        overlap = a.latency.low_ms <= b.latency.high_ms and b.latency.low_ms <= a.latency.high_ms
        return 0 if overlap else sign
    if is_tie(a.latency_ms, b.latency_ms):
        return 0
    # The paired ratio and the medians may point in opposite directions: then nothing is shown.
    return sign if _compare(ratio(a.latency_ms, b.latency_ms).median, 1.0) == sign else 0


def _distances(front: Sequence[Candidate]) -> list[float]:
    objectives: list[Callable[[Candidate], float]] = [lambda c: final_loss(c).value, lambda c: c.size_bytes]
    if all(c.latency for c in front):
        objectives.append(_median)
    columns = [_scaled([objective(c) for c in front]) for objective in objectives]
    return [math.hypot(*values) for values in zip(*columns, strict=True)]


def _scaled(values: Sequence[float]) -> list[float]:
    low, high = min(values, default=0.0), max(values, default=0.0)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def _bound(candidate: Candidate, confident: bool) -> float:
    loss = final_loss(candidate)
    return loss.high if confident else loss.value


def _best(measured: Sequence[Candidate]) -> str:
    quantized = [c for c in measured if not is_float(c)]
    if not quantized:
        return "no quantized model was measured on them"
    best = min(quantized, key=_by_quality)
    loss = final_loss(best)
    interval = f"interval {_percent(loss.low)} to {_percent(loss.high)}"
    return f"the best is {best.id} ({best.origin}) with {_percent(loss.value)}, {interval}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + " %"
