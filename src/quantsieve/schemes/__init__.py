"""Precisions that a layer may be given. A new scheme is a new module here that exports SCHEME; nothing else changes."""

import importlib
import pkgutil
from functools import cache

from quantsieve.errors import UsageError
from quantsieve.schemes._static import Scheme

FLOAT = "float"  # the scheme of a layer that is left alone; it needs no module


@cache
def discover() -> tuple[Scheme, ...]:
    """All schemes, sorted by module name."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    return tuple(importlib.import_module(f"{__name__}.{name}").SCHEME for name in names)


def names() -> tuple[str, ...]:
    return tuple(scheme.name for scheme in discover())


def get(name: str) -> Scheme:
    """The scheme of that name. Raises UsageError naming the known ones."""
    for scheme in discover():
        if scheme.name == name:
            return scheme
    raise UsageError(f"a scheme out of {', '.join(names())}", repr(name), "Choose one of them.")
