"""What a plan computes, in float arithmetic with fake quantization: the simulation of its file.

Follows the same `Placement` as the writer and the same integers, so the two differ only in the order of float sums.
"""

from collections.abc import Mapping

import numpy as np

from quantsieve.model.execute import Affine, Executor, Values, Weights
from quantsieve.model.units import Layer
from quantsieve.model.walks import Walk, Walks
from quantsieve.plan import Placement, Plan, place
from quantsieve.weights import Ingredients

Formats = Mapping[str, Affine]


class Simulation:
    """One plan made ready to run on any number of batches."""

    def __init__(self, executor: Executor, parts: Ingredients, plan: Plan):
        self._executor = executor
        self._plan, self._corrections = plan, parts.corrections
        placement = place(parts.graph, parts.structure, plan, parts.schemes)
        self.outputs, self.reads = roundings(parts, placement)
        self.rounded = placement.rounded  # every tensor that is rounded somewhere
        self.weights = {
            layer.name: fake_weights(parts, layer, plan.scheme(layer.name))
            for layer in parts.structure.quantizable
            if plan.is_quantized(layer.name) and layer.weight is not None
        }

    def run(self, feeds: Mapping[str, np.ndarray]) -> Values:
        """Outputs of the graph by name, for one batch."""
        return self.walk(Walks(self._executor, [feeds], 0))[0]

    def walk(self, walks: Walks) -> list[Values]:
        """Outputs of the graph by name, of each of the batches that are walked."""
        executor, walk = self._executor, Walk(walks)
        for index, layer in enumerate(executor.steps):
            name = layer.name if layer is not None else ""
            reads, shift = self.reads.get(name, {}), self._corrections.shift(self._plan.scheme(name), name)
            rounded = tuple(made for made in executor.makes(index) if made in self.outputs)
            correction = shift.tobytes() if shift is not None else None
            decision = (self._plan.scheme(name), correction, rounded)
            if walk.follow(decision) is None:
                weights = self.weights.get(name)
                made = [executor.made_rounded(index, s, weights, reads, self.outputs) for s in walk.states]
                walk.take(decision, made)
        return walk.states


def roundings(parts: Ingredients, placement: Placement) -> tuple[Formats, Mapping[str, Formats]]:
    """Made values that are rounded for all readers; by layer, values that it alone reads rounded."""
    outputs = {root: parts.affine(root, form) for root, form in placement.outputs.items()}
    reads = {
        layer: {read.name: parts.affine(read.root, read.form) for read in found}
        for layer, found in placement.reads.items()
    }
    return outputs, reads


def fake_weights(parts: Ingredients, layer: Layer, scheme: str) -> Weights:
    """Weight and bias as the integers of the scheme stand for them, float32."""
    return parts.integers(layer, scheme).dequantized()
