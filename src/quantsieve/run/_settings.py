"""spec.json of a run folder: read it, compare it, and name the settings that differ."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantsieve.run._atomic import refusal

_MOST_NAMED = 12
_ABSENT = object()


def settings_text(settings: Mapping[str, object]) -> str:
    """The text of spec.json. Raises TypeError or ValueError for settings that strict JSON cannot say."""
    return json.dumps(settings, indent=2, sort_keys=True, allow_nan=False, default=_as_dict) + "\n"


def read_settings(path: Path) -> dict[str, Any] | None:
    """The settings in a spec.json; None when missing, cut off or no JSON object. Raises RunFolderError."""
    try:
        settings = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as error:
        raise refusal(error, path) from error
    return settings if isinstance(settings, dict) else None


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """One line that names each setting that differs, `name: old -> new`; empty when none does."""
    lines = list(_compare(old, new, ""))
    more = len(lines) - _MOST_NAMED
    return "; ".join(lines[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _compare(old: Any, new: Any, name: str) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            yield from _compare(old.get(key, _ABSENT), new.get(key, _ABSENT), f"{name}.{key}" if name else key)
    # In Python True == 1, in a command they are two settings; 1 and 1.0 are one.
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        yield f"{name}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value)


def _as_dict(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"settings cannot hold {type(value).__name__}")
