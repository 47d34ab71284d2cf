"""int8 weights, symmetric, per output channel or row of a lookup: scale_c = max|w_c| / 127. Opset 13.

Activations and bias stay float. The file is as small as with static int8 and no activation is rounded; the layer runs
in float. Runtimes turn the weights to float once, when they load the file (`writing.py` says how).
"""

from typing import ClassVar

from quantsieve.schemes._weights import FloatBias


class W8(FloatBias):
    name: ClassVar[str] = "w8"
    activation: ClassVar[str | None] = None
    runs_as: ClassVar[frozenset[str]] = frozenset({"float"})
    description: ClassVar[str] = "int8 weights only, one scale an output channel; the layer runs in float"
    min_opset: ClassVar[int] = 13
    takes_all: ClassVar[bool] = True


SCHEME = W8()
