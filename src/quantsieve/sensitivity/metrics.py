"""What a perturbed output is compared with the float one by: one value a sample, a plain function each.

A metric is a function of two arrays of one output, (float, perturbed), both [n, ...] of the same shape, to float64 [n].
A plug-in is such a function too, and is taken for an error: higher is worse. What each built-in one is, with unit and
direction, stands in `METRICS`. (Sources: Kullback and Leibler 1951 for kl_div; the others by definition.)

kl_div, top1 and top5 need an axis of classes (`tasks`: the last of rank 2 and 3, else axis 1); their values are means
over the decisions of a sample. Outputs that are probabilities already are taken as they are by kl_div, for a second
softmax would flatten them.

The score of a task, which looks at all outputs at once and perhaps at labels, is a metric as well: what the float
model has of it minus what the perturbed one has, so that higher is worse.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from quantsieve import tasks
from quantsieve.errors import InputError, UsageError
from quantsieve.sensitivity.local import CLEANEST_DB
from quantsieve.tasks import Task
from quantsieve.tasks._classes import class_scores, decisions, is_distribution

Metric = Callable[[np.ndarray, np.ndarray], np.ndarray]
Arrays = Mapping[str, np.ndarray]
Values = TypeVar("Values", float, np.ndarray)

HIGHER, LOWER = "higher is worse", "lower is worse"
QUALITY = "quality"  # the score of the task that fits the model and its data
_TINY = 1e-12  # least probability: 0 log 0 is 0, and a lost class costs 27 nats instead of infinity
_TASK_NAMES = {"top1": "accuracy"}  # where the name of a task is that of a metric, which compares with the float model


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a score says. direction: HIGHER or LOWER; is_error: no score is below 0."""

    name: str
    text: str
    unit: str
    direction: str = HIGHER
    is_error: bool = True

    def worse(self, values: Values) -> Values:
        """The values, turned so that higher is worse."""
        return -values if self.direction == LOWER else values


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric in use: a function of each output, or a task."""

    meaning: Meaning
    compare: Metric | Task
    needs_classes: bool = False
    has_channels: bool = False  # whether its value of one channel alone means something
    # Of a float output, [n, ...] -> float64 [n]: what the values of the samples are in proportion to, for errors alike.
    exposure: Callable[[np.ndarray], np.ndarray] | None = None


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


def indecision(reference: np.ndarray) -> np.ndarray:
    """1 - sum p^2 of the float distribution, mean over the decisions, float64 [n] in 0..1: the Gini-Simpson index.

    A small error d of the logits has a divergence of d' (diag(p) - p p') d / 2; of errors alike and independent in all
    classes the mean is in proportion to the trace, which this is.
    """
    scores = _scores(reference).astype(np.float64)
    p = scores if is_distribution(scores) else _softmax(np.where(np.isfinite(scores), scores, 0.0))
    return np.asarray((1.0 - np.square(p).sum(axis=-1)).clip(0.0, 1.0).reshape(len(p), -1).mean(axis=1))


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


def _built_in(function: Metric, text: str, unit: str, direction: str = HIGHER) -> Measure:
    needs_classes = function in (kl_div, top1, top5)
    meaning = Meaning(function.__name__, text, unit, direction, direction == HIGHER)
    return Measure(meaning, function, needs_classes, not needs_classes, indecision if function is kl_div else None)


_OUTPUT_UNIT = "the output's unit"
METRICS: Mapping[str, Measure] = MappingProxyType(
    {
        measure.meaning.name: measure
        for measure in (
            _built_in(mse, "mean of (y' - y)^2 over an output", "square of the output's unit"),
            _built_in(sqnr, "10 log10(sum y^2 / sum (y' - y)^2) of an output", "dB", LOWER),
            _built_in(kl_div, "sum p log(p / p') over the classes of an output, p and p' its softmax", "nats"),
            _built_in(cos, "1 - cosine of y and y' of an output", "1"),
            _built_in(top1, "share of decisions whose class is not the float model's", "1"),
            _built_in(top5, "share of decisions whose float class is not among the five highest", "1"),
            _built_in(max_abs, "largest abs(y' - y) of an output", _OUTPUT_UNIT),
        )
    }
)


def of_tasks() -> dict[str, str]:
    """Name of the task by name of its metric."""
    return {_TASK_NAMES.get(name, name): name for name in tasks.names()}


def names() -> tuple[str, ...]:
    """Every name that `get` knows."""
    return (*METRICS, *of_tasks())


def get(metric: str | Metric | Task, name: str | None = None) -> Measure:
    """A built-in metric or a task's by name; a task or a function as it is. name: of a function, to be told by.

    Raises UsageError for an unknown name.
    """
    if isinstance(metric, str):
        if metric in METRICS:
            return METRICS[metric]
        if metric not in of_tasks():
            near = get_close_matches(metric, names(), n=3) or names()
            raise UsageError("the name of a metric", repr(metric), f"Use {', '.join(near)}, or a function of your own.")
        metric = tasks.get(of_tasks()[metric])
    if callable(metric):
        own = name or str(getattr(metric, "__name__", type(metric).__name__))
        told = [*(metric.__doc__ or "").strip().splitlines(), own]
        return Measure(
            Meaning(own, told[0].rstrip("."), "as the function has it", is_error=False), metric, has_channels=True
        )
    shown = _TASK_NAMES.get(metric.name, metric.name)
    return Measure(Meaning(shown, f"loss of the {metric.description}", "1", is_error=False), metric)


def values(measure: Measure, reference: Arrays, perturbed: Arrays, labels: np.ndarray | None) -> dict[str, np.ndarray]:
    """Values by output, float64 [n] each; those of a task, which takes all outputs together, by the name ''.

    reference, perturbed: float outputs, [n, ...] each; an output without an axis of classes is left out where the
    metric needs one. An SQNR counts as 200 dB at most, so that one sample without noise leaves the others a mean.
    Raises InputError when no output can be compared.
    """
    if not callable(measure.compare):
        task = measure.compare
        return {"": task.score(reference, reference, labels) - task.score(perturbed, reference, labels)}
    return {
        name: _limited(measure, apply(measure.compare, reference[name], perturbed[name]))
        for name in _compared(reference, measure.needs_classes)
    }


def exposures(measure: Measure, reference: Arrays) -> np.ndarray | None:
    """Of each sample, float64 [n], the mean over the outputs that the metric compares; None where it tells none.
    Raises InputError when no output can be compared."""
    if measure.exposure is None:
        return None
    return np.mean([measure.exposure(reference[name]) for name in _compared(reference, measure.needs_classes)], axis=0)


def no_channels(measure: Measure) -> UsageError:
    """What is wrong with asking the metric for channels."""
    allowed = ", ".join(name for name, found in METRICS.items() if found.has_channels)
    return UsageError("a metric with a value of each channel", measure.meaning.name, f"Choose from {allowed}.")


def channel_values(measure: Measure, reference: Arrays, perturbed: Arrays) -> dict[str, np.ndarray]:
    """Values by output with an axis of classes, or of channels, float64 [n, channels] each: of each channel alone.

    Raises UsageError where the metric has no value of a channel, InputError when no output has such an axis.
    """
    compare = measure.compare
    if not measure.has_channels or not callable(compare):
        raise no_channels(measure)
    found = {}
    for name in _compared(reference, needs_classes=True):
        before, after = (_by_channel(_scores(arrays[name])) for arrays in (reference, perturbed))
        if compare is cos and before.shape[1] == 1:
            shown = f"output '{name}' with one, whose cosine is a sign"
            raise UsageError("several values a channel for cos", shown, "Choose mse, sqnr or max_abs.")
        channels = len(before) // len(reference[name])
        found[name] = _limited(measure, apply(compare, before, after)).reshape(-1, channels)
    return found


def apply(metric: Metric, reference: np.ndarray, perturbed: np.ndarray) -> np.ndarray:
    """The metric's values, checked: float64 [n]; what is not a number is inf.

    Raises InputError for a function that returns anything else.
    """
    name = getattr(metric, "__name__", "the metric")
    try:
        found = np.asarray(metric(reference, perturbed), np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"float values of a sample from {name}", f"{type(error).__name__}: {error}", "Correct the function."
        ) from error
    if found.shape != (len(reference),):
        raise InputError(
            f"one value a sample from {name}, shape [{len(reference)}]",
            f"shape {list(found.shape)}",
            "Take the mean over all axes but the first.",
        )
    if metric is not sqnr and np.isneginf(found).any():
        raise InputError(f"values of {name} that are finite or inf, the worst", "-inf", "Turn its sign.")
    return _finite(found, np.inf)


def _compared(reference: Arrays, needs_classes: bool) -> Sequence[str]:
    named = [name for name, array in reference.items() if not needs_classes or class_scores(array) is not None]
    if not named and reference:
        _scores(next(iter(reference.values())))
    if not named:
        raise InputError("a float output to compare", "none", "Expose the logits as an output of the model.")
    return named


def _limited(measure: Measure, found: np.ndarray) -> np.ndarray:
    return found.clip(-CLEANEST_DB, CLEANEST_DB) if measure.compare is sqnr else found


def _by_channel(scores: np.ndarray) -> np.ndarray:
    """[n, ..., channels] as [n * channels, values a channel]."""
    moved = np.moveaxis(scores, -1, 1)
    return moved.reshape(moved.shape[0] * moved.shape[1], -1)


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
