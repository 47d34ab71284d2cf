"""When a scan has seen enough samples: the ranking is settled, and so are its worst scores.

Scores are looked at after 8, 16, 24, ... samples, and 200 times anew on as many samples drawn from those with
replacement (Efron's bootstrap, which keeps what layers share sample by sample). The ranking is settled when 95 % of
the draws rank the layers as all samples do, to a correlation of at least `RANK`, and agree on all but one of the `TOP`
worst layers: that much of the order may still be chance. A worst score is settled when its 95 % interval leaves out 0.
Where scores are screened, what that leaves open is part of the draws, and no number of samples takes it away.
"""

import numpy as np

from quantsieve.sensitivity.interval import half_width

LOOKS = (8, 16, 24, 32, 48, 64)  # samples after which the race is looked at; it ends with the last
TOP = 10  # worst layers that matter
RANK = 0.9  # Spearman's, of a draw with all samples
_DRAWS = 200
_UNLIKELY = 0.05  # share of the draws that may disagree


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
    worst = np.argsort(-means, kind="stable")[:top]
    if any(half_width(sums[row], float(beside[row])) > means[row] for row in worst):
        return False
    draw = np.random.default_rng(0)
    weights = draw.multinomial(samples, np.full(samples, 1 / samples), _DRAWS) / samples
    moved = (weights @ sums.T - means) * np.sqrt(samples / (samples - 1))  # draws from few samples spread too little
    drawn = means + moved + draw.standard_normal((_DRAWS, rows)) * beside
    wanted, found = _ranks(means[None]), _ranks(drawn)
    shared = ((found < len(worst)) & (wanted < len(worst))).sum(axis=1)
    is_same = (_correlations(found, wanted) >= RANK) & (shared >= min(len(worst), max(1, len(worst) - 1)))
    return bool(np.mean(~is_same) <= _UNLIKELY)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Place of each value in its row, 0 for the highest; equal ones in their order."""
    return np.argsort(np.argsort(-values, axis=1, kind="stable"), axis=1)


def _correlations(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of each row of `found` with the one of `wanted`; both hold all ranks once."""
    rows = wanted.shape[1]
    if rows < 2:
        return np.ones(len(found))
    return 1 - 6 * np.square(found - wanted).sum(axis=1) / (rows * (rows**2 - 1))
