"""int8 weights, symmetric, per tensor: scale = max|w| / 127; activations 8 bits, calibrated. Opset 13.

Layers without weights (Add, pools, ...) have this scheme only: their integer form rounds nothing but their output.
"""

from typing import ClassVar

from quantsieve.schemes._static import StaticInt8


class Int8(StaticInt8):
    name: ClassVar[str] = "int8"
    description: ClassVar[str] = "static int8 QDQ, one scale a weight tensor"
    per_channel: ClassVar[bool] = False
    min_opset: ClassVar[int] = 10


SCHEME = Int8()
