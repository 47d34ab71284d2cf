"""What a plan does with each layer, and why: the price it would pay against what it would save."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quantsieve.front import Candidate
from quantsieve.reports import _numbers as numbers
from quantsieve.reports.summary import LayerFacts, Price, Summary
from quantsieve.schemes import FLOAT

Kind = Literal["quantized", "float by plan", "refused"]
_HIGH = 0.25  # the upper part of a ranking that is called a high price


@dataclass(frozen=True, slots=True)
class Ranked:
    """A price and its place among the prices of its scheme: 1 is the highest, the worst, of `number`."""

    price: Price
    rank: int
    number: int

    @property
    def text(self) -> str:
        return f"price {numbers.price(self.price.value)}, rank {self.rank} of {self.number}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What a plan does with a layer and why. ranked: under its scheme; for a layer kept float the lowest
    price that it could have had; None where it has no price."""

    layer: LayerFacts
    scheme: str
    kind: Kind
    ranked: Ranked | None
    reason: str


def rank_prices(prices: Sequence[Price]) -> tuple[Ranked, ...]:
    """Each price in the given order, with its rank; equal prices keep their order."""
    place: dict[int, Ranked] = {}
    for scheme in dict.fromkeys(price.scheme for price in prices):
        indices = [i for i, price in enumerate(prices) if price.scheme == scheme]
        for rank, index in enumerate(sorted(indices, key=lambda i: -prices[i].value), 1):
            place[index] = Ranked(prices[index], rank, len(indices))
    return tuple(place[i] for i in range(len(prices)))


def decide(summary: Summary, candidate: Candidate) -> tuple[Decision, ...]:
    """For every layer, in graph order, what the candidate's plan does and why."""
    known: dict[str, list[Ranked]] = {}
    for ranked in rank_prices(summary.prices):
        known.setdefault(ranked.price.layer, []).append(ranked)
    return tuple(
        _decision(layer, candidate.plan.scheme(layer.name), known.get(layer.name, [])) for layer in summary.layers
    )


def refused_text(decisions: Sequence[Decision]) -> str:
    """How many layers have to be float, those apart that the user keeps so: '3 that cannot be quantized'."""
    refused = [decision.layer for decision in decisions if decision.kind == "refused"]
    kept = sum(layer.is_kept for layer in refused)
    by_hand = f", {kept:,} kept float by you" if kept else ""
    return f"{len(refused) - kept:,} that cannot be quantized{by_hand}"


def _decision(layer: LayerFacts, scheme: str, known: Sequence[Ranked]) -> Decision:
    if scheme != FLOAT:
        found = next((ranked for ranked in known if ranked.price.scheme == scheme), None)
        return Decision(layer, scheme, "quantized", found, found.text if found else "it has no price of its own")
    if layer.refusal is not None:
        reason = layer.refusal if layer.is_kept else f"cannot be quantized: {layer.refusal}"
        return Decision(layer, scheme, "refused", None, reason)
    lowest = min(known, key=lambda ranked: ranked.price.value, default=None)
    reason = "no price of its own" if lowest is None else _why_float(layer, lowest)
    return Decision(layer, scheme, "float by plan", lowest, reason)


def _why_float(layer: LayerFacts, lowest: Ranked) -> str:
    verdict = "high price" if lowest.rank <= max(1, _HIGH * lowest.number) else "saves too little for its price"
    saved = f"{numbers.size(layer.weight_bytes)} of weights" if layer.weight_bytes else "no weights"
    price = numbers.price(lowest.price.value)
    return f"{verdict} {price} as {lowest.price.scheme} (rank {lowest.rank} of {lowest.number}), {saved}"
