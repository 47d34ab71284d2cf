"""Scales, ticks and the staircase of the front, for the picture and the page alike.

Losses of one run may lie between 0.3 % and 90 %: then the axis is linear up to a threshold and logarithmic
above it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """low, high: of the axis. threshold: where it turns logarithmic, None for a linear axis. ticks:
    ascending."""

    low: float
    high: float
    threshold: float | None
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        low, high = self._warp(self.low), self._warp(self.high)
        return (self._warp(value) - low) / (high - low)

    def _warp(self, value: float) -> float:
        if self.threshold is None or abs(value) <= self.threshold:
            return value
        return math.copysign(self.threshold * (1 + math.log(abs(value) / self.threshold)), value)


def linear_axis(values: Sequence[float], margin: float = 0.06) -> Axis:
    """Over the values with a margin on both sides, about five round ticks."""
    low, high = min(values), max(values)
    spread = (high - low) or abs(high) or 1.0
    low, high = low - margin * spread, high + margin * spread
    return Axis(low, high, None, _round_ticks(low, high))


def loss_axis(losses: Sequence[float], max_drop: float) -> Axis:
    """Over losses and 0; logarithmic above the budget when the worst loss is many times that.

    losses: points, not ends of intervals, which may leave the picture."""
    low, high = min(0.0, *losses), max(0.0, *losses, 1.5 * max_drop)
    if high <= 8 * max_drop or high <= 0.04 or max_drop <= 0:
        spread = (high - low) or 1.0
        low, high = low - 0.08 * spread, high + 0.3 * spread
        return Axis(low, high, None, _round_ticks(low, high))
    threshold = max(max_drop, 0.005)
    low, high = min(low, 0.0) - 0.3 * threshold, 1.35 * high
    ladder = (step * 10.0**power for power in range(-4, 3) for step in _STEPS)
    ticks = (0.0, threshold, *(t for t in ladder if 1.5 * threshold < t <= high))
    return Axis(low, high, threshold, tuple(ticks))


def staircase(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of what is reached in size and loss: by size, each with a lower loss than all before it."""
    corners: list[tuple[float, float]] = []
    for size, loss in sorted(points):
        if not corners or loss < corners[-1][1]:
            corners.append((size, loss))
    return corners


def _round_ticks(low: float, high: float) -> tuple[float, ...]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (*_STEPS, 10.0) if s * power >= 0.999 * rough)
    first = math.ceil(low / step)
    return tuple(round(k * step, 12) + 0.0 for k in range(first, math.floor(high / step) + 1))
