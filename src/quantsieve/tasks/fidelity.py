"""Fidelity to the float model: 1 - min(1, |y - y'| / |y|) in L2 norms, averaged over the float outputs.

For outputs that are no classes: embeddings, boxes, images, sequences. 1 is equal, 0 an error as large as the
signal.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quantsieve.tasks._base import Outputs, check_finite, float_outputs, pair


@dataclass(frozen=True, slots=True)
class Fidelity:
    name: ClassVar[str] = "fidelity"
    description: ClassVar[str] = "1 minus the relative L2 error to the float model's outputs, at least 0"
    needs_labels: ClassVar[bool] = False
    higher_is_better: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def score(self, outputs: Outputs, reference: Outputs, labels: np.ndarray | None) -> np.ndarray:
        scores = [1 - _relative_error(*pair(outputs, reference, name)) for name in float_outputs(reference)]
        return np.stack(scores).mean(axis=0)

    def check(self, reference: Outputs, labels: np.ndarray | None) -> None:
        check_finite(reference)


def _relative_error(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """float64 [n] in 0..1. A signal of zeros has error 0 when it is met exactly, else 1."""
    with np.errstate(all="ignore"):
        error = np.linalg.norm((found - expected).reshape(len(found), -1), axis=1)
        signal = np.linalg.norm(expected.reshape(len(expected), -1), axis=1)
        ratio = np.where(error == 0, 0.0, error / signal)
    return np.minimum(1.0, np.nan_to_num(ratio, nan=1.0, posinf=1.0))


TASK = Fidelity()
