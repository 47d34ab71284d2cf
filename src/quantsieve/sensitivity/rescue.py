"""Leave-one-out: everything quantized but one layer, and how much of the error that takes away.

Answers another question than the prices (what does this layer alone do to a float model?): which single layer, put back
to float, helps the quantized model most. Rescues of layers that share a tensor overlap, so they do not add up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnxruntime import OrtValue

from quantsieve.model.execute import Executor, Values
from quantsieve.plan import FLOAT, Plan, place
from quantsieve.sensitivity.engine import check_finite
from quantsieve.sensitivity.interval import half_width
from quantsieve.sensitivity.suffix import error_vectors, float_outputs
from quantsieve.simulate import Simulation, roundings
from quantsieve.weights import Ingredients

VERSION = 1


@dataclass(frozen=True, slots=True)
class Rescues:
    """full: float64 [samples], relative squared error of the whole plan. errors: float64 [layers, samples], of the plan
    with that layer float. layers: those that the plan quantizes, in graph order."""

    layers: tuple[str, ...]
    full: np.ndarray
    errors: np.ndarray

    def gain(self) -> np.ndarray:
        """float64 [layers]: mean squared error taken away, higher helps more; negative where float makes it worse."""
        return np.asarray((self.full - self.errors).mean(axis=1))

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper end of the 95 % normal interval of each gain, paired by sample, float64 [layers] each."""
        half = half_width(self.full - self.errors)
        return self.gain() - half, self.gain() + half


def rescue_batch(
    executor: Executor,
    parts: Ingredients,
    plan: Plan,
    feeds: Mapping[str, np.ndarray],
    num_samples: int,
    tell: Callable[[int], None] = lambda done: None,
) -> Rescues:
    """Exact leave-one-out errors on one batch; only what a layer's return to float reaches is run again.

    Holds all values of the quantized model for the batch. tell: is called with the number of layers done so far.
    """
    variance = parts.calibration.output_variance
    reference = float_outputs(executor, executor.forward(feeds, keep=lambda name: False))
    check_finite(reference)
    whole = Simulation(executor, parts, plan)
    base = _all_values(executor, whole, feeds)

    def errors(outputs: Values) -> np.ndarray:
        return error_vectors(float_outputs(executor, outputs), reference, variance, num_samples)[0]

    layers = [layer.name for layer in parts.structure.quantizable if plan.is_quantized(layer.name)]
    found = []
    for number, name in enumerate(layers):
        found.append(errors(_without(executor, parts, plan, whole, base, name)))
        tell(number + 1)
    return Rescues(tuple(layers), errors(base), np.stack(found) if found else np.zeros((0, num_samples)))


def join(parts: Sequence[Rescues]) -> Rescues:
    """One fact from the batches, in their order."""
    return Rescues(
        parts[0].layers,
        np.concatenate([part.full for part in parts]),
        np.concatenate([part.errors for part in parts], axis=1),
    )


def _all_values(executor: Executor, simulation: Simulation, feeds: Mapping[str, np.ndarray]) -> Values:
    """Every value of the quantized model, rounded where the plan rounds it for all readers; what such a value is before
    it is rounded stands beside it, under `_unrounded(name)`."""
    values = executor.feed_values(feeds)
    for index, layer in enumerate(executor.steps):
        name = layer.name if layer is not None else ""
        made = executor.made(index, values, simulation.weights.get(name), simulation.reads.get(name, {}))
        for value in made:
            if value in simulation.outputs:
                values[_unrounded(value)] = made[value]
                made[value] = executor.round(made[value], simulation.outputs[value])
        values.update(made)
    return values


def _unrounded(name: str) -> str:
    return f"{name}\0unrounded"


def _without(executor: Executor, parts: Ingredients, plan: Plan, whole: Simulation, base: Values, layer: str) -> Values:
    """Outputs of the plan with one layer float."""
    smaller = Plan({**plan.schemes, layer: FLOAT}, plan.repairs)
    outputs, reads = roundings(parts, place(parts.graph, parts.structure, smaller, parts.schemes))
    changed: dict[str, OrtValue] = {
        name: base[_unrounded(name)] for name in whole.outputs if name not in outputs and _unrounded(name) in base
    }
    for index, step in enumerate(executor.steps):
        name = step.name if step is not None else ""
        own = reads.get(name, {})
        names = executor.reads(index)
        if name != layer and own == whole.reads.get(name, {}) and not any(read in changed for read in names):
            continue
        seen = {read: changed[read] if read in changed else base[read] for read in names}
        made = executor.made(index, seen, None if name == layer else whole.weights.get(name), own)
        for value in made:
            if value in outputs:
                made[value] = executor.round(made[value], outputs[value])
        changed.update(made)
    return {name: changed[name] if name in changed else base[name] for name in executor.graph.output_names}
