"""What schemes share that round weights and leave the bias float."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from quantsieve.model.units import Layer
from quantsieve.schemes._affine import QuantizedLayer, round_weight, weight_scale
from quantsieve.schemes._formats import SYMMETRIC_8, Formats, Grid

PRODUCTS = ("MatMul", "Gemm")


@dataclass(frozen=True, slots=True)
class FloatBias:
    """int8 weights with one scale an output channel. A subclass says what it takes; Scheme has the rest.

    grid: of the weights; of a width of its own only where they are multiplied as integers.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    min_opset: ClassVar[int] = 1
    takes_all: ClassVar[bool] = False  # layers with weights, not PRODUCTS alone

    grid: Grid = SYMMETRIC_8

    def under(self, formats: Formats) -> Self:
        return self  # nothing multiplies its integers

    def refusal(self, layer: Layer, opset: int) -> str | None:
        if layer.refusal is not None:
            return layer.refusal
        if layer.weight is None and self.takes_all:
            return f"{layer.op_type} has no weights"
        if not self.takes_all and (layer.op_type not in PRODUCTS or layer.weight is None):
            return f"{self.name} takes MatMul and Gemm with constant weights, this is {layer.op_type}"
        if opset < self.min_opset:
            return f"{self.name} needs opset {self.min_opset}, the model has {opset}"
        return None

    def scale_axis(self, layer: Layer) -> int | None:
        return layer.channel_axis

    def quantize(
        self, layer: Layer, weight: np.ndarray, bias: np.ndarray | None, input_scale: np.float32 | None
    ) -> QuantizedLayer:
        axis = self.scale_axis(layer)
        scale = weight_scale(weight, axis, self.grid)
        return QuantizedLayer(round_weight(weight, scale, axis, self.grid), bias)
