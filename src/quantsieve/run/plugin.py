"""Metrics as callers name them: by word, as objects, or as functions of a file or a module of the user's."""

from typing import Literal

from quantsieve.errors import UsageError
from quantsieve.sensitivity import metrics
from quantsieve.sensitivity.metrics import QUALITY, Measure, Metric
from quantsieve.sensitivity.scan_document import DEFAULT
from quantsieve.tasks import Task, load_function


def find_metric(metric: str | Metric | Task) -> Measure | Literal["quality"] | None:
    """What scores are by: None for the sums of prices, else the metric, or the word for the task that fits.

    metric: a built-in's name, `file.py:function`, `module:function`, a function or a task. Raises UsageError for an
    unknown name, InputError when a file or module has no such function.
    """
    if metric == DEFAULT:
        return None
    if metric == QUALITY:
        return "quality"
    if isinstance(metric, str) and ":" in metric:
        return metrics.get(load_function(metric), metric)
    if isinstance(metric, str) and metric not in metrics.names():
        near = ", ".join((DEFAULT, *metrics.names(), QUALITY))
        raise UsageError("the name of a metric", repr(metric), f"Use one of {near}, or file.py:function.")
    return metrics.get(metric)
