"""The 95 % normal interval of a mean over samples, for all that the scan tells."""

import numpy as np

_Z95 = 1.959964


def half_width(values: np.ndarray) -> np.ndarray:
    """Half the interval of the mean over the last axis, float64 [...]; inf for one sample. values: [..., samples]."""
    count = values.shape[-1]
    if count < 2:
        return np.full(values.shape[:-1], np.inf)
    return np.asarray(_Z95 * values.std(axis=-1, ddof=1) / np.sqrt(count))
