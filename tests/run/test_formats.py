"""Number formats through the doors: what was asked for is in the files, the run folder's settings and its keys."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from crashing_targets import Crashing

from quantsieve import api
from quantsieve.api import _line
from quantsieve.errors import UnsupportedModel, UsageError
from quantsieve.run.spec import Settings
from quantsieve.schemes._formats import Formats
from quantsieve.targets.audit import audit_graph
from quantsieve.targets.ort import OrtCpu

ASKED = {
    "s8": {"activation_type": "s8"},
    "symmetric": {"symmetric_activations": True},
    "s7": {"weight_type": "s7"},
    "asymmetric": {"asymmetric_weights": True},
    "operators": {"file_format": "qoperator", "activation_type": "s8"},
}
every_asked = pytest.mark.parametrize("asked", ASKED)
OPERATORS = {"QLinearConv", "QLinearGlobalAveragePool", "QGemm", "Flatten", "QuantizeLinear"}


def quantized(model: Path, data: Path, folder: Path, **asked: object) -> onnx.ModelProto:
    return onnx.load(api.quantize(model, "int8", data, folder / "q.onnx", **asked))  # type: ignore[arg-type]


def zeros(model: onnx.ModelProto, op_type: str) -> set[tuple[str, int]]:
    """(type, value) of the zero points of the operators."""
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = [node for node in model.graph.node if node.op_type == op_type and len(node.input) > 2]
    return {(constants[n.input[2]].dtype.name, int(v)) for n in found for v in constants[n.input[2]].reshape(-1)}


def weights(model: onnx.ModelProto) -> list[np.ndarray]:
    arrays = [onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
    return [array for array in arrays if array.ndim > 1]


def test_what_was_asked_for_is_in_the_file(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    made = {name: quantized(small_model, small_data, tmp_path, **asked) for name, asked in ASKED.items()}
    assert {kind for kind, _ in zeros(made["s8"], "QuantizeLinear")} == {"int8"}
    assert zeros(made["symmetric"], "QuantizeLinear") == {("uint8", 128)}
    assert max(np.abs(array.astype(int)).max() for array in weights(made["s7"])) == 64
    assert len(zeros(made["asymmetric"], "DequantizeLinear") - zeros(made["asymmetric"], "QuantizeLinear")) > 1
    assert {node.op_type for node in made["operators"].graph.node} == OPERATORS


@every_asked
def test_a_run_measures_files_that_do_what_is_simulated(
    small_model: Path, small_data: Path, tmp_path: Path, asked: str
) -> None:
    run = tmp_path / "run"
    found = api.tune(small_model, small_data, run, samples=8, workers=1, max_trials=4, **ASKED[asked])  # type: ignore[arg-type]
    full = next(c for c in found.candidates if c.origin == "full int8")
    assert full.measured_mse == pytest.approx(full.simulated_mse, rel=0.1)
    # A Relu behind a pair with a zero point in the middle runs in float.
    assert set(full.ran.values()) == ({"int8", "mixed"} if asked == "symmetric" else {"int8"})
    again = api.tune(small_model, small_data, run, samples=8, workers=1, max_trials=4, **ASKED[asked])  # type: ignore[arg-type]
    assert [c.id for c in again.candidates] == [c.id for c in found.candidates]


def test_a_file_that_the_runtime_does_not_run_is_no_result(
    small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_line, "OrtCpu", lambda threads: Crashing(1, "run", threads))
    with pytest.raises(UnsupportedModel, match="loads and runs, found signal at run: SIGSEGV"):
        quantized(small_model, small_data, tmp_path)
    assert not (tmp_path / "q.onnx").exists()


def test_layers_kept_by_hand_are_found_in_operators_too(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    """`readback` holds the file against what was asked and would raise."""
    model = quantized(small_model, small_data, tmp_path, file_format="qoperator", nodes_to_exclude=("conv2",))
    kinds = {node.name: node.op_type for node in model.graph.node}
    assert (kinds["conv1"], kinds["conv2"]) == ("QLinearConv", "Conv")
    path = tmp_path / "q.onnx"
    ran = dict(audit_graph(model.graph, model.graph).ran)
    assert (ran["conv1"], ran["conv2"]) == ("int8", "float")
    assert dict(OrtCpu().audit(path).ran)["conv2"] == "float"


@every_asked
def test_settings_hold_formats_where_they_are_not_standard(asked: str) -> None:
    standard = Settings().document()
    assert standard["weight_type"] == "auto"
    assert not standard.keys() & {"formats", "activation_type", "file_format"}
    assert Settings(formats=Formats(**ASKED[asked])).document() == {**standard, **ASKED[asked]}  # type: ignore[arg-type]


def test_a_run_folder_belongs_to_its_formats(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    api.tune(small_model, small_data, tmp_path / "run", samples=8, workers=1, max_trials=1)
    with pytest.raises(Exception, match="activation_type"):
        api.tune(small_model, small_data, tmp_path / "run", samples=8, workers=1, max_trials=1, activation_type="s8")


def test_unsigned_weights_of_signed_activations_are_refused_in_operators() -> None:
    with pytest.raises(UsageError, match="auto, s8, s7 with s8 activations and qoperator"):
        Formats("u8", "s8", file_format="qoperator")
    assert Formats("u8", "s8").takes_unsigned
