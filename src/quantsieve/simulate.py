"""What a plan computes, in float arithmetic with fake quantization: the simulation of its file.

Follows the same `Placement` as the writer and the same integers, so the two differ only in the order of float sums.
"""

from collections.abc import Mapping

import numpy as np

from quantsieve.model.execute import Affine, Executor, Values
from quantsieve.model.units import Layer
from quantsieve.plan import Plan, place
from quantsieve.weights import Ingredients, constants

Weights = tuple[np.ndarray, np.ndarray | None]


class Simulation:
    """One plan made ready to run on any number of batches."""

    def __init__(self, executor: Executor, parts: Ingredients, plan: Plan):
        placement = place(parts.graph, parts.structure, plan)
        self._executor = executor
        self.weights = {
            layer.name: fake_weights(parts, layer, plan.scheme(layer.name))
            for layer in parts.structure.quantizable
            if plan.is_quantized(layer.name) and layer.weight is not None
        }
        self.outputs = {root: parts.affine(root) for root in placement.outputs}
        self.reads: Mapping[str, Mapping[str, Affine]] = {
            layer: {name: parts.affine(root) for name, root in pairs} for layer, pairs in placement.reads.items()
        }
        self.roots = placement.roots  # every tensor that is rounded somewhere

    def run(self, feeds: Mapping[str, np.ndarray]) -> Values:
        """Outputs of the graph by name, for one batch."""
        values = self._executor.feed_values(feeds)
        for index, layer in enumerate(self._executor.steps):
            name = layer.name if layer is not None else ""
            self._executor.run_step(index, values, self.weights.get(name), self.reads.get(name, {}), self.outputs)
        return values


def fake_weights(parts: Ingredients, layer: Layer, scheme: str) -> Weights:
    """Weight and bias as the integers of the scheme stand for them, float32."""
    made = parts.integers(layer, scheme)
    bias = made.bias.dequantized() if made.bias is not None else constants(parts.graph, layer)[1]
    return made.weight.dequantized(), bias
