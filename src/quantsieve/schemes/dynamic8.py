"""int8 weights, symmetric, per output channel; activations uint8 in the range of each run. Opset 11.

What a product of matrices reads is rounded by DynamicQuantizeLinear, whose range is that of the values themselves, all
samples of a run together; what it makes stays float, as does its bias. No calibrated range is needed, and sequences of
any length fit. Only MatMul and Gemm: onnxruntime has no fast dynamic convolution.
"""

from dataclasses import replace
from typing import ClassVar, Self

from quantsieve.model.execute import DYNAMIC
from quantsieve.schemes._formats import Formats
from quantsieve.schemes._weights import FloatBias


class Dynamic8(FloatBias):
    name: ClassVar[str] = "dynamic8"
    activation: ClassVar[str | None] = DYNAMIC
    runs_as: ClassVar[frozenset[str]] = frozenset({"int8"})
    description: ClassVar[str] = "int8 MatMul and Gemm, activations rounded in the range of each run"
    min_opset: ClassVar[int] = 11

    def under(self, formats: Formats) -> Self:
        return replace(self, grid=formats.products)


SCHEME = Dynamic8()
