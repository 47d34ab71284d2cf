"""What static schemes share: activations with calibrated ranges, 8-bit symmetric weights, int32 bias."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import numpy as np

from quantsieve.model.units import Layer
from quantsieve.schemes._affine import QuantizedLayer, quantize_layer
from quantsieve.schemes._formats import STANDARD, Formats, Grid


class Scheme(Protocol):
    """A precision that a layer may be given. `version` is part of the content key: raise it when numbers change."""

    name: ClassVar[str]
    version: ClassVar[int]
    description: ClassVar[str]
    runs_as: ClassVar[frozenset[str]]  # precisions that a target may tell of a layer under it (see targets/audit.py)

    @property
    def activation(self) -> str | None:
        """Format of the tensors around a layer of this scheme; None: they stay float."""

    def under(self, formats: Formats) -> "Scheme":
        """The same scheme in other integers."""

    def refusal(self, layer: Layer, opset: int) -> str | None:
        """Why this layer cannot have the scheme; None when it can."""

    def scale_axis(self, layer: Layer) -> int | None:
        """Axis of the weight along which scales differ; None for one scale."""

    def quantize(
        self, layer: Layer, weight: np.ndarray, bias: np.ndarray | None, input_scale: np.float32 | None
    ) -> QuantizedLayer:
        """The layer's weight and bias in integers. input_scale: of what it reads; None where that stays float."""


@dataclass(frozen=True, slots=True)
class StaticInt8:
    """Static QDQ with int8 weights; a subclass says whether scales are per channel, and may have another activation."""

    name: ClassVar[str]
    description: ClassVar[str]
    version: ClassVar[int] = 1
    runs_as: ClassVar[frozenset[str]] = frozenset({"int8"})
    per_channel: ClassVar[bool]
    min_opset: ClassVar[int]

    formats: Formats = STANDARD

    @property
    def activation(self) -> str | None:
        return self.formats.activation

    @property
    def grid(self) -> Grid:
        """Of the weights."""
        return self.formats.weights

    def under(self, formats: Formats) -> Self:
        return replace(self, formats=formats)

    def refusal(self, layer: Layer, opset: int) -> str | None:
        if layer.refusal is not None:
            return layer.refusal
        if opset < self.min_opset:
            return f"{self.name} needs opset {self.min_opset}, the model has {opset}"
        if layer.is_lookup:
            return f"{layer.op_type} looks rows up: its weights alone can be quantized (w8)"
        if self.per_channel and layer.weight is None:
            return f"{layer.op_type} has no weights to scale per channel"
        return None

    def scale_axis(self, layer: Layer) -> int | None:
        return layer.channel_axis if self.per_channel else None

    def quantize(
        self, layer: Layer, weight: np.ndarray, bias: np.ndarray | None, input_scale: np.float32 | None
    ) -> QuantizedLayer:
        assert input_scale is not None
        return quantize_layer(weight, bias, self.scale_axis(layer), input_scale, self.grid)


def by_name(schemes: tuple[Scheme, ...]) -> Mapping[str, Scheme]:
    return {scheme.name: scheme for scheme in schemes}
