"""Layers ranked by what quantizing each alone does to the outputs, worst first, with what each score is made of.

A layer's score is the mean over the samples of the sum of the sources that it switches on: its weights, and the
tensors that it forces to be rounded. Two neighbours tie when the 95 % interval of the mean of their difference, paired
by sample, includes 0: samples that are hard for one layer are hard for the next, so intervals of the scores alone
would call far too many equal. What screening leaves open widens both intervals.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest

import numpy as np

from quantsieve.model.units import Layer
from quantsieve.plan import KEPT_BY, Rounded
from quantsieve.sensitivity.interval import half_width
from quantsieve.sensitivity.metrics import Meaning
from quantsieve.sensitivity.places import Place
from quantsieve.sensitivity.suffix import Prices


@dataclass(frozen=True, slots=True)
class Score:
    """One layer under one scheme. value, low, high and the parts: in the unit and direction of the scan's metric; by
    default the mean relative squared error of the float outputs, a share of their variance, higher is worse.
    tie: with the next row; None for the last."""

    layer: str
    scheme: str
    op_type: str
    nodes: tuple[str, ...]  # of the user's own file
    block: str | None  # found from names or graph; None where the layer stands alone
    params: int
    bytes: int  # float32, weight and bias
    macs: int  # multiply-adds of one sample; 0 where unknown or without weights
    value: float
    low: float
    high: float
    tie: bool | None
    weights: float  # part of the weights; 0 for a layer without, and where a metric has no parts
    weights_corrected: float  # of it, what a corrected bias leaves
    tensors: Mapping[str, float]  # parts of the activations, by root
    keep_float: bool = False
    outputs: Mapping[str, float] = field(default_factory=dict)  # value by output, where it was asked for
    channels: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by output, one a channel, likewise
    stage: str | None = None  # around the block: blocks of one resolution, or a head
    half: str | None = None  # within the block: attention or MLP
    is_exact: bool = True  # no part of it was screened
    drift: float | None = None  # measured over simulated squared error of the layer alone; None: not measured


@dataclass(frozen=True, slots=True)
class Refused:
    """A layer that no scheme can quantize, or that the user keeps float; it has no score, which is not a score of 0."""

    layer: str
    op_type: str
    reason: str

    @property
    def is_kept(self) -> bool:
        """Whether the user keeps it float."""
        return self.reason.startswith(KEPT_BY)


@dataclass(frozen=True, slots=True)
class Choice:
    """A layer with what it may be given. forced: by scheme, the tensors that it switches on when it is quantized."""

    layer: Layer
    schemes: tuple[str, ...]
    forced: Mapping[str, tuple[Rounded, ...]]
    nodes: tuple[str, ...]
    place: Place


def rank(choices: Sequence[Choice], prices: Prices) -> tuple[Score, ...]:
    """A row for each layer and scheme, worst first."""
    row = prices.rows()
    mean, corrected = prices.mean(), prices.corrected()
    found = []
    for choice in choices:
        for scheme in choice.schemes:
            forced = choice.forced[scheme]
            tensors = {root: row["tensor", root, form] for root, form in forced}
            weight = row.get(("weight", choice.layer.name, scheme))
            sums = prices.sums(choice.layer.name, scheme, forced)
            switched = prices.switched(choice.layer.name, scheme, forced)
            doubt, value = prices.doubt(switched), float(sums.mean())
            half = float(half_width(sums, doubt))
            score = replace(
                _score(choice, scheme, sums),
                low=max(0.0, value - half),
                high=max(0.0, value + half),
                is_exact=bool(prices.is_exact[switched].all()),
                weights=float(mean[weight]) if weight is not None else 0.0,
                weights_corrected=max(0.0, float(corrected[weight])) if weight is not None else 0.0,
                tensors={root: float(mean[index]) for root, index in tensors.items()},
            )
            found.append((score, sums, doubt))
    return _ordered(found)


def rank_gains(choices: Sequence[Choice], gains: Mapping[tuple[str, str], np.ndarray]) -> tuple[Score, ...]:
    """Rows of leave-one-out gains, the greatest first; without parts.

    gains: float64 [samples] by layer and scheme: the error that goes when the layer alone is float. A mean below 0,
    where float would make it worse, counts as 0.
    """
    found = [
        (_score(choice, scheme, gains[choice.layer.name, scheme]), gains[choice.layer.name, scheme], 0.0)
        for choice in choices
        for scheme in choice.schemes
        if (choice.layer.name, scheme) in gains
    ]
    return _ordered(found)


def alone(choices: Sequence[Choice]) -> list[tuple[Choice, str]]:
    """Each layer under each scheme that it may have, in order."""
    return [(choice, scheme) for choice in choices for scheme in choice.schemes]


def rank_values(
    choices: Sequence[Choice],
    meaning: Meaning,
    totals: np.ndarray,
    outputs: Mapping[str, np.ndarray],
    channels: Mapping[str, np.ndarray],
    doubts: np.ndarray | None = None,
) -> tuple[Score, ...]:
    """Rows by a metric's values of each layer alone, the worst first; without parts.

    All as in `alone`, in the unit and direction of the metric. totals: float64 [rows, samples]. outputs: by name,
    float64 [rows, samples]; channels: by name of the output, float64 [rows, channels]: what rows tell beside. doubts:
    float64 [rows], standard deviation of each mean that does not come from the samples; None: 0.
    """
    least = 0.0 if meaning.is_error else -math.inf
    found = []
    for row, (choice, scheme) in enumerate(alone(choices)):
        score = replace(
            _score(choice, scheme, totals[row], least, doubt := 0.0 if doubts is None else float(doubts[row])),
            outputs={name: float(array[row].mean()) for name, array in outputs.items()},
            channels={name: tuple(array[row].tolist()) for name, array in channels.items()},
        )
        found.append((score, meaning.worse(totals[row]), doubt))
    return _ordered(found)


def _score(choice: Choice, scheme: str, sums: np.ndarray, least: float = 0.0, doubt: float = 0.0) -> Score:
    value = float(sums.mean())
    half = float(half_width(sums, doubt)) if math.isfinite(value) else 0.0
    return Score(
        layer=choice.layer.name,
        scheme=scheme,
        op_type=choice.layer.op_type,
        nodes=choice.nodes,
        stage=choice.place.stage,
        block=choice.place.block,
        half=choice.place.half,
        params=choice.layer.num_params,
        bytes=choice.layer.weight_bytes,
        macs=choice.layer.macs,
        value=max(least, value),
        low=max(least, value - half),
        high=max(least, value + half),
        tie=None,
        weights=0.0,
        weights_corrected=0.0,
        tensors={},
    )


def _ordered(found: list[tuple[Score, np.ndarray, float]]) -> tuple[Score, ...]:
    found = sorted(found, key=lambda row: -float(row[1].mean()))  # stable: graph order among equals
    ties = [is_tie(a, b, math.hypot(of_a, of_b)) for (_, a, of_a), (_, b, of_b) in pairwise(found)]
    return tuple(replace(score, tie=tie) for (score, _, _), tie in zip_longest(found, ties))


def sums_of(choices: Sequence[Choice], prices: Prices) -> np.ndarray:
    """Scores sample by sample, float64 [layers and schemes, samples], in the order of the choices."""
    found = [prices.sums(c.layer.name, scheme, c.forced[scheme]) for c in choices for scheme in c.schemes]
    return np.stack(found) if found else np.zeros((0, prices.num_samples))


def doubts_of(choices: Sequence[Choice], prices: Prices) -> np.ndarray:
    """What screening leaves open of the means of `sums_of`, as standard deviations, float64 [layers and schemes]."""
    rows = [prices.switched(c.layer.name, scheme, c.forced[scheme]) for c in choices for scheme in c.schemes]
    return np.asarray([prices.doubt(row) for row in rows])


def is_tie(a: np.ndarray, b: np.ndarray, doubt: float = 0.0) -> bool:
    """Whether the interval of the mean paired difference includes 0. a, b: float64 [samples], of the same samples.
    doubt: standard deviation of the difference that does not come from the samples."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return bool(a.mean() == b.mean())  # infinite both, else one is certainly worse
    gap = a - b
    return abs(float(gap.mean())) <= float(half_width(gap, doubt))
