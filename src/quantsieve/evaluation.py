"""One candidate on one target: outputs over a split's samples, compared with the float model sample by sample.

An outcome that may be bad is a value: `Measured` or `Failed`. The float model's outputs on the same target and
samples are the reference. Intervals are 95 %: Wilson's for disagreement; for the loss of a 0/1 score the paired
interval of Agresti and Min (2005), which stays honest when no sample flips; else the normal one of the mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantsieve.data import Samples, batches
from quantsieve.errors import InputError
from quantsieve.targets.base import Target, TargetFailure, predict_each
from quantsieve.tasks import Task, logit_mse, sqnr_db
from quantsieve.tasks import get as get_task

VERSION = 2
REQUEST_BYTES = 16 << 20  # of inputs that go to a target at once
_Z95 = 1.959964

Outputs = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over samples with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a plan's file gave on one split of the samples; arrays hold one value a sample, in the split's order."""

    split: str  # 'search' or 'final'
    metric: str  # the task's name
    scores: np.ndarray  # float64, higher is better
    reference_scores: np.ndarray  # float64, of the float model
    agreement: np.ndarray  # float64 in 0..1, same label as the float model
    errors: np.ndarray  # float64, relative squared error of the float outputs (logits)
    sqnr_db: float  # over all outputs and samples
    num_bad: int  # samples with an output that is not finite

    @property
    def num_samples(self) -> int:
        return len(self.scores)

    @property
    def score(self) -> float:
        return float(self.scores.mean())

    @property
    def reference_score(self) -> float:
        return float(self.reference_scores.mean())

    @property
    def mse(self) -> float:
        """Mean relative squared error of the float outputs: 1 is as large as their variance."""
        return float(self.errors.mean())

    def loss(self) -> Estimate:
        """How much score is lost against float on the same samples; negative when the candidate is better."""
        return paired_loss(self.reference_scores - self.scores)

    def disagreement(self) -> Estimate:
        """Share of samples whose label differs from the float model's."""
        return wilson(float((1 - self.agreement).sum()), self.num_samples)


@dataclass(frozen=True, slots=True)
class Failed:
    """A candidate that the target did not take. kind and stage as `TargetFailure` has them."""

    split: str
    kind: str
    stage: str
    reason: str
    log_tail: str


Outcome = Measured | Failed


@dataclass(frozen=True, slots=True)
class Reference:
    """The float model's outputs on a target, samples stacked on axis 0, by output name, and their variances."""

    outputs: Mapping[str, np.ndarray]
    variance: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Exam:
    """What every candidate of a split is examined with."""

    split: str
    samples: Samples
    indices: np.ndarray
    task: str
    batch: int  # samples a run; 1 where the model's batch is fixed

    def feeds(self) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        return batches(self.samples, self.indices, self.batch)

    @property
    def labels(self) -> np.ndarray | None:
        return None if self.samples.labels is None else self.samples.labels[self.indices]


def run_outputs(target: Target, path: Path, exam: Exam) -> Outputs:
    """All outputs over the exam's samples, stacked on axis 0. Raises TargetFailure."""
    predict = target.load(path)
    rows: list[Outputs] = []
    waiting: list[dict[str, np.ndarray]] = []
    for _, feeds in exam.feeds():
        waiting.append(feeds)
        if sum(array.nbytes for found in waiting for array in found.values()) >= REQUEST_BYTES:
            rows += predict_each(predict, waiting)
            waiting = []
    rows += predict_each(predict, waiting) if waiting else []
    return {name: _stack([row[name] for row in rows]) for name in rows[0]}


def evaluate(target: Target, path: Path, exam: Exam, reference: Reference) -> Outcome:
    """The file at `path` on `target`, compared with the float reference; every failure becomes `Failed`."""
    try:
        outputs = run_outputs(target, path, exam)
        _check_shapes(outputs, reference.outputs)
    except TargetFailure as failure:
        return Failed(exam.split, failure.kind, failure.stage, failure.reason, failure.log_tail)
    return compare(outputs, reference, exam)


