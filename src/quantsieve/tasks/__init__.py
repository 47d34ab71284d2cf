"""Quality measures over samples. A new task is a new module here that exports TASK; nothing else changes.

Tasks say what a user cares about; the measures beside them (`logit_mse`, `sqnr_db`, `disagreement`) are taken
always.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

import numpy as np

from quantsieve.errors import UsageError
from quantsieve.tasks._base import Task
from quantsieve.tasks._classes import looks_like_classes
from quantsieve.tasks._function import Score, load_function, load_task, task_name
from quantsieve.tasks._measures import disagreement, logit_mse, output_variance, sqnr_db

__all__ = [
    "Score",
    "Task",
    "choose",
    "disagreement",
    "discover",
    "get",
    "load_function",
    "logit_mse",
    "names",
    "output_variance",
    "sqnr_db",
    "task_name",
]


@cache
def discover() -> tuple[Task, ...]:
    """All tasks, sorted by module name."""
    modules = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    return tuple(importlib.import_module(f"{__name__}.{module}").TASK for module in modules)


def names() -> tuple[str, ...]:
    """The names of all tasks, in the order of their modules."""
    return tuple(task.name for task in discover())


def get(name: str) -> Task:
    """The task of that name, or of the function that `file.py:function` or `module:function` names.

    Raises UsageError, naming the nearest known names, and InputError where there is no such function.
    """
    if ":" in name:
        return load_task(name)
    for task in discover():
        if task.name == name:
            return task
    near = difflib.get_close_matches(name, names(), n=3) or names()
    raise UsageError("the name of a task", repr(name), f"Use one of these: {', '.join(near)}; or file.py:function.")


def choose(outputs: Mapping[str, np.ndarray], labels: np.ndarray | None) -> Task:
    """The task that fits without being told: top1 with labels, agreement on classes, else fidelity.

    outputs: of the float model on some samples, [n, ...] each. A guess from shapes and values: embeddings
    that are not normalised look like logits, so name the task where it matters.
    """
    if labels is not None:
        return get("top1")
    return get("agreement" if looks_like_classes(outputs) else "fidelity")
