"""The 95 % normal interval of a mean over samples, for all that the scan tells; and how alike two orders are."""

import numpy as np

_Z95 = 1.959964


def half_width(values: np.ndarray, doubt: float | np.ndarray = 0.0) -> np.ndarray:
    """Half the interval of the mean over the last axis, float64 [...]; inf for one sample. values: [..., samples].
    doubt: standard deviation of the mean that does not come from the samples, [...]."""
    count = values.shape[-1]
    if count < 2:
        return np.full(values.shape[:-1], np.inf)
    return np.asarray(_Z95 * np.hypot(values.std(axis=-1, ddof=1) / np.sqrt(count), doubt))


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's; None where one side has no order. By hand: importing scipy.stats takes half a second."""
    ranks = []
    for values in (a, b):
        _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[group])  # ties share their mean rank
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if min(np.ptp(rank) for rank in ranks) > 0 else None