def compare(outputs: Mapping[str, np.ndarray], reference: Reference, exam: Exam) -> Measured:
    """Scores, agreement and errors of one candidate's outputs, sample by sample."""
    task, agreement = get_task(exam.task), get_task("agreement")
    bad = _bad_samples(outputs)
    return Measured(
        split=exam.split,
        metric=task.name,
        scores=task.score(outputs, reference.outputs, exam.labels),
        reference_scores=task.score(reference.outputs, reference.outputs, exam.labels),
        agreement=_agreement(agreement, outputs, reference.outputs, bad),
        errors=_errors(outputs, reference, bad),
        sqnr_db=_sqnr(outputs, reference.outputs),
        num_bad=int(bad.sum()),
    )


def _errors(outputs: Mapping[str, np.ndarray], reference: Reference, bad: np.ndarray) -> np.ndarray:
    errors = logit_mse(outputs, reference.outputs, reference.variance)
    return np.where(bad, np.inf, errors) if bad.any() else errors


def _agreement(
    task: Task, outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], bad: np.ndarray
) -> np.ndarray:
    try:
        return task.score(outputs, reference, None)
    except InputError:  # no output has an axis of classes: nothing to take a label from
        return np.where(bad, 0.0, 1.0)


def _sqnr(outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """Of the worst float output: an average over outputs hides a dead one."""
    floats = [name for name, array in reference.items() if array.dtype.kind == "f" and array.size]
    return min((sqnr_db(reference[name], outputs[name]) for name in floats), default=float("inf"))


def _bad_samples(outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    rows = [
        ~np.isfinite(a).reshape(a.shape[0], -1).all(axis=1) for a in outputs.values() if a.dtype.kind == "f" and a.ndim
    ]
    return np.logical_or.reduce(rows) if rows else np.zeros(0, bool)


def _check_shapes(outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> None:
    for name, wanted in reference.items():
        found = outputs.get(name)
        if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
            shown = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            text = f"output {name}: float gives {wanted.dtype} {list(wanted.shape)}, the candidate {shown}"
            raise TargetFailure(text, kind="shape", stage="run")


def _stack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Joined on axis 0; outputs whose other axes differ between samples are padded with zeros to one shape."""
    if arrays[0].ndim == 0:
        return np.stack(arrays)
    if len({a.shape[1:] for a in arrays}) == 1:
        return np.concatenate(arrays)
    widest = [max(a.shape[axis] for a in arrays) for axis in range(1, arrays[0].ndim)]
    padded = [np.pad(a, [(0, 0), *((0, w - n) for w, n in zip(widest, a.shape[1:], strict=True))]) for a in arrays]
    return np.concatenate(padded)


def wilson(count: float, total: int) -> Estimate:
    """A share with Wilson's 95 % interval."""
    share = count / total
    centre = (share + _Z95**2 / (2 * total)) / (1 + _Z95**2 / total)
    half = _Z95 / (1 + _Z95**2 / total) * np.sqrt(share * (1 - share) / total + _Z95**2 / (4 * total**2))
    return Estimate(share, float(max(0.0, min(share, centre - half))), float(min(1.0, max(share, centre + half))))


def paired_loss(differences: np.ndarray) -> Estimate:
    """Mean of the per-sample differences with a 95 % interval; see the module's first lines."""
    n, mean = len(differences), float(differences.mean())
    if np.isin(differences, (-1, 0, 1)).all():
        gained, lost = float((differences < 0).sum()) + 0.5, float((differences > 0).sum()) + 0.5
        total = n + 2
        centre = (lost - gained) / total
        half = _Z95 * np.sqrt(lost + gained - (lost - gained) ** 2 / total) / total
        return Estimate(mean, min(mean, centre - half), max(mean, centre + half))
    half = _Z95 * float(differences.std(ddof=1)) / np.sqrt(n) if n > 1 else float("inf")
    return Estimate(mean, mean - half, mean + half)
