"""The settings of a run: what decides its numbers, and what only decides how far it gets."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from quantsieve import schemes as scheme_modules
from quantsieve import tasks
from quantsieve.clipping import PERCENTILE, Method
from quantsieve.errors import UsageError
from quantsieve.schemes._formats import STANDARD, Formats
from quantsieve.selection import EVERYTHING, Selection


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that decide numbers: a run folder belongs to one set of them."""

    schemes: tuple[str, ...] = ("int8", "int8-channel")
    metric: str | None = None  # a task's name; None: chosen from labels and outputs
    seed: int = 0
    threads: int = 1  # of the target; measured sessions use exactly so many
    formats: Formats = STANDARD  # of weights and 8-bit activations
    bias_correction: bool = True
    samples: int = 32  # that the scan runs on
    max_samples: int | None = None  # of the data; None: all
    keep_float: tuple[str, ...] = ()  # layers that are never quantized, sorted
    screen: str = "auto"  # or 'on', 'off': whether the scan may estimate prices (see `sensitivity/screen.py`)
    calibration_method: str = "minmax"  # of the ranges of 8-bit activations (see `clipping.py`)
    percentile: float = PERCENTILE  # of the calibration method of that name alone
    selection: Selection = EVERYTHING  # of layers, by hand
    equalize: str = "off"  # or 'on', or 'auto': where simulated plans get better (see `run/equalizing.py`)

    def __post_init__(self) -> None:
        for name in self.schemes:
            scheme_modules.get(name)
        if not self.schemes:
            raise UsageError("at least one scheme", "none", f"Choose from {', '.join(scheme_modules.names())}.")
        if self.metric is not None:
            tasks.get(self.metric)
        for name in ("screen", "equalize"):
            if getattr(self, name) not in ("auto", "on", "off"):
                raise UsageError(f"{name} auto, on or off", repr(getattr(self, name)), "Choose one of them.")
        _ = self.ranges  # told here what is wrong with them
        for name, least in (("threads", 1), ("samples", 1), ("seed", 0), ("max_samples", 1)):
            _check_least(name, getattr(self, name), least)

    @property
    def ranges(self) -> Method:
        """The calibration method. Raises UsageError when there is none of that name or percentile."""
        return Method(self.calibration_method, float(self.percentile))

    def document(self) -> dict[str, object]:
        """As strict JSON can say it; without later settings at their defaults, as older folders have it."""
        defaults: dict[str, object] = {
            "keep_float": (), "screen": "auto", "calibration_method": "minmax", "percentile": PERCENTILE,
            "selection": {}, "equalize": "off",
        }  # fmt: skip
        values = {**asdict(self), "selection": self.selection.document(), **self.formats.document()}
        del values["formats"]
        found = {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a run goes; another limit continues the same run."""

    max_drop: float = 0.01
    confident: bool = False
    timeout: float | None = None  # seconds
    max_trials: int | None = None  # candidates measured on search samples
    workers: int = 2  # probes run at once
    limit_s: float = 300.0  # of one request to the target
    memory_limit: int | None = None  # bytes; None: half of what is free

    def __post_init__(self) -> None:
        _check_least("max_trials", self.max_trials, 1)
        _check_least("workers", self.workers, 1)
        for name, seconds in (("timeout", self.timeout), ("limit_s", self.limit_s)):
            if seconds is not None and not seconds > 0:
                raise UsageError(f"a {name} above 0 seconds", str(seconds), "Give a larger one.")
        if not self.max_drop >= 0:
            raise UsageError("a largest drop of 0 or more", str(self.max_drop), "It is absolute: 0.01 is one point.")


def _check_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UsageError(f"{name} of at least {least}", str(value), "Give a larger one.")


def run_spec(settings: Settings, keys: Mapping[str, str | None]) -> dict[str, object]:
    """What spec.json holds: the settings and the content keys of model and data."""
    return {"settings": settings.document(), **keys}
