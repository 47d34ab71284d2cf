"""Ranges narrower than the least and greatest value, for 8-bit activations, from a histogram filled in one pass.

A few outliers widen a range for all values: rounding grows with the range, clipping with what is left out. The
histogram holds what the choice needs in fixed memory: HALF bins a side of zero over (-2^e, 2^e). A value outside
doubles the range, and bins merge in pairs. Edges are multiples of a power of two, so that a bin is exactly the sum of
those it was merged from: the counts depend on the values alone, not on their order or on batches. Zeros are counted
in no bin: every range holds zero exactly.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from quantsieve.errors import UsageError
from quantsieve.schemes._affine import activation_parameters

VERSION = 1
METHODS = ("minmax", "percentile", "entropy", "mse")
PERCENTILE = 99.99
HALF = 2048  # bins a side; at least 1024 of them reach up to the largest magnitude, 4 a step of uint8
_BINS = 2 * HALF - 1  # while counting: the middle one holds both signs, since numbers are cut off towards zero
_LEAST_EXPONENT = -100  # below 2^-100 all is in the bins next to zero; HALF / 2^-100 is still a float32
_CHUNK = 1 << 15  # values at a time, so that the steps between stay in the cache
_LEAST_INSIDE = 0.99  # share of the values that entropy must keep
_COARSE = 2.0 ** (-np.arange(33) / 4)  # shares of a side that mse tries, down to 1/256
_FINE = 2.0 ** (np.arange(-7, 8) / 32)  # and around the best of them


@dataclass(frozen=True, slots=True)
class Method:
    """How ranges come from the values of calibration. percentile: in (0, 100], of that method alone.

    Raises UsageError for a name that is none of METHODS, and for a percentile outside or of another method.
    """

    name: str = METHODS[0]
    percentile: float = PERCENTILE

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise UsageError(f"a calibration method out of {', '.join(METHODS)}", repr(self.name), "Choose one.")
        if not 0 < self.percentile <= 100:
            raise UsageError("a percentile above 0, of at most 100", str(self.percentile), "99.99 is usual.")
        if self.name != "percentile" and self.percentile != PERCENTILE:
            todo = "Choose the calibration method percentile, or give none."
            raise UsageError("a percentile with the calibration method percentile alone", f"one with {self.name}", todo)

    @property
    def text(self) -> str:
        """For people: the name, with its percentile."""
        return f"{self.name} {self.percentile:.12g}" if self.name == "percentile" else self.name


MINMAX = Method()


@dataclass(slots=True)
class Histogram:
    """Counts of values other than zero by magnitude, a side each for negative and positive ones."""

    exponent: int = _LEAST_EXPONENT  # of the end of both sides: 2^exponent
    num_positive: int = 0
    num_negative: int = 0
    _counts: np.ndarray = field(default_factory=lambda: np.zeros(_BINS, np.int64))

    @property
    def width(self) -> float:
        """Of a bin, in the unit of the values."""
        return math.ldexp(1 / HALF, self.exponent)

    def add(self, array: np.ndarray, low: float, high: float) -> None:
        """Count finite values, of any shape and float type. low, high: the least and the greatest of them."""
        peak = max(-low, high)
        needed = math.frexp(peak)[1]  # magnitudes are below 2^needed
        if peak > 0 and needed > self.exponent:
            self._double(needed - self.exponent)
        kind = np.result_type(array, np.float32)
        scale = kind.type(1 / self.width)
        flat = array.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            index = np.multiply(part, scale, dtype=kind).astype(np.int32)
            index += HALF - 1
            self._counts += np.bincount(index, minlength=_BINS)
            positive = int(np.count_nonzero(part > 0)) if low < 0 else int(np.count_nonzero(part))
            self.num_positive += positive
            if low < 0:
                self.num_negative += int(np.count_nonzero(part)) - positive

    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """(negative, positive): int64 (HALF,) each; bin j holds magnitudes in [j, j + 1) widths, without zeros."""
        negative, positive = self._counts[HALF - 1 :: -1].copy(), self._counts[HALF - 1 :].copy()
        negative[0] = self.num_negative - int(negative[1:].sum())
        positive[0] = self.num_positive - int(positive[1:].sum())
        return negative, positive

    def _double(self, times: int) -> None:
        """Twice the range, so often; both signs merge towards zero."""
        index = np.arange(-(HALF - 1), HALF)
        merged = np.zeros_like(self._counts)
        np.add.at(merged, np.sign(index) * (np.abs(index) >> min(times, 62)) + HALF - 1, self._counts)
        self._counts = merged
        self.exponent += times


def clipped(histogram: Histogram, low: float, high: float, method: Method) -> tuple[float, float]:
    """(low, high) by the method, within the given ones, zero inside; a side without values is 0.

    low, high: the least and the greatest value in the histogram.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if method.name == "minmax" or low == high:
        return low, high
    negative, positive = histogram.sides()
    if method.name == "percentile":
        share, width = method.percentile / 100, histogram.width
        return max(low, -_percentile(negative, share) * width), min(high, _percentile(positive, share) * width)
    if method.name == "entropy":
        limit = _entropy(negative, positive) * histogram.width
        return max(low, -limit), min(high, limit)
    return _least_error(negative, positive, histogram.width, low, high)


