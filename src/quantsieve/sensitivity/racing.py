"""When a scan has seen enough samples: the ranking is settled, and so are its worst scores.

Scores are looked at after 8, 16, 24, ... samples, and 200 times anew on as many samples drawn from those with
replacement (Efron's bootstrap, which keeps what layers share sample by sample). The ranking is settled when 95 % of
the draws rank the layers as all samples do, to a correlation of at least `RANK`, and agree on all but one of the `TOP`
worst layers: that much of the order may still be chance. A worst score is settled when its 95 % interval leaves out 0.
Where scores are screened, what that leaves open is part of the draws, and no number of samples takes it away.

Some metrics move much more at samples of which the float model is not sure, and tell so beforehand (`exposures`). Then
the most exposed samples come first, and the others' values are foretold: of one row, values are taken to be in
proportion to the exposures (the ratio estimator under Royall's model, 1970). It is first looked when half of all
exposure is probed. Then only rows that are open go on: those whose place among the `TOP` worst the draws of what the
other samples may add leave open, and, until 90 % of the draws agree with the ranking to a correlation of at least
`RANK_FORETOLD`, those whose places they move most. So the values probed rank as all would.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from quantsieve.sensitivity.interval import half_width

LOOKS = (8, 16, 24, 32, 48, 64)  # samples after which the race is looked at; it ends with the last
TOP = 10  # worst layers that matter
RANK = 0.9  # Spearman's, of a draw with all samples
RANK_FORETOLD = 0.98  # the same where only what the other samples may add is drawn
_DRAWS = 200
_UNLIKELY = 0.05  # share of the draws that may disagree
_OPEN = 0.1  # the same, of a race over rows
_SHARE = 0.5  # of all exposure, to be probed before the first look
_LEAST = 1e-3  # of the mean exposure: less counts as that much, for a gross error moves any sample
_STEP = 4  # samples from look to look after that


def looks(total: int, exposures: np.ndarray | None = None) -> Sequence[int]:
    """After how many samples to look, rising to `total`. exposures: float64 [total], falling, or None."""
    if exposures is None:
        return (*(number for number in LOOKS if number < total), total)
    shares = np.cumsum(exposures) / max(exposures.sum(), np.finfo(np.float64).tiny)
    first = max(LOOKS[0], int(np.searchsorted(shares, _SHARE)) + 1)
    return (*range(first, total, _STEP), total)


def foretold(values: np.ndarray, exposures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values of all samples, float64 [rows, all]; what the foretold ones leave open of the means, float64 [rows]).

    values: float64 [rows, samples], of the first samples; each row begins with what was probed of it, at least one, and
    is NaN from there on. exposures: float64 [all], in the same order.
    """
    exposures = _levelled(exposures)
    whole = np.empty((len(values), len(exposures)))
    for count, rows in _by_count(values):
        known = values[rows, :count]
        rates = known.sum(axis=1) / exposures[:count].sum()
        whole[rows, :count] = known
        whole[rows, count:] = rates[:, None] * exposures[None, count:]
    with np.errstate(invalid="ignore"):
        doubts = _of_all(values, exposures).std(axis=0)
    return whole, np.nan_to_num(doubts)


def open_rows(values: np.ndarray, exposures: np.ndarray, top: int = TOP) -> np.ndarray:
    """Rows that more samples may move, bool [rows]; both as in `foretold`. Of equal values the answer is the same."""
    exposures, rows = _levelled(exposures), len(values)
    is_partial = np.isnan(values).any(axis=1) if values.shape[1] == len(exposures) else np.ones(rows, bool)
    if rows < 2:
        return np.zeros(rows, bool)
    means = foretold(values, exposures)[0].mean(axis=1)
    if not np.isfinite(means).all():
        return is_partial
    wanted, found = _ranks(means[None]), _ranks(_of_all(values, exposures))
    worst = min(top, rows)
    is_in = found < worst
    is_open = np.zeros(rows, bool)
    if np.mean((is_in & (wanted < worst)).sum(axis=1) < worst) > _OPEN:
        share = is_in.mean(axis=0)
        is_open |= (share > _OPEN) & (share < 1 - _OPEN)
    if np.mean(_correlations(found, wanted) < RANK_FORETOLD) > _OPEN:
        # Every row may move as much as gives the correlation, and those that move more than half of it are to blame.
        usual = (1 - RANK_FORETOLD) * (rows**2 - 1) / 6
        is_open |= np.square(found - wanted).mean(axis=0) > usual / 2
    return is_open & is_partial


