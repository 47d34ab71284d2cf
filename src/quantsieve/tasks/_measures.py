"""Distances between a candidate's outputs and the float model's that are taken whatever the task is."""

from collections.abc import Mapping

import numpy as np

from quantsieve.errors import ShapeMismatch
from quantsieve.tasks._base import Outputs, float_outputs, pair
from quantsieve.tasks.agreement import TASK as AGREEMENT


def output_variance(reference: Outputs) -> dict[str, float]:
    """Variance of each float output over all its elements and samples, never 0: the unit of `logit_mse`.

    Take it once over all samples. A constant output has its mean square instead, an output of zeros 1.
    Raises InputError when no output is float.
    """
    variances = {}
    for name in float_outputs(reference):
        values = reference[name].astype(np.float64)
        spread = float(values.var()) if values.size else 0.0
        # Rounding leaves a constant with a variance near eps^2 of its square: not a spread to divide by.
        square = float(np.square(values).mean()) if values.size else 0.0
        variances[name] = spread if spread > 1e-20 * square else square or 1.0
    return variances


def logit_mse(outputs: Outputs, reference: Outputs, variance: Mapping[str, float]) -> np.ndarray:
    """Relative squared error, float64 [n]: mean of (y' - y)^2 / variance, then over float outputs.

    variance: from `output_variance`. 1 means an error as large as the outputs' spread; +inf where the
    candidate is not finite, never NaN. Raises ShapeMismatch when the two differ in names or shapes,
    InputError without floats.
    """
    errors = []
    for name in float_outputs(reference):
        found, expected = pair(outputs, reference, name)
        with np.errstate(all="ignore"):
            squared = np.square(found - expected).reshape(len(found), -1)
            errors.append(squared.sum(axis=1) / max(1, squared.shape[1]) / variance[name])
    return np.nan_to_num(np.stack(errors).mean(axis=0), nan=np.inf, posinf=np.inf)


def disagreement(outputs: Outputs, reference: Outputs) -> np.ndarray:
    """Share of a sample's decisions that differ from the float model's, float64 [n]: 1 - agreement.

    Raises InputError when no output has an axis of classes, ShapeMismatch when shapes differ.
    """
    return 1.0 - AGREEMENT.score(outputs, reference, None)


def sqnr_db(reference: np.ndarray, quantized: np.ndarray) -> float:
    """Signal-to-quantization-noise ratio in decibel: 10 log10(sum x^2 / sum (x - x')^2); +inf when equal.

    reference, quantized: same shape, any rank; sums run over all elements in float64. -inf for an error on a
    signal of zeros, and where `quantized` is not finite. Raises ShapeMismatch when the shapes differ.
    """
    if reference.shape != quantized.shape:
        raise ShapeMismatch(f"an array of shape {reference.shape}", f"{quantized.shape}", "Compare equal tensors.")
    signal = reference.astype(np.float64)
    with np.errstate(all="ignore"):
        noise = float(np.square(signal - quantized.astype(np.float64)).sum())
    if noise == 0:
        return float("inf")
    power = float(np.square(signal).sum())
    if power == 0 or not np.isfinite(noise):
        return float("-inf")
    return float(10 * np.log10(power / noise))
