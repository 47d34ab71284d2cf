"""Functions of a user's own: as metrics of a scan, and, here, as the score of a task.

A score is a plain function of all outputs, `(outputs, reference, labels)`, to n numbers from 0 to 1, one a sample;
higher is better.
"""

import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from quantsieve.errors import InputError
from quantsieve.tasks._base import Outputs, check_finite, is_float

Score = Callable[[Outputs, Outputs, np.ndarray | None], Any]

_WANTED = "a metric as file.py:function or module:function"
_ADVICE = "A score is a function of (outputs, reference, labels) that returns one number from 0 to 1 a sample."
_given: dict[str, "FunctionTask"] = {}  # functions that were handed over as objects, by their names


class FunctionTask:
    """A task whose score is a function of the user's. version: of the function's file, so that other code is another
    task and nothing stored under the old one is taken for its scores."""

    needs_labels: ClassVar[bool] = False  # the function itself knows
    higher_is_better: ClassVar[bool] = True

    def __init__(self, name: str, function: Score):
        self.name = name
        self.description = (inspect.getdoc(function) or "a function of the user's own").split("\n")[0].rstrip(".")
        self.version = _version(function)
        self._function = function

    def score(self, outputs: Outputs, reference: Outputs, labels: np.ndarray | None) -> np.ndarray:
        """float64 [n]; 0 for a sample with a float output that is no number, and where the function gives none.

        Raises InputError for what is not one number from 0 to 1 a sample, and for what the function itself raises.
        """
        expected = len(next(iter(reference.values())))
        try:
            given = self._function(outputs, reference, labels)
            found = np.asarray(given, np.float64)
        except Exception as error:  # the user's own code runs here
            raise InputError(f"a score by {self.name}", f"{type(error).__name__}: {error}", _ADVICE) from error
        if found.shape != (expected,):
            shown = f"an array of shape {found.shape}"
            raise InputError(f"{expected} scores of {self.name}, one a sample", shown, _ADVICE)
        found = np.where(np.isnan(found) | _not_finite(outputs, expected), 0.0, found)
        outside = found[(found < 0) | (found > 1)]
        if outside.size:
            raise InputError(f"scores of {self.name} from 0 to 1", f"{outside[0]:g}", _ADVICE)
        return found

    def check(self, reference: Outputs, labels: np.ndarray | None) -> None:
        """Raises InputError where the float model's outputs are not finite or cannot be scored."""
        check_finite(reference)
        self.score(reference, reference, labels)


@cache
def load_task(text: str) -> FunctionTask:
    """The task of `file.py:function` or `module:function`. Raises InputError when there is none."""
    return _given[text] if text in _given else FunctionTask(text, load_function(text))


def _register(function: Score) -> str:
    """The name under which tasks are found by `get` in this process from now on: module and function's own name.

    Raises InputError for what is no function.
    """
    if not callable(function):
        raise InputError("the name of a task or a function", repr(function), _ADVICE)
    name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
    _given[name] = FunctionTask(name, function)
    load_task.cache_clear()
    return name


def load_function(text: str) -> Callable[..., Any]:
    """The function of `file.py:function` or `module:function`. Raises InputError when there is none."""
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


def _not_finite(outputs: Outputs, count: int) -> np.ndarray:
    """bool [count]: samples with a float output that is no number."""
    bad = np.zeros(count, bool)
    for array in outputs.values():
        if is_float(array) and len(array) == count:
            bad |= ~np.isfinite(array.reshape(count, -1)).all(axis=1)
    return bad


def _version(function: Score) -> int:
    """A number of the code: of its file where there is one, else of its source or what its compiled form holds."""
    try:
        content = Path(inspect.getfile(function)).read_bytes()
    except (TypeError, OSError):
        code = getattr(function, "__code__", None)
        content = repr((code.co_code, code.co_consts, code.co_names) if code is not None else function).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:6]) + 1


def task_name(metric: str | Score | None) -> str | None:
    """How the task is named from here on; a function is registered."""
    return metric if metric is None or isinstance(metric, str) else _register(metric)
