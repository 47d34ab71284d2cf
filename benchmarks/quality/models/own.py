"""What onnxruntime's own quantizers make of a model: static per tensor and per channel, U8S8 and U8U8, and dynamic."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from quantsieve.data import Samples


@dataclass(frozen=True)
class Variant:
    """name as the table has it. activations: None for dynamic quantization."""

    name: str
    per_channel: bool
    activations: QuantType | None
    weights: QuantType


VARIANTS = (
    Variant("onnxruntime, U8S8 per tensor", False, QuantType.QUInt8, QuantType.QInt8),
    Variant("onnxruntime, U8S8 per channel", True, QuantType.QUInt8, QuantType.QInt8),
    Variant("onnxruntime, U8U8 per tensor", False, QuantType.QUInt8, QuantType.QUInt8),
    Variant("onnxruntime, U8U8 per channel", True, QuantType.QUInt8, QuantType.QUInt8),
    Variant("onnxruntime, dynamic", True, None, QuantType.QUInt8),  # signed convolutions do not load everywhere
)


class _Reader(CalibrationDataReader):
    def __init__(self, samples: Samples):
        self._feeds: Iterator[dict[str, np.ndarray]] = (samples.feed(i) for i in range(len(samples)))

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def make(path: Path, variant: Variant, calibration: Samples, folder: Path) -> Path:
    """The variant's file in the folder, after onnxruntime's own preprocessing. Raises what the quantizer raises."""
    ready = folder / "preprocessed.onnx"
    if not ready.is_file():
        quant_pre_process(str(path), str(ready), skip_symbolic_shape=True)
    made = folder / f"{variant.name.replace(' ', '-')}.onnx"
    if variant.activations is None:
        quantize_dynamic(str(ready), str(made), per_channel=variant.per_channel, weight_type=variant.weights)
    else:
        quantize_static(
            str(ready), str(made), _Reader(calibration), quant_format=QuantFormat.QDQ, per_channel=variant.per_channel,
            activation_type=variant.activations, weight_type=variant.weights,
        )  # fmt: skip
    return made