def _levelled(exposures: np.ndarray) -> np.ndarray:
    mean = float(exposures.mean())
    return np.maximum(exposures, _LEAST * mean) if mean > 0 else np.ones_like(exposures)


def _by_count(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(samples probed, indices of the rows with as many)."""
    counts = values.shape[1] - np.isnan(values).sum(axis=1)
    for count in np.unique(counts):
        yield int(count), np.flatnonzero(counts == count)


def _of_all(values: np.ndarray, exposures: np.ndarray) -> np.ndarray:
    """Draws of the means over all samples, float64 [draws, rows]: each one that was not probed gets the rate of a
    probed one, drawn from as many drawn with replacement, the same in all rows with as many. exposures: none is 0."""
    means = np.empty((_DRAWS, len(values)))
    for count, rows in _by_count(values):
        draw = np.random.default_rng(0)
        chosen = draw.integers(count, size=(_DRAWS, count))
        rest = np.take_along_axis(chosen, draw.integers(count, size=(_DRAWS, len(exposures) - count)), axis=1)
        weights = np.ones((_DRAWS, count))
        np.add.at(weights, (np.arange(_DRAWS)[:, None], rest), exposures[None, count:] / exposures[rest])
        means[:, rows] = weights @ values[rows, :count].T / len(exposures)
    return means


def is_settled(sums: np.ndarray, top: int = TOP, doubts: np.ndarray | None = None) -> bool:
    """Whether more samples would change neither the ranking nor, by much, its worst scores.

    sums: float64 [rows, samples], one row for each layer and scheme, higher is worse. doubts: float64 [rows], standard
    deviation of each mean that does not come from the samples; None: 0. Of equal sums the answer is the same.
    """
    rows, samples = sums.shape
    if not rows:
        return True
    if samples < 2 or not np.isfinite(sums).all():
        return False
    beside = np.zeros(rows) if doubts is None else doubts
    means = sums.mean(axis=1)
    for row in np.argsort(-means, kind="stable")[:top]:
        if half_width(sums[row], float(beside[row])) > means[row]:
            return False
    drawn = _of_population(sums)
    drawn += np.random.default_rng(1).standard_normal((_DRAWS, rows)) * beside
    wanted, found = _ranks(means[None]), _ranks(drawn)
    worst = min(top, rows)
    shared = ((found < worst) & (wanted < worst)).sum(axis=1)
    is_same = (_correlations(found, wanted) >= RANK) & (shared >= min(worst, max(1, worst - 1)))
    return bool(np.mean(~is_same) <= _UNLIKELY)


def _of_population(sums: np.ndarray) -> np.ndarray:
    """Draws of the means over the samples, float64 [draws, rows]."""
    samples = sums.shape[1]
    weights = np.random.default_rng(0).multinomial(samples, np.full(samples, 1 / samples), _DRAWS) / samples
    means = sums.mean(axis=1)
    moved = (weights @ sums.T - means) * np.sqrt(samples / (samples - 1))  # draws from few samples spread too little
    return np.asarray(means + moved)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Place of each value in its row, 0 for the highest; equal ones in their order."""
    return np.argsort(np.argsort(-values, axis=1, kind="stable"), axis=1)


def _correlations(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of each row of `found` with the one of `wanted`; both hold all ranks once."""
    rows = wanted.shape[1]
    if rows < 2:
        return np.ones(len(found))
    return 1 - 6 * np.square(found - wanted).sum(axis=1) / (rows * (rows**2 - 1))
