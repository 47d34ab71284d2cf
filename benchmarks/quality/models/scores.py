"""Scores that onnxruntime's outputs do not show by themselves: read text, and found objects."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Outputs = Mapping[str, np.ndarray]
Score = Callable[[Outputs, Outputs, np.ndarray | None], np.ndarray]

_SCORE, _IOU, _SAME = 0.3, 0.45, 0.5  # a detection; what suppresses another; what counts as the same object
_STRIDES = (8, 16, 32)


def exact_text(characters: Sequence[str], texts: Sequence[str]) -> Score:
    """Whether a line is read exactly, spaces apart. texts: of sample i the text is texts[label i]."""
    wanted = [text.replace(" ", "") for text in texts]

    def score(outputs: Outputs, reference: Outputs, labels: np.ndarray | None) -> np.ndarray:
        """Share of text lines that are read exactly, spaces apart."""
        (probabilities,) = outputs.values()
        assert labels is not None
        read = [decode(row, characters).replace(" ", "") for row in probabilities]
        return np.asarray([found == wanted[label] for found, label in zip(read, labels, strict=True)], np.float64)

    return score


def decode(probabilities: np.ndarray, characters: Sequence[str]) -> str:
    """Greedy CTC of [steps, classes]: class 0 is blank, class k is characters[k - 1], the last class a space."""
    best = probabilities.argmax(axis=1)
    kept = best[np.concatenate([[True], best[1:] != best[:-1]])]
    names = ["", *characters, " "]
    return "".join(names[k] if k < len(names) else "" for k in kept)


def detections(outputs: Outputs, reference: Outputs, labels: np.ndarray | None) -> np.ndarray:
    """F1 of an image's detections (score 0.3) against the float model's (IoU 0.5, same class)."""
    (found,), (wanted,) = outputs.values(), reference.values()
    return np.asarray([f1(boxes(a), boxes(b)) for a, b in zip(found, wanted, strict=True)], np.float64)


def boxes(rows: np.ndarray) -> np.ndarray:
    """float64 [found, 6]: left, top, right, bottom, score, class, after suppression a class. rows: of YOLOX, 416 px."""
    grid = np.concatenate([_grid(stride) for stride in _STRIDES])
    stride = grid[:, 2]
    with np.errstate(all="ignore"):
        size = np.exp(np.minimum(rows[:, 2:4], 20)) * stride[:, None]
    centre = (rows[:, :2] + grid[:, :2]) * stride[:, None]
    scores = rows[:, 4:5] * rows[:, 5:]
    best = scores.argmax(axis=1)
    top = scores.max(axis=1)
    every = np.concatenate([centre - size / 2, centre + size / 2, top[:, None], best[:, None]], axis=1)
    every = every[top > _SCORE]
    kept: list[np.ndarray] = []
    for box in every[np.argsort(-every[:, 4], kind="stable")]:
        if all(box[5] != other[5] or overlap(box, other) <= _IOU for other in kept):
            kept.append(box)
    return np.asarray(kept, np.float64).reshape(-1, 6)


def f1(found: np.ndarray, wanted: np.ndarray) -> float:
    """Each wanted box is met by at most one found, the best scored first; 1 where nothing is wanted nor found."""
    if not len(found) and not len(wanted):
        return 1.0
    left = list(range(len(wanted)))
    hits = 0
    for box in found:
        fitting = [(overlap(box, wanted[i]), i) for i in left if wanted[i][5] == box[5]]
        best = max(fitting, default=(0.0, -1))
        if best[0] >= _SAME:
            left.remove(best[1])
            hits += 1
    return 2 * hits / (len(found) + len(wanted))


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Intersection over union of two boxes."""
    sides = np.minimum(a[2:4], b[2:4]) - np.maximum(a[:2], b[:2])
    if (sides <= 0).any():
        return 0.0
    both = float(np.prod(sides))
    return both / (float(np.prod(a[2:4] - a[:2])) + float(np.prod(b[2:4] - b[:2])) - both)


def _grid(stride: int) -> np.ndarray:
    side = 416 // stride
    y, x = np.mgrid[:side, :side]
    return np.stack([x.ravel(), y.ravel(), np.full(side * side, stride)], axis=1).astype(np.float64)
