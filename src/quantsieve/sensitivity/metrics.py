"""What a perturbed output is compared with the float one by: one value a sample, a plain function each.

A metric is a function of two arrays of one output, (float, perturbed), both [n, ...] of the same shape, to float64 [n].
A plug-in is such a function too. Of the built-in ones every value but `sqnr`'s is higher where it is worse.

| name | value of a sample | unit | worse |
|---|---|---|---|
| mse | mean of (y' - y)^2 over the output | square of the output's unit | higher |
| sqnr | 10 log10(sum y^2 / sum (y' - y)^2) | dB | lower |
| kl_div | sum p log(p / p'), p and p' the softmax of y and y' | nats | higher |
| cos | 1 - cosine of y and y' | 1 | higher |
| top1 | share of decisions whose class differs | 1 | higher |
| top5 | share of decisions whose float class is not among the five highest of y' | 1 | higher |
| max_abs | largest of abs(y' - y) | the output's unit | higher |

kl_div, top1 and top5 need an axis of classes (`tasks`: the last of rank 2 and 3, else axis 1); their values are means
over the decisions of a sample. Outputs that are probabilities already are taken as they are by kl_div, for a second
softmax would flatten them. (Sources: Kullback and Leibler 1951; the others by definition.)
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from quantsieve.errors import InputError, UsageError
from quantsieve.tasks._classes import class_scores, decisions, is_distribution

Metric = Callable[[np.ndarray, np.ndarray], np.ndarray]

_TINY = 1e-12  # least probability: 0 log 0 is 0, and a lost class costs 27 nats instead of infinity


def mse(reference: np.ndarray, perturbed: np.ndarray) -> np.ndarray:
    """Mean squared error, float64 [n]; inf where the perturbed output is not finite."""
    with np.errstate(all="ignore"):
        return _finite(np.square(_rows(perturbed) - _rows(reference)).mean(axis=1), np.inf)


def sqnr(reference: np.ndarray, perturbed: np.ndarray) -> np.ndarray:
    """Signal to quantization noise in dB, float64 [n], lower is worse; inf without noise, -inf when not finite."""
    signal = np.square(_rows(reference)).sum(axis=1)
    with np.errstate(all="ignore"):
        noise = np.square(_rows(perturbed) - _rows(reference)).sum(axis=1)
        values = 10 * (np.log10(signal) - np.log10(noise))
    return _finite(np.where(noise == 0, np.inf, values), -np.inf)


def kl_div(reference: np.ndarray, perturbed: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence of the perturbed from the float distribution in nats, float64 [n]."""
    before, after = _scores(reference).astype(np.float64), _scores(perturbed).astype(np.float64)
    bad = ~np.isfinite(_rows(perturbed)).all(axis=1)
    if not is_distribution(before):
        before, after = _softmax(before), _softmax(np.where(np.isfinite(after), after, 0.0))
    p, q = np.maximum(before, _TINY), np.maximum(np.where(np.isfinite(after), after, 0.0), _TINY)
    values = (p * (np.log(p) - np.log(q))).sum(axis=-1).reshape(len(p), -1).mean(axis=1)
    return np.where(bad, np.inf, np.maximum(values, 0.0))


def cos(reference: np.ndarray, perturbed: np.ndarray) -> np.ndarray:
    """1 - cosine similarity, float64 [n] in 0..2; 1 where one of the two is 0 everywhere or not finite."""
    a, b = _rows(reference), _rows(perturbed)
    with np.errstate(all="ignore"):
        cosine = (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    same = (a == b).all(axis=1)
    return np.where(same, 0.0, 1.0 - _finite(cosine, 0.0).clip(-1.0, 1.0))


def top1(reference: np.ndarray, perturbed: np.ndarray) -> np.ndarray:
    """Share of decisions whose class differs, float64 [n]."""
    differs = decisions(_scores(reference)) != decisions(_scores(perturbed))
    return differs.reshape(len(differs), -1).mean(axis=1)


def top5(reference: np.ndarray, perturbed: np.ndarray) -> np.ndarray:
    """Share of decisions whose float class is not among the five highest perturbed scores, float64 [n].

    Among equal scores the float class is taken to come first. A score that is not finite loses.
    """
    scores = np.nan_to_num(_scores(perturbed).astype(np.float64), nan=-np.inf)
    label = decisions(_scores(reference))
    own = np.take_along_axis(scores, np.maximum(label, 0)[..., None], axis=-1)
    lost = ((scores > own).sum(axis=-1) >= 5) | ~np.isfinite(own[..., 0])
    return lost.reshape(len(lost), -1).mean(axis=1)


def max_abs(reference: np.ndarray, perturbed: np.ndarray) -> np.ndarray:
    """Largest absolute difference, float64 [n]; inf where the perturbed output is not finite."""
    with np.errstate(all="ignore"):
        return _finite(np.abs(_rows(perturbed) - _rows(reference)).max(axis=1), np.inf)


METRICS: Mapping[str, Metric] = MappingProxyType(
    {"mse": mse, "sqnr": sqnr, "kl_div": kl_div, "cos": cos, "top1": top1, "top5": top5, "max_abs": max_abs}
)


def get(metric: str | Metric) -> Metric:
    """A built-in metric by name; a function is its own. Raises UsageError for an unknown name."""
    if callable(metric):
        return metric
    if metric not in METRICS:
        raise UsageError(f"a metric of {', '.join(METRICS)}", repr(metric), "Choose one, or pass a function.")
    return METRICS[metric]


def is_cleaner_when_higher(metric: str | Metric) -> bool:
    """True of `sqnr` alone; a plug-in is taken for an error."""
    return get(metric) is sqnr


def apply(metric: Metric, reference: np.ndarray, perturbed: np.ndarray) -> np.ndarray:
    """The metric's values, checked: float64 [n]. Raises InputError for a function that returns anything else."""
    values = np.asarray(metric(reference, perturbed), np.float64)
    if values.shape != (len(reference),):
        name = getattr(metric, "__name__", "the metric")
        raise InputError(
            f"one value a sample from {name}, shape [{len(reference)}]",
            f"shape {list(values.shape)}",
            "Take the mean over all axes but the first.",
        )
    return values


def _rows(array: np.ndarray) -> np.ndarray:
    return array.reshape(len(array), -1).astype(np.float64)


def _scores(array: np.ndarray) -> np.ndarray:
    found = class_scores(array)
    if found is None:
        shown = f"{array.dtype} {list(array.shape)}"
        raise InputError("a float output with an axis of classes", shown, "Choose mse, sqnr, cos or max_abs.")
    return found


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _finite(values: np.ndarray, otherwise: float) -> np.ndarray:
    return np.where(np.isnan(values), otherwise, values)
