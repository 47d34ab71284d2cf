"""Small images and models built in code."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from PIL import Image

from quantsieve.data import InputSpec


@pytest.fixture
def image_spec() -> InputSpec:
    return InputSpec("image", "float32", ("batch", 3, 8, 6))


@pytest.fixture
def save_image() -> Callable[..., None]:
    """save_image(path, seed, height, width): random pixels, parent folders made."""

    def save(path: Path, seed: int = 0, height: int = 8, width: int = 6) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)

    return save


@pytest.fixture
def doubling_session() -> onnxruntime.InferenceSession:
    """y = x + x for float32 x of [batch, 3]."""
    shape = ["batch", 3]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "doubling",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
