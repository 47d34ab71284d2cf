"""What a real session makes of the quantized model, told beside the simulated scores of a scan."""

import functools

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from crashing_targets import Crashing
from drifting_targets import Clipping, clipped
from onnx import TensorProto, helper

import small_network
from quantsieve import api, cli
from quantsieve.api import _line
from quantsieve.errors import UsageError
from quantsieve.run import drift as run_drift
from quantsieve.run import trials

SAMPLES = 8
SCHEMES = ("int8", "int8-channel")


@pytest.fixture
def built(monkeypatch):
    """By layers and schemes of the quantized layers: the file of each plan that was built."""
    found, write = {}, trials.writing.write_plan

    def spy(parts, plan):
        model = write(parts, plan)
        layers = plan.quantized()
        found[layers, tuple(sorted({plan.scheme(layer) for layer in layers}))] = model.SerializeToString()
        return model

    monkeypatch.setattr(trials.writing, "write_plan", spy)
    return found


@pytest.fixture
def measured_on(monkeypatch):
    """Indices of the samples, one array for each exam that was made."""
    found, make = [], trials.Exam

    def spy(split, samples, indices, task, batch):
        found.append(indices)
        return make(split, samples, indices, task, batch)

    monkeypatch.setattr(trials, "Exam", spy)
    return found


def squared_error(reference, content, x):
    """Relative squared error of `logits`, mean over the samples, from sessions of this process."""
    sessions = (ort.InferenceSession(model, providers=["CPUExecutionProvider"]) for model in (reference, content))
    wanted, found = (session.run(["logits"], {"x": x})[0].astype(np.float64) for session in sessions)
    return np.square(found - wanted).mean() / wanted.var()


def full(built, scheme):
    """The file that quantizes the most layers, of those with this scheme."""
    return built[max((key for key in built if scheme in key[1]), key=lambda key: len(key[0]))]


def test_the_drift_of_a_scheme_is_what_sessions_of_its_file_give(small_model, small_data, built, measured_on):
    found = api.scan(small_model, small_data, samples=SAMPLES)
    (indices,) = measured_on
    x = np.load(small_data)["x"][indices]
    assert len(x) == SAMPLES and [drift.scheme for drift in found.drift] == list(SCHEMES)
    for drift in found.drift:
        error = squared_error(str(small_model), full(built, drift.scheme), x)
        assert drift.measured == pytest.approx(error, rel=1e-3)  # sums in another order flip a rounding now and then
        assert 0.9 < drift.ratio < 1.1 and (drift.reason, drift.num_samples) == (None, SAMPLES)
    assert all(score.drift is None for score in found.layers)
    assert not any("real session" in note for note in found.notes)


def test_where_sessions_compute_something_else_the_worst_rows_are_measured_alone(
    small_model, small_data, monkeypatch, built, measured_on
):
    monkeypatch.setattr(_line, "OrtCpu", Clipping)
    found = api.scan(small_model, small_data, samples=SAMPLES, schemes=["int8"])
    (drift,), x = found.drift, np.load(small_data)["x"][measured_on[0]]

    def clipped_error(content):
        return squared_error(str(small_model), clipped(onnx.load_from_string(content)).SerializeToString(), x)

    assert drift.measured == pytest.approx(clipped_error(full(built, "int8")), rel=1e-3)
    assert drift.ratio > 2
    assert 0 < len(found.layers) <= run_drift.WORST
    assert found.layers == api.scan(small_model, small_data, samples=SAMPLES, schemes=["int8"]).layers  # again the same
    for score in found.layers:
        content = built[(score.layer,), ("int8",)]
        true = squared_error(str(small_model), content, x)  # within a hundredth of the simulated one
        assert score.drift == pytest.approx(clipped_error(content) / true, rel=0.02), score.layer
    assert max(score.drift for score in found.layers) > 2
    (note,) = [note for note in found.notes if "real session" in note]
    assert note.startswith("under int8 ") and f"{drift.ratio:.3g}"[:3] in note
    assert "signed weights saturate" in note and "u8" not in note  # as the probe finds of both in such sessions
    assert f"the {len(found.layers)} worst rows" in note


