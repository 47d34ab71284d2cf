"""Which samples calibrate, which guide the search and which give the final figures.

Each class is shuffled and its samples are spread evenly over [0, 1); the samples in the order of these
positions are cut into consecutive parts. So every part, and every prefix of a part, has about the class
shares of the whole, and without labels the order is a plain shuffle. A sample belongs to one part at most.
"""

from dataclasses import dataclass

import numpy as np

from quantsieve.data.samples import read_only
from quantsieve.errors import InputError

MIN_CALIBRATION = 4
MIN_SEARCH = 4
MIN_FINAL = 8


@dataclass(frozen=True, slots=True)
class Split:
    """Three disjoint sets of sample numbers: read-only int64 arrays, in the order they were drawn."""

    calibration: np.ndarray
    search: np.ndarray
    final: np.ndarray


def split(
    num_samples: int,
    seed: int,
    *,
    calibration: int | None = None,
    search: int | None = None,
    final: int | None = None,
    labels: np.ndarray | None = None,
) -> Split:
    """The split of samples 0..num_samples-1 that the seed fixes.

    calibration, search, final: sizes, at least 1; None for min(100, 20 %), 25 % of the rest, and what is left
    (at least 4, 4 and 8). `calibration=0` when calibration samples come from a source of their own: then only
    search and final are cut, 25 to 75. labels: int [n], to give every part the class shares of the whole.
    Raises InputError with the counts when the samples do not suffice.
    """
    if seed < 0:
        raise InputError("a seed of 0 or more", f"{seed}", "Give another --seed.")
    sizes = _sizes(num_samples, calibration, search, final)
    order = _order(num_samples, seed, labels)
    bounds = np.cumsum((0, *sizes))
    parts = [read_only(order[bounds[i] : bounds[i + 1]]) for i in range(3)]
    return Split(calibration=parts[0], search=parts[1], final=parts[2])


def _sizes(num_samples: int, calibration: int | None, search: int | None, final: int | None) -> tuple[int, int, int]:
    _check_given(calibration, search, final)
    if calibration is None:
        calibration = max(MIN_CALIBRATION, min(100, num_samples // 5))
    rest = num_samples - calibration
    if search is None:
        # A final size that was asked for comes first; search shrinks down to its minimum.
        search = max(MIN_SEARCH, min(rest // 4, rest - (final or 0)))
    if final is None:
        final = max(MIN_FINAL, rest - search)
    needed = calibration + search + final
    if needed > num_samples:
        parts = f"{search} for search, {final} for the final figures"
        if calibration:
            parts = f"{calibration} for calibration, {parts}"
        raise InputError(
            f"{needed} samples ({parts})", f"{num_samples}", "Give more samples, or ask for smaller parts."
        )
    return calibration, search, final


def _check_given(calibration: int | None, search: int | None, final: int | None) -> None:
    for name, size, least in (("calibration", calibration, 0), ("search", search, 1), ("final", final, 1)):
        if size is not None and size < least:
            raise InputError(f"a {name} size of at least {least}", f"{size}", "Give a larger size, or none at all.")


def _order(num_samples: int, seed: int, labels: np.ndarray | None) -> np.ndarray:
    """Permutation of 0..n-1, int64. Uniform numbers, sorted stably: the same in all numpy versions."""
    generator = np.random.default_rng(seed)
    draws = generator.random(num_samples)
    if labels is None:
        return np.argsort(draws, kind="stable").astype(np.int64)
    if labels.shape != (num_samples,):
        raise InputError(f"{num_samples} labels", f"labels of shape {labels.shape}", "Give one label a sample.")
    positions = np.empty(num_samples)
    ties = generator.random(num_samples)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(draws[members], kind="stable")]
        # One offset a class: rare classes are not drawn to the front together.
        positions[members] = (np.arange(len(members)) + ties[members[0]]) / len(members)
    return np.argsort(positions, kind="stable").astype(np.int64)
