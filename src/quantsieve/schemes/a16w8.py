"""int8 weights, symmetric, per output channel where there are some; activations uint16, asymmetric. Opset 13.

onnxruntime has no 16-bit integer kernels: such a layer runs in float there, on rounded values. It is for NPUs that have
them, and for layers whose activations 8 bits do not hold.
"""

from typing import ClassVar

from quantsieve.model.units import Layer
from quantsieve.schemes._formats import SYMMETRIC_8, Grid
from quantsieve.schemes._static import StaticInt8


class A16W8(StaticInt8):
    name: ClassVar[str] = "a16w8"
    description: ClassVar[str] = "static QDQ, 16-bit activations, int8 weights, one scale an output channel"
    runs_as: ClassVar[frozenset[str]] = frozenset({"float"})
    per_channel: ClassVar[bool] = True
    min_opset: ClassVar[int] = 13

    @property
    def activation(self) -> str | None:
        return "uint16"

    @property
    def grid(self) -> Grid:
        return SYMMETRIC_8

    def refusal(self, layer: Layer, opset: int) -> str | None:
        if layer.weight is None:
            return layer.refusal  # nothing of it has scales per channel: only its tensors are rounded
        return StaticInt8.refusal(self, layer, opset)


SCHEME = A16W8()
