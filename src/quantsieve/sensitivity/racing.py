"""When a scan has seen enough samples: the ranking is settled, and so are its worst scores.

Scores are looked at after 8, 16, 24, ... samples, and 200 times anew on as many samples drawn from those with
replacement (Efron's bootstrap, which keeps what layers share sample by sample). The ranking is settled when 95 % of
the draws rank the layers as all samples do, to a correlation of at least `RANK`, and agree on all but one of the `TOP`
worst layers: that much of the order may still be chance. A worst score is settled when its 95 % interval leaves out 0.
Where scores are screened, what that leaves open is part of the draws, and no number of samples takes it away.

Some metrics move much more at samples of which the float model is not sure, and tell so beforehand (`exposures`). Then
the most exposed samples come first, and the others' values are foretold: of one row, values are taken to be in
proportion to the exposures (the ratio estimator under Royall's model, 1970). It is first looked when two thirds of all
exposure are probed, and the ranking is settled when 95 % of the draws of what the others may add agree with it to a
correlation of at least `RANK_FORETOLD`, and on the worst layers as above. So the samples probed rank as all would.
"""

from collections.abc import Sequence

import numpy as np

from quantsieve.sensitivity.interval import half_width

LOOKS = (8, 16, 24, 32, 48, 64)  # samples after which the race is looked at; it ends with the last
TOP = 10  # worst layers that matter
RANK = 0.9  # Spearman's, of a draw with all samples
RANK_FORETOLD = 0.95  # the same where only what the other samples may add is drawn
_DRAWS = 200
_UNLIKELY = 0.05  # share of the draws that may disagree
_SHARE = 2 / 3  # of all exposure, to be probed before the first look
_LEAST = 1e-3  # of the mean exposure: less counts as that much, for a gross error moves any sample
_STEP = 8  # samples from look to look after that


def looks(total: int, exposures: np.ndarray | None = None) -> Sequence[int]:
    """After how many samples to look, rising to `total`. exposures: float64 [total], falling, or None."""
    if exposures is None:
        return (*(number for number in LOOKS if number < total), total)
    shares = np.cumsum(exposures) / max(exposures.sum(), np.finfo(np.float64).tiny)
    first = max(LOOKS[0], int(np.searchsorted(shares, _SHARE)) + 1)
    return (*range(first, total, _STEP), total)


def foretold(values: np.ndarray, exposures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values of all samples, float64 [rows, all]; what the foretold ones leave open of the means, float64 [rows]).

    values: float64 [rows, probed], of the first samples. exposures: float64 [all], in the same order.
    """
    probed, exposures = values.shape[1], _levelled(exposures)
    rates = values.sum(axis=1) / exposures[:probed].sum()
    with np.errstate(invalid="ignore"):
        doubts = _of_all(values, exposures).std(axis=0)
    rest = rates[:, None] * exposures[None, probed:]
    return np.concatenate([values, rest], axis=1), np.nan_to_num(doubts)


def _levelled(exposures: np.ndarray) -> np.ndarray:
    mean = float(exposures.mean())
    return np.maximum(exposures, _LEAST * mean) if mean > 0 else np.ones_like(exposures)


def _of_all(values: np.ndarray, exposures: np.ndarray) -> np.ndarray:
    """Draws of the means over all samples, float64 [draws, rows]: each one that was not probed gets the rate of a
    probed one, drawn from as many drawn with replacement, the same in all rows. exposures: none is 0."""
    probed = values.shape[1]
    draw = np.random.default_rng(0)
    chosen = draw.integers(probed, size=(_DRAWS, probed))
    rest = np.take_along_axis(chosen, draw.integers(probed, size=(_DRAWS, len(exposures) - probed)), axis=1)
    weights = np.ones((_DRAWS, probed))
    np.add.at(weights, (np.arange(_DRAWS)[:, None], rest), exposures[None, probed:] / exposures[rest])
    return np.asarray(weights @ values.T / len(exposures))


def is_settled(
    sums: np.ndarray, top: int = TOP, doubts: np.ndarray | None = None, exposures: np.ndarray | None = None
) -> bool:
    """Whether more samples would change neither the ranking nor, by much, its worst scores.

    sums: float64 [rows, samples], one row for each layer and scheme, higher is worse. doubts: float64 [rows], standard
    deviation of each mean that does not come from the samples; None: 0. Of equal sums the answer is the same.
    exposures: float64 [all], of the samples of `sums` and then of those that are not probed; None: of none.
    """
    rows, samples = sums.shape
    if not rows:
        return True
    if samples < 2 or not np.isfinite(sums).all():
        return False
    beside = np.zeros(rows) if doubts is None else doubts
    if exposures is None:
        means, least = sums.mean(axis=1), RANK
        for row in np.argsort(-means, kind="stable")[:top]:
            if half_width(sums[row], float(beside[row])) > means[row]:
                return False
        drawn = _of_population(sums)
    else:
        means, least = foretold(sums, exposures)[0].mean(axis=1), RANK_FORETOLD
        drawn = _of_all(sums, _levelled(exposures))
    drawn += np.random.default_rng(1).standard_normal((_DRAWS, rows)) * beside
    wanted, found = _ranks(means[None]), _ranks(drawn)
    worst = min(top, rows)
    shared = ((found < worst) & (wanted < worst)).sum(axis=1)
    is_same = (_correlations(found, wanted) >= least) & (shared >= min(worst, max(1, worst - 1)))
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
