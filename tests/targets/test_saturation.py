"""The saturation probe reaches integer kernels, and tells a machine that saturates from an exact one."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from quantsieve.targets.base import Feeds, Predict, Saturation
from quantsieve.targets.ort import OrtCpu
from quantsieve.targets.saturation import EXACT, PROBED_OPS, probe, probe_input, saturation_model

WEIGHTS = (np.int8, np.uint8)


@pytest.mark.parametrize("weight_type", WEIGHTS)
@pytest.mark.parametrize("op", PROBED_OPS)
def test_the_probe_runs_in_an_integer_kernel(tmp_path: Path, op: str, weight_type: type) -> None:
    path = tmp_path / "probe.onnx"
    onnx.save(saturation_model(op, weight_type), path)  # type: ignore[arg-type]
    assert OrtCpu().audit(path).ran == (("probe", "int8"),)


@pytest.mark.parametrize("weight_type", WEIGHTS)
@pytest.mark.parametrize("op", PROBED_OPS)
def test_the_probe_is_a_valid_model_whose_exact_output_is_known(tmp_path: Path, op: str, weight_type: type) -> None:
    model = saturation_model(op, weight_type)  # type: ignore[arg-type]
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "probe.onnx")
    outputs = OrtCpu(optimization="off").load(tmp_path / "probe.onnx")({"x": probe_input(op)})
    np.testing.assert_array_equal(outputs["y"], np.float32(EXACT))


def saturating(path: Path) -> Predict:
    """A processor without VNNI: pairs of products are added in 16 saturating bits. MatMul and Gemm only."""
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    weights = tensors["w_q"].astype(np.int64).reshape(1024, -1, order="F" if tensors["w_q"].ndim == 4 else "C")

    def run(feeds: Feeds) -> dict[str, np.ndarray]:
        activations = feeds["x"].reshape(-1, 1024).astype(np.int64)
        products = activations[:, :, None] * weights[None]
        if tensors["w_q"].dtype == np.int8:
            pairs = np.clip(products[:, ::2] + products[:, 1::2], -(2**15), 2**15 - 1)
            sums = pairs.sum(axis=1)
        else:
            sums = products.sum(axis=1) - 128 * activations.sum(axis=1, keepdims=True)
        step = tensors["y_scale"]
        return {"y": (np.rint(sums / step) * step).astype(np.float32)}

    return run


def test_a_processor_that_saturates_in_16_bits_is_found_out() -> None:
    found = probe(saturating)
    # 32767 / (2 * 255 * 127) = 0.506, read in 255 steps.
    assert found.s8 == pytest.approx(32767 / 64770, abs=0.5 / 255)
    assert found.u8 == 1
    assert found.saturates and not found.u8_saturates


def test_an_exact_runtime_does_not_saturate() -> None:
    found = probe(OrtCpu(optimization="off").load)
    assert found == Saturation(1.0, 1.0)
    assert not found.saturates and not found.u8_saturates


def test_this_machine_gives_one_of_the_two_known_answers() -> None:
    found = OrtCpu().probe_saturation()
    assert found.u8 == pytest.approx(1, abs=1e-6)
    assert found.s8 == pytest.approx(1, abs=1e-6) or found.s8 == pytest.approx(0.504, abs=0.01)


def test_the_precise_option_of_onnxruntime_never_saturates() -> None:
    exact = OrtCpu(session_options=(("session.x64quantprecision", "1"),))
    assert exact.probe_saturation().s8 == pytest.approx(1, abs=1e-6)
