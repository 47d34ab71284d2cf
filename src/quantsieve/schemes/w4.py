"""int4 weights in blocks of 32 along what is summed, symmetric: scale = max|w| / 7 of a block. onnxruntime only.

MatMul and Gemm are written as MatMulNBits of onnxruntime's own domain, at the accuracy level that is fast (4): its
kernels round what they read to 8 bits in blocks, and so does the simulation. What they make stays float, as does the
bias.
"""

from typing import ClassVar

import numpy as np

from quantsieve.model.execute import BLOCKS
from quantsieve.model.units import Layer
from quantsieve.schemes._affine import QuantizedLayer, round_blocks
from quantsieve.schemes._weights import FloatBias

BLOCK = 32  # values with one scale; a power of two from 16 on


class W4(FloatBias):
    name: ClassVar[str] = "w4"
    activation: ClassVar[str | None] = BLOCKS
    runs_as: ClassVar[frozenset[str]] = frozenset({"weight-only"})
    description: ClassVar[str] = "int4 weights, one scale a block of 32, activations int8 in blocks; MatMul and Gemm"

    def quantize(
        self, layer: Layer, weight: np.ndarray, bias: np.ndarray | None, input_scale: np.float32 | None
    ) -> QuantizedLayer:
        summed = 1 - (layer.channel_axis or 0)
        return QuantizedLayer(round_blocks(weight, summed, BLOCK, bits=4), bias)


SCHEME = W4()
