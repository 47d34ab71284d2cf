"""Bias correction along a whole plan: each layer's bias makes up for the mean error that reaches its output.

The layers are walked in order, every batch one layer at a time. At a quantized layer the mean of its output before the
activation is W' m' with m' the mean of the input that the plan's earlier layers really give, and W m in the float
model; the difference is taken off the bias, and the walk goes on with the corrected layer. So a correction sees, and
removes, what earlier corrections and rounding left over. (Source: Nagel et al. 2019, appendix D, empirical bias
correction.) Measured on mobilenetv2_cifar10, per tensor, at 86 % of full int8's size reduction: disagreement 9.6 %
with each layer corrected alone, 6.0 % along the plan.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from quantsieve.model.execute import Executor, Values
from quantsieve.plan import Plan
from quantsieve.simulate import Simulation, fake_weights
from quantsieve.weights import NO_CORRECTIONS, Corrections, Ingredients, channel_means, constants

VERSION = 1


def correct_along(
    executor: Executor, parts: Ingredients, plan: Plan, batches: Sequence[Mapping[str, np.ndarray]]
) -> Corrections:
    """Corrections for exactly this plan. batches: feeds of the samples that `calibration.mean_inputs` is the mean of.

    Holds the live values of all batches at once; the caller bounds them.
    """
    plain = parts.with_corrections(NO_CORRECTIONS)
    simulation = Simulation(executor, plain, plan)
    states = [executor.feed_values(feeds) for feeds in batches]
    shifts: dict[str, dict[str, np.ndarray]] = {}
    for index, layer in enumerate(executor.steps):
        name = layer.name if layer is not None else ""
        reads = simulation.reads.get(name, {})
        weights = None
        if layer is not None and layer.weight is not None and plan.is_quantized(name):
            scheme = plan.scheme(name)
            wanted = parts.calibration.mean_inputs.get(name)
            if wanted is not None and layer.bias is not None:
                affine = reads.get(layer.inputs[0])
                mean = _mean([_read(executor, state, layer.inputs[0], affine) for state in states])
                rounded, _ = fake_weights(plain, layer, scheme)
                got = executor.core_output(layer, mean, rounded)
                aim = executor.core_output(layer, wanted, constants(parts.graph, layer)[0])
                shifts.setdefault(scheme, {})[name] = channel_means(got - aim, layer)
            weights = fake_weights(parts.with_corrections(Corrections(shifts)), layer, scheme)
        for state in states:
            executor.run_step(index, state, weights, reads, simulation.outputs)
    return Corrections(shifts)


def _read(executor: Executor, state: Values, name: str, affine: object) -> np.ndarray:
    value = state[name] if affine is None else executor.round(state[name], affine)  # type: ignore[arg-type]
    return value.numpy().copy() if affine is not None else value.numpy()


def _mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over all samples, batch axis kept at 1, float32."""
    total = sum(array.sum(axis=0, keepdims=True, dtype=np.float64) for array in arrays)
    return np.asarray(total / sum(array.shape[0] for array in arrays), np.float32)
