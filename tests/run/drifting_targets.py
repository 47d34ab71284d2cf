"""A runtime whose sessions compute something else than the file says. Workers import this module by its name."""

import tempfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
from onnx import numpy_helper

from quantsieve.targets.base import Predict
from quantsieve.targets.ort import OrtCpu

MOST = 40  # of an integer weight's magnitude that these sessions know


class Clipping(OrtCpu):
    """onnxruntime on a copy of the file whose integer weights are clipped to -MOST..MOST about their middle."""

    name: ClassVar[str] = "clipping"

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "target": self.name}

    def load(self, path: Path) -> Predict:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "clipped.onnx"
            onnx.save(clipped(onnx.load(path)), copy)
            return super().load(copy)


def clipped(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the weights that such a session sees."""
    for tensor in model.graph.initializer:
        if tensor.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8) and len(tensor.dims) > 1:
            values = numpy_helper.to_array(tensor)
            middle = 0 if values.dtype == np.int8 else 128
            near = np.clip(values.astype(np.int16) - middle, -MOST, MOST) + middle
            tensor.CopyFrom(numpy_helper.from_array(near.astype(values.dtype), tensor.name))
    return model
