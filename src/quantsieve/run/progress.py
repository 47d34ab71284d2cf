"""How far a command is: what the stages tell whoever watches. Nothing is decided from it or stored."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One report of a stage. total: 0 when it is not known; eta_s: seconds left of it, None when unknown."""

    stage: str  # 'prepare', 'calibrate', 'sensitivity', ...
    text: str  # what is done now, for people
    done: int = 0
    total: int = 0
    eta_s: float | None = None


Progress = Callable[[Step], None]


class Silent:
    """A watcher that shows nothing."""

    def __call__(self, step: Step) -> None:
        del step
