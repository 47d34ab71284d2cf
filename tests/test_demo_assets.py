"""The embedded demo: small, valid, good in float, and a real trap for plain int8."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from quantsieve.example import data_path, model_path

MEGABYTE = 1_000_000
# The six layers that `scripts/train_demo.py` made uneven enough to carry the loss.
TRAP_BLOCKS = (1, 2, 5)


class Batches(CalibrationDataReader):
    """The first 200 samples in batches of 50, as onnxruntime's quantizer wants them."""

    def __init__(self, samples: np.ndarray):
        self._batches = iter(np.split(samples[:200], 4))

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self._batches, None)
        return None if batch is None else {"input": batch}


@pytest.fixture(scope="module")
def samples() -> np.ndarray:
    with np.load(data_path()) as data:
        return data["input"]


@pytest.fixture(scope="module")
def labels() -> np.ndarray:
    with np.load(data_path()) as data:
        return data["labels"]


def top1(path: Path, samples: np.ndarray, labels: np.ndarray) -> float:
    """Percent classified right. Optimizations off: the loss of the numbers, not of one machine's kernels."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"input": samples})
    return 100 * float(np.mean(logits.argmax(axis=1) == labels))


def int8(samples: np.ndarray, path: Path, *, per_channel: bool, keep_float: tuple[str, ...] = ()) -> Path:
    """`path`, now with the demo model as onnxruntime's quantizer writes it: QDQ, U8 activations, MinMax."""
    quantize_static(
        model_path(),
        path,
        Batches(samples),
        quant_format=QuantFormat.QDQ,
        per_channel=per_channel,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=list(keep_float),
    )
    return path


def test_model_and_data_are_small_enough_to_ship():
    assert model_path().stat().st_size + data_path().stat().st_size < 2 * MEGABYTE


def test_the_model_is_valid_and_has_a_free_batch_axis():
    model = onnx.load(model_path())
    onnx.checker.check_model(model, full_check=True)
    (source,) = model.graph.input
    (result,) = model.graph.output
    shapes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in (source, result)]
    assert [source.name, result.name] == ["input", "logits"]
    assert shapes == [["batch", 1, 16, 16], ["batch", 10]]
    assert (model.ir_version, model.opset_import[0].version) == (8, 17)


def test_every_node_has_a_name_of_its_own():
    names = [node.name for node in onnx.load(model_path()).graph.node]
    assert all(names) and len(set(names)) == len(names)
    assert "block3/expand/conv" in names


def test_the_model_names_the_source_and_licence_of_its_data():
    properties = {entry.key: entry.value for entry in onnx.load(model_path()).metadata_props}
    assert "UCI" in properties["data"] and "scikit-learn" in properties["data"]
    assert "BSD" in properties["data_licence"]
    assert properties["description"]


def test_the_data_are_whole_pixels_with_labels_of_all_ten_digits(samples, labels):
    assert samples.shape == (1500, 1, 16, 16) and samples.dtype == np.float32
    assert labels.shape == (1500,) and labels.dtype == np.int64
    assert np.array_equal(np.unique(samples), np.arange(17))
    assert np.bincount(labels, minlength=10).min() >= 100


def test_no_image_is_shipped_twice(samples):
    # Splits into calibration, search and final are disjoint only when no image comes back.
    assert len(np.unique(samples.reshape(len(samples), -1), axis=0)) == len(samples)


def test_the_float_model_is_good_but_not_perfect(samples, labels):
    assert 93 <= top1(model_path(), samples, labels) <= 98


def test_plain_int8_ruins_the_model(samples, labels, tmp_path):
    # Measured with onnxruntime 1.32: 95.3 to 48.7; the bounds leave room for another release's rounding.
    drop = top1(model_path(), samples, labels) - top1(
        int8(samples, tmp_path / "tensor.onnx", per_channel=False), samples, labels
    )
    assert drop >= 5


def test_int8_per_channel_loses_little_and_yet_something(samples, labels, tmp_path):
    drop = top1(model_path(), samples, labels) - top1(
        int8(samples, tmp_path / "channel.onnx", per_channel=True), samples, labels
    )
    assert 0.2 <= drop <= 4


def test_six_float_layers_rescue_plain_int8(samples, labels, tmp_path):
    roles = ("depthwise/conv", "depthwise/clip", "project/conv")
    kept = tuple(f"block{block}/{role}" for block in TRAP_BLOCKS for role in roles)
    rescued = int8(samples, tmp_path / "mixed.onnx", per_channel=False, keep_float=kept)
    assert top1(model_path(), samples, labels) - top1(rescued, samples, labels) <= 1
