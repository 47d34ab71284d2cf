"""When a scan has seen enough samples: the order of its top layers is settled, and so are their scores.

Prices are looked at after 8, 16, 32, ... samples. Two neighbours are settled when the interval of their paired mean
difference leaves out 0, or when it shows that they differ by no more than `EQUAL` of their score: layers that are alike
need no order. A score is settled when half its interval is at most `PRECISION` of it. The intervals are wider than
95 % ones, since several looks at growing samples are each a chance to stop by luck (Bonferroni over four looks). Where
scores are screened, what that leaves open is part of the intervals, and no number of samples takes it away.
"""

import math

import numpy as np

LOOKS = (8, 16, 32, 64)  # samples after which the race is looked at; it ends with the last
TOP = 10  # layers whose order matters
EQUAL = 0.05
PRECISION = 0.3
# Student's two-sided quantiles of 1 - 0.05 / 4 with n - 1 degrees of freedom, for n of LOOKS.
_QUANTILES = (3.335, 2.837, 2.652, 2.571)


def is_settled(sums: np.ndarray, top: int = TOP, doubts: np.ndarray | None = None) -> bool:
    """Whether more samples would change neither the order of the top rows nor, by much, their scores.

    sums: float64 [rows, samples], one row for each layer and scheme, higher is worse. doubts: float64 [rows], standard
    deviation of each mean that does not come from the samples; None: 0.
    """
    if not len(sums):
        return True
    if sums.shape[1] < 2:
        return False
    order = np.argsort(-sums.mean(axis=1), kind="stable")
    ordered, beside = sums[order], np.zeros(len(sums)) if doubts is None else doubts[order]
    means = ordered.mean(axis=1)
    for index in range(min(top, len(ordered))):
        if _half(ordered[index], beside[index]) > PRECISION * means[index]:
            return False
        if index + 1 < len(ordered):
            gap = ordered[index] - ordered[index + 1]
            size, half = float(gap.mean()), _half(gap, math.hypot(beside[index], beside[index + 1]))
            if size - half <= 0 and size + half > EQUAL * means[index]:
                return False
    return True


def _half(values: np.ndarray, doubt: float) -> float:
    passed = max(1, sum(look <= len(values) for look in LOOKS))
    return _QUANTILES[passed - 1] * math.hypot(float(values.std(ddof=1)) / math.sqrt(len(values)), doubt)
