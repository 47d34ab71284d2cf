"""Where plans over one line are corrected and simulated, on walks that plans with a common start share."""

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np

from quantsieve import repair
from quantsieve.data import batches
from quantsieve.model.walks import Walks
from quantsieve.plan import BIAS, Plan
from quantsieve.run.line import Line
from quantsieve.sensitivity.suffix import error_vectors, float_outputs
from quantsieve.simulate import Simulation
from quantsieve.weights import Ingredients

KEPT_BYTES = 192 << 20  # most of walks over plans, on calibration and on scan samples each


class Bench:
    """Of one line. indices: samples that plans are simulated on. variance: of each float output, asked for once it is
    needed."""

    def __init__(self, line: Line, indices: np.ndarray, weight_type: str, variance: Callable[[], Mapping[str, float]]):
        self.line = line
        self._indices = indices
        self._uncorrected = line.uncorrected(weight_type)
        self._variance = variance

    def parts(self, plan: Plan) -> Ingredients:
        """What the plan is written or simulated with: its biases corrected, where it says so."""
        if BIAS not in plan.repairs:
            return self._uncorrected
        return repair.correct_along(self._uncorrected, plan, self._correction_walks)

    def simulate(self, plan: Plan, parts: Ingredients) -> np.ndarray:
        """Relative squared error of each sample."""
        simulation, variance = Simulation(self.line.executor, parts, plan), self._variance()
        errors = []
        for walks, reference, count in self._scan_walks:
            outputs = float_outputs(self.line.executor, simulation.walk(walks)[0])
            errors.append(error_vectors(outputs, reference, variance, count)[0])
        return np.concatenate(errors)

    @property
    def _kept_bytes(self) -> int:
        return min(KEPT_BYTES, self.line.memory.limit // 8)

    @cached_property
    def _correction_walks(self) -> Walks:
        return Walks(self.line.executor, self.line.correction_batches, self._kept_bytes)

    @cached_property
    def _scan_walks(self) -> list[tuple[Walks, dict[str, np.ndarray], int]]:
        """For each batch of scan samples its walks, the float outputs, and how many samples it has."""
        line = self.line
        fed = list(batches(line.samples, self._indices, line.batch))
        found = []
        for part, feeds in fed:
            values = line.executor.forward(feeds, keep=lambda name: False)
            walks = Walks(line.executor, [feeds], self._kept_bytes // len(fed))
            found.append((walks, float_outputs(line.executor, values), len(part)))
        return found
