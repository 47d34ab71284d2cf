"""The share of what selective quantization could gain at most: 1 is no disagreement at full int8's size.

A model is a point (file size / float size, disagreement with float). The hypervolume is the area that a set
of points dominates below the reference (1, d), d the disagreement of full int8; the fraction is that area
divided by d * (1 - full int8 size / float size). Full int8 and float alone give 0. A file smaller than full
int8's can push it above 1. Intervals: the final samples are resampled jointly for every model and for d
(paired bootstrap, percentiles).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantsieve.errors import InputError, ShapeMismatch

ROUNDS = 2000
_TAILS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Point:
    """A measured model. agreement: one value in 0..1 a final sample, in the samples' order; 1 = float's label."""

    size_bytes: int
    agreement: np.ndarray

    @property
    def disagreement(self) -> float:
        return float(1 - np.mean(self.agreement))


@dataclass(frozen=True, slots=True)
class Base:
    """What a fraction is measured against: the float file's size and the plain full int8 model."""

    float_bytes: int
    full_int8: Point


@dataclass(frozen=True, slots=True)
class Share:
    """A fraction with its 95 % interval over resampled final samples."""

    value: float
    low: float
    high: float


def hypervolume(sizes: np.ndarray, losses: np.ndarray, reference: tuple[float, float]) -> float:
    """Area that the points dominate, smaller being better in both, below the reference (size, loss).

    sizes, losses: float [points]. A point that is not below the reference in both adds nothing.
    """
    return float(_areas(sizes, losses[None], reference[0], np.array([reference[1]]))[0])


def fraction(points: Sequence[Point], base: Base) -> float:
    """The fraction of the module's first lines. Raises InputError when full int8 leaves nothing to gain."""
    full = base.full_int8
    _check(points, base)
    sizes = np.array([point.size_bytes / base.float_bytes for point in points])
    losses = np.array([point.disagreement for point in points])
    area = hypervolume(sizes, losses, (1.0, full.disagreement))
    return area / (full.disagreement * (1 - full.size_bytes / base.float_bytes))


def replicates(points: Sequence[Point], base: Base, *, rounds: int = ROUNDS, seed: int = 0) -> np.ndarray:
    """Fractions of resampled final samples, float64 [rounds]; NaN where full int8 agrees on all of a resample.

    Equal seeds draw equal samples, so that replicates of two methods on one base can be subtracted.
    """
    _check(points, base)
    full = base.full_int8
    num_samples = len(full.agreement)
    drawn = np.random.default_rng(seed).multinomial(num_samples, np.full(num_samples, 1 / num_samples), size=rounds)
    losses = np.stack([1 - np.asarray(p.agreement, np.float64) for p in (full, *points)], axis=1)
    resampled = drawn @ losses / num_samples
    limits = resampled[:, 0]
    sizes = np.array([point.size_bytes / base.float_bytes for point in points])
    areas = _areas(sizes, resampled[:, 1:], 1.0, limits)
    whole = limits * (1 - full.size_bytes / base.float_bytes)
    return np.divide(areas, whole, out=np.full(rounds, np.nan), where=whole > 0)


def share(points: Sequence[Point], base: Base, *, rounds: int = ROUNDS, seed: int = 0) -> Share:
    """The fraction with its interval."""
    value = fraction(points, base)
    low, high = np.nanpercentile(replicates(points, base, rounds=rounds, seed=seed), _TAILS)
    return Share(value, float(low), float(high))


def lead(ours: Sequence[Point], theirs: Sequence[Point], base: Base, *, rounds: int = ROUNDS) -> Share:
    """How much larger our fraction is than theirs on the same samples, with the paired interval."""
    gap = replicates(ours, base, rounds=rounds) - replicates(theirs, base, rounds=rounds)
    low, high = np.nanpercentile(gap, _TAILS)
    return Share(fraction(ours, base) - fraction(theirs, base), float(low), float(high))


def _areas(sizes: np.ndarray, losses: np.ndarray, size_limit: float, loss_limits: np.ndarray) -> np.ndarray:
    """Hypervolumes of several rows of losses [rows, points] with a loss limit a row: float64 [rows]."""
    order = np.argsort(sizes, kind="stable")
    edges = np.minimum(np.append(sizes[order], size_limit), size_limit)
    best_so_far = np.minimum.accumulate(losses[:, order], axis=1)
    heights = np.maximum(loss_limits[:, None] - best_so_far, 0)
    return heights @ np.diff(edges)


def _check(points: Sequence[Point], base: Base) -> None:
    full = base.full_int8
    if full.disagreement <= 0 or full.size_bytes >= base.float_bytes:
        raise InputError(
            "a full int8 model that is smaller than float and disagrees with it somewhere",
            f"{full.size_bytes} bytes against {base.float_bytes}, disagreement {full.disagreement:g}",
            "Such a model leaves nothing to select; take another.",
        )
    for point in points:
        if np.shape(point.agreement) != np.shape(full.agreement):
            raise ShapeMismatch(
                f"agreement on {len(full.agreement)} samples",
                str(len(point.agreement)),
                "Measure all on one set.",
            )