def _percentile(side: np.ndarray, share: float) -> float:
    """The magnitude, in bins, that so great a share of the side's values does not exceed: within one bin of the
    percentile of the values; 0 without values."""
    sums = np.cumsum(side)
    if sums[-1] == 0:
        return 0.0
    wanted = share * float(sums[-1])
    bin = min(int(np.searchsorted(sums, wanted)), int(np.flatnonzero(side)[-1]))
    before = int(sums[bin] - side[bin])
    return bin + min(1.0, (wanted - before) / int(side[bin]))


def _entropy(negative: np.ndarray, positive: np.ndarray) -> float:
    """The magnitude, in bins, at which rounding loses least information: the smallest Kullback-Leibler divergence.

    Source: S. Migacz, 8-bit Inference with TensorRT, GTC 2017; the calibrator of onnxruntime does alike. For each
    limit: the reference is the histogram of magnitudes below it, with what is beyond added to the last bin; the
    candidate the same bins in as many levels as the format has, each level spread evenly over its bins that are not
    empty, nothing added. Differently: 256 levels where only one side has values (128 else), levels of bins as equal as
    they can be, zeros not counted. A limit behind an empty bin, whose divergence is infinite, is none, nor is one with
    more than 1 % of the values beyond: with all of them in the last bin nothing diverges, and little would be left.
    """
    counts = (negative + positive).astype(np.float64)
    levels = 128 if negative.any() and positive.any() else 256
    sums = np.concatenate([[0.0], np.cumsum(counts)])
    filled = np.flatnonzero(counts) + 1
    limits = filled[(filled >= levels) & (sums[filled] >= _LEAST_INSIDE * sums[-1])]
    if limits.size == 0:
        return float(filled[-1])
    starts = -(-np.arange(levels + 1) * limits[:, None] // levels)  # bin j is in the level j * levels // limit
    level_sums = np.diff(sums[starts], axis=1)
    level_bins = np.diff(np.concatenate([[0], np.cumsum(counts > 0)])[starts], axis=1)
    means = level_sums / np.maximum(level_bins, 1)
    logs = np.log(np.where(means > 0, means, 1.0))
    inside, beyond = sums[limits], sums[-1] - sums[limits]
    last = counts[limits - 1] + beyond
    own = np.concatenate([[0.0], np.cumsum(_times_log(counts))])[limits - 1] + _times_log(last)
    crossed = (level_sums * logs).sum(axis=1) + beyond * logs[:, -1]
    divergence = (own - crossed) / sums[-1] - np.log(sums[-1]) + np.log(inside)
    return float(limits[np.argmin(divergence)])


def _times_log(counts: np.ndarray) -> np.ndarray:
    return np.asarray(counts * np.log(np.where(counts > 0, counts, 1.0)))


def _least_error(
    negative: np.ndarray, positive: np.ndarray, width: float, low: float, high: float
) -> tuple[float, float]:
    """(low, high) of the least `rounding_errors` found: both sides shrunk alike, then each for itself, twice."""
    best, least = (low, high), float(rounding_errors(negative, positive, width, [(low, high)])[0])
    both = [(True, True)] if low < 0 < high else []
    single = [(True, False)] * (low < 0) + [(False, True)] * (high > 0)
    for shares, turns in ((_COARSE, both + single), (_FINE, both + single)):
        for is_low, is_high in turns:
            tried = [
                (
                    max(low, best[0] * share) if is_low else best[0],
                    min(high, best[1] * share) if is_high else best[1],
                )
                for share in map(float, shares)
            ]
            errors = rounding_errors(negative, positive, width, tried)
            number = int(np.argmin(errors))
            if errors[number] < least:
                best, least = tried[number], float(errors[number])
    return best


def rounding_errors(
    negative: np.ndarray, positive: np.ndarray, width: float, ranges: list[tuple[float, float]]
) -> np.ndarray:
    """Sum of squared errors of 8-bit rounding under each range, clipping included, in squared widths: float64.

    Values are taken as spread evenly within their bin. In steps of the format the error of a magnitude t is
    t - r(t), r(t) = min(rint(t), last level), and the integral of its square from 0 is r / 12 + (t - r)^3 / 3.
    """
    found = np.zeros(len(ranges))
    parameters = [activation_parameters(low, high) for low, high in ranges]
    steps = np.array([float(scale) for scale, _ in parameters]) / width  # of the format, in widths
    zeros = np.array([zero for _, zero in parameters], np.float64)
    for side, last in ((negative, zeros), (positive, 255 - zeros)):
        if not side.any():
            continue
        counts = side[: np.flatnonzero(side)[-1] + 1].astype(np.float64)
        # The sum over bins of count * (integral at its end - at its begin), sorted by edges.
        at_edge = np.concatenate([[0.0], counts]) - np.concatenate([counts, [0.0]])
        edges = np.arange(len(counts) + 1) / steps[:, None]
        levels = np.minimum(np.rint(edges), last[:, None])
        edges -= levels
        found += (levels / 12 + edges * edges * edges / 3) @ at_edge * steps**3
    return found
