"""Top-1 accuracy: 1 where the class of the highest score is the label, else 0; its mean is the accuracy.

Looks at the first output of shape [n, classes] (axes of size 1 apart). Scores that are equal go to the first
class.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quantsieve.errors import InputError
from quantsieve.tasks._base import Outputs, check_finite, pair
from quantsieve.tasks._classes import class_scores, classifier_output, decisions


@dataclass(frozen=True, slots=True)
class Top1:
    name: ClassVar[str] = "top1"
    description: ClassVar[str] = "share of samples whose highest-scored class is the label"
    needs_labels: ClassVar[bool] = True
    higher_is_better: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def score(self, outputs: Outputs, reference: Outputs, labels: np.ndarray | None) -> np.ndarray:
        scores, _ = pair(outputs, reference, classifier_output(reference))
        return (decisions(_rows(scores)) == _given(labels)).astype(np.float64)

    def check(self, reference: Outputs, labels: np.ndarray | None) -> None:
        check_finite(reference)
        name = classifier_output(reference)
        scores = _rows(reference[name])
        labels = _given(labels)
        if labels.shape != (len(scores),):
            raise InputError(f"{len(scores)} labels", f"labels of shape {labels.shape}", "Give one label a sample.")
        outside = labels[(labels < 0) | (labels >= scores.shape[1])]
        if outside.size:
            raise InputError(
                f"labels from 0 to {scores.shape[1] - 1}, the classes of output '{name}'",
                f"{int(outside[0])} and {outside.size - 1} more outside" if outside.size > 1 else f"{int(outside[0])}",
                "Number the classes as the model does.",
            )


def _rows(array: np.ndarray) -> np.ndarray:
    scores = class_scores(array)
    assert scores is not None, "classifier_output returned an output without classes"
    return scores


def _given(labels: np.ndarray | None) -> np.ndarray:
    if labels is None:
        raise InputError("labels for the task top1", "none", "Give labels, or use the task agreement.")
    return labels


TASK = Top1()
