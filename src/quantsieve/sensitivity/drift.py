"""What a real session's error is beside the simulated one: 1 where the file does what was simulated."""

import math
from dataclasses import dataclass

NEAR = (0.9, 1.1)  # measured over simulated squared error: outside it the session computes something else
ROUNDING = 1e-10  # of squared errors: float32 arithmetic in another order differs by less, which is no drift


@dataclass(frozen=True, slots=True)
class Drift:
    """The fully quantized model of one scheme, in the simulation and in a real session on the same samples.

    simulated, measured: mean relative squared error of the float outputs; None where it is not known. reason: why
    nothing was measured, else None. num_samples: that both were measured on, 0 with a reason.
    """

    scheme: str
    simulated: float | None
    measured: float | None
    reason: str | None = None
    num_samples: int = 0

    @property
    def ratio(self) -> float | None:
        """Measured over simulated, as `error_ratio` has it."""
        return error_ratio(self.measured, self.simulated)

    @property
    def is_outside(self) -> bool:
        """Whether the two errors are known to differ by more than `NEAR` and `ROUNDING` allow."""
        ratio = self.ratio
        if ratio is None or self.measured is None or self.simulated is None:
            return False
        return abs(self.measured - self.simulated) > ROUNDING and not NEAR[0] <= ratio <= NEAR[1]


def error_ratio(measured: float | None, simulated: float | None) -> float | None:
    """Measured over simulated squared error, 1 when the file does what was simulated; inf when the
    simulation has none; None where one is missing, or both are 0 or infinite."""
    if measured is None or simulated is None:
        return None
    if simulated == 0:
        return None if measured == 0 or math.isnan(measured) else math.inf
    ratio = measured / simulated
    return None if math.isnan(ratio) else ratio
