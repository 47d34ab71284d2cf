"""int8 weights, symmetric, per output channel; activations uint8 in the range of each run. Opset 11.

What a product of matrices reads is rounded by DynamicQuantizeLinear, whose range is that of the values themselves, all
samples of a run together; what it makes stays float, as does its bias. No calibrated range is needed, and sequences of
any length fit. Only MatMul and Gemm: onnxruntime has no fast dynamic convolution.
"""

from typing import ClassVar

import numpy as np

from quantsieve.model.execute import DYNAMIC
from quantsieve.model.units import Layer
from quantsieve.schemes._affine import QuantizedLayer, round_weight, weight_scale

MIN_OPSET = 11
TAKEN = ("MatMul", "Gemm")


class Dynamic8:
    name: ClassVar[str] = "dynamic8"
    version: ClassVar[int] = 1
    activation: ClassVar[str | None] = DYNAMIC
    runs_as: ClassVar[frozenset[str]] = frozenset({"int8"})
    description: ClassVar[str] = "int8 MatMul and Gemm, activations rounded in the range of each run"

    def refusal(self, layer: Layer, opset: int) -> str | None:
        if layer.refusal is not None:
            return layer.refusal
        if layer.op_type not in TAKEN or layer.weight is None:
            return f"{self.name} takes MatMul and Gemm with constant weights, this is {layer.op_type}"
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


SCHEME = Dynamic8()
