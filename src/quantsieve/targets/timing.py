"""Latency measured side by side: every round runs each model once, so drift of the machine hits all of them
alike.

The summary is the median with a distribution-free interval from order statistics: of n sorted times, the j-th
smallest and the j-th largest enclose the true median with probability 1 - 2 P(Binomial(n, 1/2) < j). Two
models are compared by the ratios of their paired rounds. Times of one process are correlated, so the
intervals are somewhat too narrow.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import comb
from statistics import median
from typing import NamedTuple

from quantsieve.errors import ShapeMismatch, UsageError
from quantsieve.targets.base import Feeds, Predict, Timing

Clock = Callable[[], float]
_WINDOW = 5  # warm-up compares the medians of two windows of this many rounds
_STABLE = 0.05  # and ends when their sum moved by no more than this part,
_STABLE_EACH = 0.2  # and no model's own by more than this: of many models one always has a bad moment
_CHECK_EVERY = 5  # rounds between two looks at the precision


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds a run: median, 95 % interval of the median, and how many runs it rests on."""

    median_ms: float
    low_ms: float
    high_ms: float
    runs: int


class Ratio(NamedTuple):
    """Median of a / b over paired rounds, with its 95 % interval; below 1 means that a is faster."""

    median: float
    low: float
    high: float


def interleave(
    models: Sequence[Predict], feeds: Sequence[Feeds], timing: Timing, clock: Clock = time.perf_counter
) -> tuple[tuple[float, ...], ...]:
    """Milliseconds of each model's runs; entry i of every model comes from round i.

    feeds: at least one input that fits all models; round i uses `feeds[i % len(feeds)]`.
    clock: seconds, monotonic. Raises UsageError without feeds; whatever a model raises passes through.
    """
    if not feeds:
        raise UsageError("at least one input to time the models with", "none", "Pass one sample or batch.")
    order = random.Random(timing.seed)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        _warm_up(models, feeds, timing, order, clock)
        rounds: list[list[float]] = []
        start = clock()
        while len(rounds) < timing.rounds:
            if len(rounds) >= timing.min_rounds and clock() - start >= timing.max_seconds:
                break
            if len(rounds) % _CHECK_EVERY == 0 and len(rounds) >= timing.min_rounds and _is_precise(rounds, timing):
                break
            rounds.append(_round(models, feeds[len(rounds) % len(feeds)], order, clock))
    finally:
        if was_enabled:
            gc.enable()
    return tuple(zip(*rounds, strict=True))


def _round(models: Sequence[Predict], feed: Feeds, order: random.Random, clock: Clock) -> list[float]:
    # A new order each round: under a fixed one, each model would always find its predecessor's caches.
    times = [0.0] * len(models)
    for index in order.sample(range(len(models)), len(models)):
        start = clock()
        models[index](feed)
        times[index] = (clock() - start) * 1e3
    return times


def _warm_up(
    models: Sequence[Predict], feeds: Sequence[Feeds], timing: Timing, order: random.Random, clock: Clock
) -> None:
    start = clock()
    rounds: list[list[float]] = []
    while clock() - start < timing.warmup_s:
        rounds.append(_round(models, feeds[len(rounds) % len(feeds)], order, clock))
        if len(rounds) >= 2 * _WINDOW and _is_stable(rounds):
            return


def _is_stable(rounds: Sequence[Sequence[float]]) -> bool:
    before = [median(times) for times in zip(*rounds[-2 * _WINDOW : -_WINDOW], strict=True)]
    after = [median(times) for times in zip(*rounds[-_WINDOW:], strict=True)]
    each = all(abs(a - b) <= _STABLE_EACH * b for a, b in zip(after, before, strict=True))
    return each and abs(sum(after) - sum(before)) <= _STABLE * sum(before)


def _is_precise(rounds: Sequence[Sequence[float]], timing: Timing) -> bool:
    found = [summarize(times) for times in zip(*rounds, strict=True)]
    return all(x.high_ms - x.low_ms <= 2 * timing.precision * x.median_ms for x in found) and timing.precision > 0


def summarize(ms: Sequence[float]) -> Latency:
    """Median and its 95 % interval in milliseconds. Raises UsageError for no times.

    With fewer than 6 runs no interval reaches 95 %; smallest and largest are given then.
    """
    middle, low, high = _median_interval(ms)
    return Latency(middle, low, high, len(ms))


def ratio(a_ms: Sequence[float], b_ms: Sequence[float]) -> Ratio:
    """Median of a / b with its 95 % interval. Raises ShapeMismatch unless both have as many rounds."""
    if len(a_ms) != len(b_ms):
        raise ShapeMismatch(
            "as many runs of both models",
            f"{len(a_ms)} and {len(b_ms)}",
            "Pass times of the same interleaved rounds.",
        )
    return Ratio(*_median_interval([a / b for a, b in zip(a_ms, b_ms, strict=True)]))


def is_tie(a_ms: Sequence[float], b_ms: Sequence[float], tolerance: float = 0.0) -> bool:
    """True when the interval of the paired ratio reaches 1 within `tolerance`: no model is shown faster."""
    found = ratio(a_ms, b_ms)
    return found.low <= 1 + tolerance and found.high >= 1 - tolerance


def _median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    if not values:
        raise UsageError("at least one time", "none", "Measure at least one round.")
    ordered = sorted(values)
    number = len(ordered)
    # The largest j with P(Binomial(n, 1/2) <= j - 1) <= 0.025, in exact integers.
    tails = accumulate(comb(number, i) for i in range(number // 2))
    rank = sum(1 for tail in tails if 40 * tail <= 2**number)
    low = ordered[max(rank - 1, 0)]
    high = ordered[min(number - rank, number - 1)]
    return median(ordered), low, high
