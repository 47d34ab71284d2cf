"""The integers of a layer under a scheme: rounded weights, and a bias corrected for the mean error of that rounding.

Bias correction: rounding the weights moves each output channel's mean by E[(W' - W) x]; a layer is linear before its
activation, so this is (W' - W) applied to E[x], the mean input that calibration kept. The correction is subtracted
from the bias before the bias is rounded; it costs no byte and no time. (Source: Nagel et al. 2019, "Data-free
quantization through weight equalization and bias correction", section 4.2, with the mean taken from data.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quantsieve.calibrate import Calibration
from quantsieve.model.execute import OWN_RANGE, Affine, Executor
from quantsieve.model.graph import Graph
from quantsieve.model.units import Layer, Structure, layout_root
from quantsieve.plan import Options
from quantsieve.schemes import Scheme
from quantsieve.schemes._affine import QuantizedLayer

VERSION = 1


@dataclass(frozen=True, slots=True)
class Corrections:
    """shifts: by scheme, by layer: float32 (channels,), the mean error of the layer's output before its activation."""

    shifts: Mapping[str, Mapping[str, np.ndarray]]

    def shift(self, scheme: str, layer: str) -> np.ndarray | None:
        return self.shifts.get(scheme, {}).get(layer)


NO_CORRECTIONS = Corrections({})


def correct_biases(
    executor: Executor, calibration: Calibration, schemes: Sequence[Scheme], options: Options
) -> Corrections:
    """The mean error of every layer that has weights, a bias and a mean input, under every scheme it may have."""
    shifts: dict[str, dict[str, np.ndarray]] = {scheme.name: {} for scheme in schemes}
    for layer in executor.structure.quantizable:
        mean = calibration.mean_inputs.get(layer.name)
        if layer.weight is None or layer.bias is None or mean is None:
            continue
        for scheme in schemes:
            if scheme.name not in options.schemes.get(layer.name, ()):
                continue
            weight, _ = constants(executor.graph, layer)
            rounded = integers(executor.graph, layer, scheme, calibration, NO_CORRECTIONS).weight.dequantized()
            shifts[scheme.name][layer.name] = channel_means(executor.core_output(layer, mean, rounded - weight), layer)
    return Corrections(shifts)


def constants(graph: Graph, layer: Layer) -> tuple[np.ndarray, np.ndarray | None]:
    """Float weight and bias of a layer that has weights."""
    weight = graph.constant(layer.weight or "")
    assert weight is not None
    return weight, graph.constant(layer.bias) if layer.bias else None


def integers(
    graph: Graph, layer: Layer, scheme: Scheme, calibration: Calibration, corrections: Corrections
) -> QuantizedLayer:
    """Weight and bias of the layer under the scheme, bias corrected where a correction is known."""
    weight, bias = constants(graph, layer)
    shift = corrections.shift(scheme.name, layer.name)
    if bias is not None and shift is not None:
        bias = (bias - shift).astype(np.float32)
    scale = None
    if scheme.activation not in (None, *OWN_RANGE):
        scale = calibration.ranges[layout_root(graph, layer.inputs[0])].affine(scheme.activation).scale
    return scheme.quantize(layer, weight, bias, scale)


def channel_means(error: np.ndarray, layer: Layer) -> np.ndarray:
    axis = 1 if layer.op_type in ("Conv", "ConvTranspose") else error.ndim - 1
    others = tuple(i for i in range(error.ndim) if i != axis)
    return error.mean(axis=others, dtype=np.float64).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What a plan is written or simulated with: the prepared model and the facts about it."""

    graph: Graph
    structure: Structure
    calibration: Calibration
    corrections: Corrections
    schemes: Mapping[str, Scheme]
    weight_type: str = "s8"  # 's8' or 'u8': the same numbers, in the type that the target multiplies exactly
    # By layer and scheme, what was rounded under these corrections: a walk, a simulation and a file ask in turn.
    _made: dict[tuple[str, str], QuantizedLayer] = field(default_factory=dict, compare=False, repr=False)

    def affine(self, root: str, form: str) -> Affine:
        return self.calibration.ranges[root].affine(form)

    def integers(self, layer: Layer, scheme: str) -> QuantizedLayer:
        made = self._made.get((layer.name, scheme))
        if made is None:
            made = integers(self.graph, layer, self.schemes[scheme], self.calibration, self.corrections)
            self._made[layer.name, scheme] = made
        return made

    def with_corrections(self, corrections: Corrections) -> "Ingredients":
        return self if corrections is self.corrections else replace(self, corrections=corrections, _made={})
