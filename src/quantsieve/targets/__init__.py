"""Where candidates run: one module a target, found by its file; `base` says what a target must do."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache

from quantsieve.errors import UsageError
from quantsieve.targets.base import Target


@cache
def _discovered() -> dict[str, Target]:
    modules = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    loaded = (importlib.import_module(f"{__name__}.{module}") for module in modules)
    targets = (module.TARGET for module in loaded if hasattr(module, "TARGET"))
    return {target.name: target for target in targets}


def names() -> tuple[str, ...]:
    """The names of all targets, in the order of their modules."""
    return tuple(_discovered())


def get(name: str) -> Target:
    """The target of that name with its default options. Raises UsageError, naming the nearest known names."""
    targets = _discovered()
    if name not in targets:
        near = difflib.get_close_matches(name, targets, n=3) or list(targets)
        raise UsageError("the name of a target", repr(name), f"Use one of these: {', '.join(near)}.")
    return targets[name]