def test_the_scores_and_their_order_are_the_same_with_and_without_sessions(small_model, small_data, monkeypatch):
    plain = api.scan(small_model, small_data, samples=SAMPLES, drift="off")
    assert plain.drift == ()
    monkeypatch.setattr(_line, "OrtCpu", Clipping)
    found = api.scan(small_model, small_data, samples=SAMPLES)
    assert any(score.drift is not None for score in found.layers)
    assert [(s.layer, s.scheme, s.value) for s in found.layers] == [(s.layer, s.scheme, s.value) for s in plain.layers]


def test_a_number_measures_so_many_of_the_worst_rows_of_each_scheme(small_model, small_data):
    found = api.scan(small_model, small_data, samples=SAMPLES, drift=2)
    for scheme in SCHEMES:
        drifts = [score.drift for score in found.layers if score.scheme == scheme]
        assert all(0.9 < drift < 1.1 for drift in drifts[:2]) and set(drifts[2:]) <= {None}


def test_a_raced_scan_is_measured_on_as_many_samples_as_it_took(small_model, small_data, built, measured_on):
    found = api.scan(small_model, small_data, schemes=["int8"], metric=lambda y, z: np.ones(len(y)))
    (drift,), (indices,) = found.drift, measured_on
    assert drift.num_samples == found.num_samples == len(indices) == 8  # all layers are alike: the first look
    error = squared_error(str(small_model), full(built, "int8"), np.load(small_data)["x"][indices])
    assert [drift.simulated, drift.measured] == pytest.approx([error, error], rel=0.02)


def test_large_outputs_are_compared_on_fewer_samples(small_model, small_data, monkeypatch):
    monkeypatch.setattr(run_drift, "COPIES", (64 << 20) // 2 // (3 * 4 * 4))  # room for 3 samples of 4 floats
    found = api.scan(small_model, small_data, samples=SAMPLES, memory_limit=64 << 20)
    assert {drift.num_samples for drift in found.drift} == {3} and found.num_samples == SAMPLES


def test_of_rescues_the_quantized_model_is_run_and_no_row(small_model, small_data, monkeypatch):
    monkeypatch.setattr(_line, "OrtCpu", Clipping)
    found = api.scan(small_model, small_data, mode="rescue", samples=SAMPLES, schemes=["int8"])
    assert found.drift[0].ratio > 2 and all(score.drift is None for score in found.layers)
    assert any("real session" in note and "worst rows" not in note for note in found.notes)


def test_a_file_that_kills_its_session_is_told_with_the_scores(small_model, small_data, monkeypatch):
    monkeypatch.setattr(_line, "OrtCpu", functools.partial(Crashing, 1, "run"))
    found = api.scan(small_model, small_data, samples=SAMPLES, drift=1, schemes=["int8"])
    (drift,) = found.drift
    assert (drift.measured, drift.ratio, drift.reason) == (None, None, "signal at run: SIGSEGV")
    assert drift.simulated > 0 and len(found.layers) > 1


def test_a_float_model_that_kills_its_session_leaves_the_scores(small_model, small_data, monkeypatch):
    monkeypatch.setattr(_line, "OrtCpu", functools.partial(Crashing, -1, "run"))
    found = api.scan(small_model, small_data, samples=SAMPLES)
    assert len(found.layers) > 1 and len(found.drift) == 2
    assert all(drift.simulated is None and "SIGSEGV" in drift.reason for drift in found.drift)


def test_samples_without_labels_and_outputs_of_other_types_are_taken(small_model, small_data, tmp_path):
    model = onnx.load(small_model)
    model.graph.node.append(helper.make_node("ArgMax", ["logits"], ["class"], "argmax", axis=1))
    model.graph.output.insert(0, helper.make_tensor_value_info("class", TensorProto.INT64, ["batch", 1]))
    onnx.save(model, tmp_path / "m.onnx")
    arrays = {"x": np.load(small_data)["x"]}
    (drift,) = api.scan(tmp_path / "m.onnx", arrays, samples=SAMPLES, schemes=["int8"]).drift
    (plain,) = api.scan(small_model, arrays, samples=SAMPLES, schemes=["int8"]).drift
    assert 0.9 < drift.ratio < 1.1
    assert drift.measured == pytest.approx(plain.measured, rel=1e-3)


def test_constant_outputs_have_no_ratio_and_no_note(tmp_path):
    """What is simulated and what is measured are float rounding alone, whatever their ratio."""
    constants = {"w": np.eye(192, small_network.CLASSES, dtype=np.float32)}
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "w"], ["logits"], "dense"),
    ]
    model = small_network.save_model(tmp_path / "m.onnx", nodes, constants)
    x = np.random.default_rng(0).integers(0, 2, (40, *small_network.IMAGE)).astype(np.float32)  # both ends of a range
    found = api.scan(model, {"x": x}, samples=SAMPLES, schemes=["int8"])
    assert 0 <= found.drift[0].measured < 1e-10
    assert not any("real session" in note for note in found.notes)


