"""Metrics as callers name them: by word, as objects, or as functions of a file or a module of the user's."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Literal

from quantsieve.errors import InputError, UsageError
from quantsieve.sensitivity import metrics
from quantsieve.sensitivity.metrics import QUALITY, Measure, Metric
from quantsieve.sensitivity.scan_document import DEFAULT
from quantsieve.tasks import Task

_WANTED = "a metric as file.py:function or module:function"


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
        return metrics.get(_load(metric), metric)
    if isinstance(metric, str) and metric not in metrics.names():
        near = ", ".join((DEFAULT, *metrics.names(), QUALITY))
        raise UsageError("the name of a metric", repr(metric), f"Use one of {near}, or file.py:function.")
    return metrics.get(metric)


def _load(text: str) -> Metric:
    origin, _, name = text.rpartition(":")
    function = getattr(_module(origin), name, None)
    if not callable(function):
        found = "no such name" if function is None else f"an object of type {type(function).__name__}"
        raise InputError(_WANTED, f"{found} for {name} in {origin}", "Correct the name of the function.")
    return function


def _module(origin: str) -> ModuleType:
    try:
        if not origin.endswith(".py"):
            return importlib.import_module(origin)
        spec = importlib.util.spec_from_file_location(Path(origin).stem, origin)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code runs here
        shown = f"{origin}, which cannot be loaded ({type(error).__name__}: {error})"
        raise InputError(_WANTED, shown, "Correct the file, or the path of the module.") from error
    return module
