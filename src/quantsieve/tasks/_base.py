"""The seam between quality measures and the stages that compare models."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from quantsieve.errors import InputError, ShapeMismatch

Outputs = Mapping[str, np.ndarray]  # graph output name -> array whose axis 0 counts the samples


class Task(Protocol):
    """A score per sample, between 0 and 1, higher is better.

    A task has no state: it may be used from several threads and processes.
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """What the score is, for people."""

    @property
    def needs_labels(self) -> bool: ...

    @property
    def higher_is_better(self) -> bool:
        """Always True."""

    @property
    def version(self) -> int:
        """Part of the content key: raise it when numbers change."""

    def score(self, outputs: Outputs, reference: Outputs, labels: np.ndarray | None) -> np.ndarray:
        """float64 [n], one value a sample; never NaN: a sample whose outputs hold NaN scores 0 there.

        outputs: of the candidate; reference: of the float model on the same samples; labels: int64 [n] or
        None. Raises ShapeMismatch when the two differ in names or shapes. Call `check` first.
        """

    def check(self, reference: Outputs, labels: np.ndarray | None) -> None:
        """Raises InputError when the float model's outputs and the labels cannot be scored by this task."""


def is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f"


def float_outputs(reference: Outputs) -> list[str]:
    """Names of the float outputs, in the model's order. Raises InputError when there is none."""
    names = [name for name, array in reference.items() if is_float(array)]
    if not names:
        found = ", ".join(f"'{name}' of {array.dtype}" for name, array in reference.items()) or "no outputs"
        raise InputError("at least one float output", found, "Expose the logits as an output of the model.")
    return names


def pair(outputs: Outputs, reference: Outputs, name: str) -> tuple[np.ndarray, np.ndarray]:
    """One output of both models, in float64. Raises ShapeMismatch when it is missing or shaped otherwise."""
    if name not in outputs:
        raise ShapeMismatch(f"an output '{name}'", ", ".join(outputs) or "none", "Compare models of one interface.")
    found, expected = outputs[name], reference[name]
    if found.shape != expected.shape:
        raise ShapeMismatch(
            f"output '{name}' of shape {expected.shape}",
            f"{found.shape}",
            "Feed both models the same samples; a quantized model keeps its shapes.",
        )
    return found.astype(np.float64), expected.astype(np.float64)


def check_finite(reference: Outputs) -> None:
    """Raises InputError when a float output of the float model holds NaN or infinity on some sample."""
    for name in float_outputs(reference):
        array = reference[name]
        bad = ~np.isfinite(array.reshape(len(array), -1)).all(axis=1)
        if bad.any():
            raise InputError(
                f"finite float outputs '{name}' of the float model",
                f"NaN or infinity on {bad.sum()} of {len(array)} samples, first on number {bad.argmax()}",
                "Check the preprocessing and the samples; quality cannot be compared with that.",
            )
