"""Agreement with the float model: 1 where both choose the same class, averaged over a sample's positions.

Needs no labels. Says how often a candidate answers differently, not whether the float model was right.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quantsieve.tasks._base import Outputs, check_finite, pair
from quantsieve.tasks._classes import class_scores, decision_output, decisions


@dataclass(frozen=True, slots=True)
class Agreement:
    name: ClassVar[str] = "agreement"
    description: ClassVar[str] = "share of samples (or positions in them) where the class is the float model's"
    needs_labels: ClassVar[bool] = False
    higher_is_better: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def score(self, outputs: Outputs, reference: Outputs, labels: np.ndarray | None) -> np.ndarray:
        found, expected = (class_scores(array) for array in pair(outputs, reference, decision_output(reference)))
        assert found is not None and expected is not None, "decision_output returned an output without classes"
        chosen = decisions(found)
        # NaN in the candidate never agrees, not even with NaN in the reference, which `check` refuses.
        same = (chosen == decisions(expected)) & (chosen >= 0)
        return same.reshape(len(same), -1).mean(axis=1, dtype=np.float64)

    def check(self, reference: Outputs, labels: np.ndarray | None) -> None:
        check_finite(reference)
        decision_output(reference)


TASK = Agreement()
