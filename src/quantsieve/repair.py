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

from quantsieve.model.execute import Affine, Executor, Values
from quantsieve.model.units import Layer
from quantsieve.model.walks import Walk, Walks
from quantsieve.plan import Plan, place
from quantsieve.simulate import fake_weights, roundings
from quantsieve.weights import NO_CORRECTIONS, Corrections, Ingredients, channel_means, constants

VERSION = 2


def correct_along(parts: Ingredients, plan: Plan, walks: Walks) -> Ingredients:
    """The same with corrections for exactly this plan, in place of others.

    walks: on the samples that `calibration.mean_inputs` is the mean of; of no other use. Holds the live values of all
    its batches at once; the caller bounds them.
    """
    executor, walk = walks.executor, Walk(walks)
    plain = parts.with_corrections(NO_CORRECTIONS)
    shifts: dict[str, dict[str, np.ndarray]] = {}
    corrected = plain.with_corrections(Corrections(shifts))  # a layer is rounded when its shift is known
    outputs, all_reads = roundings(plain, place(parts.graph, parts.structure, plan, parts.schemes))
    for index, layer in enumerate(executor.steps):
        name = layer.name if layer is not None else ""
        reads, scheme = all_reads.get(name, {}), plan.scheme(name)
        is_rounded = layer is not None and layer.weight is not None and plan.is_quantized(name)
        decision = scheme, tuple(made for made in executor.makes(index) if made in outputs)
        step = walk.follow(decision)
        weights = shift = None
        if layer is not None and is_rounded:
            shift = _shift(executor, plain, layer, scheme, walk.states, reads) if step is None else step.note
            if isinstance(shift, np.ndarray):
                shifts.setdefault(scheme, {})[name] = shift
            weights = fake_weights(corrected, layer, scheme) if step is None else None
        if step is None:
            made = [executor.made_rounded(index, state, weights, reads, outputs) for state in walk.states]
            walk.take(decision, made, shift)
    return corrected


def _shift(
    executor: Executor,
    plain: Ingredients,
    layer: Layer,
    scheme: str,
    states: Sequence[Values],
    reads: Mapping[str, Affine],
) -> np.ndarray | None:
    """float32 (channels,): the mean error before the activation; None where nothing can be corrected."""
    wanted = plain.calibration.mean_inputs.get(layer.name)
    if wanted is None or layer.bias is None:
        return None
    name = layer.inputs[0]
    mean = _mean([_read(executor, state, name, reads.get(name)) for state in states])
    rounded, _ = fake_weights(plain, layer, scheme)
    got = executor.core_output(layer, mean, rounded)
    aim = executor.core_output(layer, wanted, constants(plain.graph, layer)[0])
    return channel_means(got - aim, layer)


def _read(executor: Executor, state: Values, name: str, affine: Affine | None) -> np.ndarray:
    value = state[name].numpy()
    return value if affine is None else executor.rounded(value, affine)


def _mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over all samples, batch axis kept at 1, float32."""
    total = sum(array.sum(axis=0, keepdims=True, dtype=np.float64) for array in arrays)
    return np.asarray(total / sum(array.shape[0] for array in arrays), np.float32)
