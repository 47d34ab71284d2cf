"""The settings of a run: what decides its numbers, and what only decides how far it gets."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from quantsieve import schemes as scheme_modules
from quantsieve import tasks
from quantsieve.errors import UsageError
from quantsieve.weights import WEIGHT_TYPES


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that decide numbers: a run folder belongs to one set of them."""

    schemes: tuple[str, ...] = ("int8", "int8-channel")
    metric: str | None = None  # a task's name; None: chosen from labels and outputs
    seed: int = 0
    threads: int = 1  # of the target; measured sessions use exactly so many
    weight_type: str = "auto"  # 's8', 'u8', or 'auto': what the target multiplies exactly
    bias_correction: bool = True
    samples: int = 32  # that the scan runs on
    max_samples: int | None = None  # of the data; None: all

    def __post_init__(self) -> None:
        for name in self.schemes:
            scheme_modules.get(name)
        if not self.schemes:
            raise UsageError("at least one scheme", "none", f"Choose from {', '.join(scheme_modules.names())}.")
        if self.metric is not None:
            tasks.get(self.metric)
        if self.weight_type not in ("auto", *WEIGHT_TYPES):
            raise UsageError("a weight type auto, s8 or u8", repr(self.weight_type), "Choose one of them.")
        for name, least in (("threads", 1), ("samples", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} of at least {least}", str(getattr(self, name)), "Give a larger one.")

    def document(self) -> dict[str, object]:
        """As strict JSON can say it."""
        found = asdict(self)
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

    def __post_init__(self) -> None:
        if self.max_trials is not None and self.max_trials < 1:
            raise UsageError("at least one trial", str(self.max_trials), "Give a larger --max-trials.")
        if not self.max_drop >= 0:
            raise UsageError("a largest drop of 0 or more", str(self.max_drop), "It is absolute: 0.01 is one point.")


def run_spec(settings: Settings, keys: Mapping[str, str | None]) -> dict[str, object]:
    """What spec.json holds: the settings and the content keys of model and data."""
    return {"settings": settings.document(), **keys}
