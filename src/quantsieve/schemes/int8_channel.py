"""int8 weights, symmetric, per output channel: scale_c = max|w_c| / 127; activations 8 bits, calibrated. Opset 13."""

from typing import ClassVar

from quantsieve.schemes._static import StaticInt8


class Int8Channel(StaticInt8):
    name: ClassVar[str] = "int8-channel"
    description: ClassVar[str] = "static int8 QDQ, one scale an output channel of the weight"
    per_channel: ClassVar[bool] = True
    min_opset: ClassVar[int] = 13


SCHEME = Int8Channel()
