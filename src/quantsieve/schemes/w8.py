"""int8 weights, symmetric, per output channel or row of a lookup: scale_c = max|w_c| / 127. Opset 13.

Activations and bias stay float. The file is as small as with static int8 and no activation is rounded; the layer runs
in float. Runtimes turn the weights to float once, when they load the file (`writing.py` says how).
"""

from typing import ClassVar

import numpy as np

from quantsieve.model.units import Layer
from quantsieve.schemes._affine import QuantizedLayer, round_weight, weight_scale

MIN_OPSET = 13  # DequantizeLinear with an axis


class W8:
    name: ClassVar[str] = "w8"
    version: ClassVar[int] = 1
    activation: ClassVar[str | None] = None
    runs_as: ClassVar[frozenset[str]] = frozenset({"float"})
    description: ClassVar[str] = "int8 weights only, one scale an output channel; the layer runs in float"

    def refusal(self, layer: Layer, opset: int) -> str | None:
        if layer.refusal is not None:
            return layer.refusal
        if layer.weight is None:
            return f"{layer.op_type} has no weights"
        if opset < MIN_OPSET:
            return f"{self.name} needs opset {MIN_OPSET}, the model has {opset}"
        return None

    def scale_axis(self, layer: Layer) -> int | None:
        return layer.channel_axis

    def quantize(
        self, layer: Layer, weight: np.ndarray, bias: np.ndarray | None, input_scale: np.float32 | None
    ) -> QuantizedLayer:
        axis = self.scale_axis(layer)
        return QuantizedLayer(round_weight(weight, weight_scale(weight, axis), axis), bias)


SCHEME = W8()