def test_weights_that_are_large_beside_the_limit_are_run_only_where_a_number_asks_for_it(tmp_path):
    draw, limit = np.random.default_rng(0), 64 << 20
    width = limit // 4 // (4 * 192) + 100  # a quarter of the limit is what weights may take to be held at once
    constants = {
        "w": draw.normal(size=(192, width)).astype(np.float32),
        "v": draw.normal(size=(width, small_network.CLASSES)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "w"], ["h"], "wide"),
        helper.make_node("MatMul", ["h", "v"], ["logits"], "dense"),
    ]
    model, data = small_network.save_model(tmp_path / "m.onnx", nodes, constants), {"x": small_network.images(16)}
    options = {"samples": 4, "schemes": ["int8"], "memory_limit": limit}
    (refused,) = api.scan(model, data, **options).drift
    assert refused.measured is None and "--memory-limit" in refused.reason
    asked = api.scan(model, data, drift=1, **options)
    assert 0.9 < asked.drift[0].ratio < 1.1 and asked.layers[0].drift is not None


@pytest.mark.parametrize("wanted", ["on", 0, -1, True, 1.5, None])
def test_another_drift_is_wrong_usage(small_model, small_data, wanted):
    with pytest.raises(UsageError, match="auto, off or a number of rows of at least 1"):
        api.scan(small_model, small_data, drift=wanted)


def test_rows_of_rescues_are_wrong_usage(small_model, small_data):
    with pytest.raises(UsageError, match="auto or off with the mode rescue"):
        api.scan(small_model, small_data, mode="rescue", drift=3)


def test_the_table_has_a_column_of_drift_and_a_line_for_each_scheme(small_model, small_data, monkeypatch, capsys):
    monkeypatch.setattr(_line, "OrtCpu", Clipping)
    assert cli.main(["scan", str(small_model), "--data", str(small_data), "--samples", "4", "--quiet"]) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0].endswith("drift") and "Drift: of the layer alone" in table
    told = table.split("in a real session:\n")[1].splitlines()
    assert [line.split(":")[0] for line in told if line.startswith(SCHEMES)] == list(SCHEMES)


def test_one_reason_for_all_schemes_is_told_once(small_model, small_data, monkeypatch, capsys):
    monkeypatch.setattr(_line, "OrtCpu", functools.partial(Crashing, -1, "run"))
    assert cli.main(["scan", str(small_model), "--data", str(small_data), "--samples", "4", "--quiet"]) == 0
    assert "int8, int8-channel: none ran, " in capsys.readouterr().out
