"""Where the classes lie in the outputs of a model.

Rank 2 (after axes of size 1 where that leaves rank 2): the last axis. Rank 3: the last axis, one decision a
position (tokens). Rank 4 and more: axis 1, one decision a pixel.
"""

import numpy as np

from quantsieve.errors import InputError
from quantsieve.tasks._base import Outputs, is_float

_NORM_TOLERANCE = 1e-2  # float16 rows of 1000 probabilities sum to 1 within this


def class_scores(array: np.ndarray) -> np.ndarray | None:
    """The scores with the classes on the last axis, [n, ..., classes]; None without 2 classes or more."""
    if array.ndim < 2 or not is_float(array):
        return None
    wide = [size for size in array.shape[1:] if size != 1]
    if len(wide) == 1:
        scores = array.reshape(len(array), wide[0])
    elif array.ndim <= 3:
        scores = array
    else:
        scores = np.moveaxis(array, 1, -1)
    return scores if scores.shape[-1] >= 2 else None


def classifier_output(reference: Outputs) -> str:
    """Name of the first output with one decision a sample, those with a telling name before others.

    Raises InputError when there is none.
    """
    possible = [name for name, array in reference.items() if _num_axes(array) == 2]
    if not possible:
        raise InputError("a float output [n, classes]", _shapes(reference), "Use the task fidelity or agreement.")
    return min(possible, key=lambda name: not _has_telling_name(name))


def decision_output(reference: Outputs) -> str:
    """Name of the output that agreement looks at, by names and shapes only: the same on any samples.

    Outputs with a telling name come first, then those with one decision a sample, then any with an axis of
    classes. Raises InputError when there is none.
    """
    possible = [name for name, array in reference.items() if class_scores(array) is not None]
    if not possible:
        raise InputError("a float output with an axis of classes", _shapes(reference), "Use the task fidelity.")
    return min(possible, key=lambda name: (not _has_telling_name(name), _num_axes(reference[name])))


def looks_like_classes(reference: Outputs) -> bool:
    """Whether some output is probably scores of classes, by its rank, its values and its name."""
    return any(_is_classes(name, array) for name, array in reference.items())


def _is_classes(name: str, array: np.ndarray) -> bool:
    scores = class_scores(array)
    if scores is None or scores.size == 0:
        return False
    if _has_telling_name(name) or is_distribution(scores):
        return True
    # Rows of length 1 with both signs are embeddings; feature maps and boxes have rank 3 or more.
    return scores.ndim == 2 and not _has_unit_rows(scores)


def _has_telling_name(name: str) -> bool:
    return any(word in name.lower() for word in ("logit", "prob"))


def _num_axes(array: np.ndarray) -> int:
    """Axes of the class scores; 0 when there are none."""
    scores = class_scores(array)
    return 0 if scores is None else scores.ndim


def is_distribution(scores: np.ndarray) -> bool:
    sums = scores.sum(axis=-1, dtype=np.float64)
    return bool(scores.min() >= 0 and np.all(np.abs(sums - 1) <= _NORM_TOLERANCE))


def _has_unit_rows(scores: np.ndarray) -> bool:
    norms = np.linalg.norm(scores.astype(np.float64), axis=-1)
    return bool(np.all(np.abs(norms - 1) <= _NORM_TOLERANCE))


def _shapes(reference: Outputs) -> str:
    shown = (f"'{name}' {array.dtype} {list(array.shape)}" for name, array in reference.items())
    return ", ".join(shown) or "no outputs"


def decisions(scores: np.ndarray) -> np.ndarray:
    """int64 [n, ...]: the class of the highest score on the last axis, -1 where a score is NaN."""
    return np.where(np.isnan(scores).any(axis=-1), -1, scores.argmax(axis=-1)).astype(np.int64)
