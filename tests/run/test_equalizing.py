"""Equalization in a run: done where simulated plans get better, declined elsewhere, told, and the same again."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from run_folders import essence, stages_begun

import small_network
from chains import Chain
from quantsieve import api
from quantsieve.errors import UsageError
from quantsieve.plan import EQUALIZED
from quantsieve.run.equalizing import Errors


def notes_of(found: api.TuneResult) -> list[str]:
    return [note for note in found.summary.notes if "equalized" in note]


def candidate(found: api.TuneResult, origin: str):
    return next(c for c in found.candidates if c.origin == origin)


@pytest.fixture(scope="module")
def plain_run(small_model, small_data, tmp_path_factory):
    run = tmp_path_factory.mktemp("plain") / "run"
    return api.tune(small_model, small_data, run, samples=8, workers=1, equalize="off")


def test_uneven_channels_are_equalized_and_plans_get_better(whole_run, plain_run):
    assert len(notes_of(whole_run)) == 1 and notes_of(plain_run) == []
    assert (whole_run.summary.settings["equalized"], plain_run.summary.settings["equalized"]) == (True, False)
    for scheme in ("int8", "int8-channel"):
        better, worse = (candidate(run, f"full {scheme}") for run in (whole_run, plain_run))
        assert better.search.mse < 0.5 * worse.search.mse
        assert (EQUALIZED in better.plan.repairs, EQUALIZED in worse.plan.repairs) == (True, False)


def test_the_same_plans_without_equalization_are_measured_beside(whole_run, plain_run):
    for scheme in ("int8", "int8-channel"):
        beside = candidate(whole_run, f"full {scheme}, not equalized")
        alone = candidate(plain_run, f"full {scheme}")
        assert whole_run.file(beside.id).read_bytes() == plain_run.file(alone.id).read_bytes()
        assert beside.predicted_mse is None  # prices are of the equalized model


def test_a_plan_without_quantized_layers_is_the_prepared_model(whole_run, plain_run):
    files = [run.file(candidate(run, "float").id) for run in (whole_run, plain_run)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_files_do_what_was_simulated(whole_run):
    found = [c for c in whole_run.candidates if EQUALIZED in c.plan.repairs]
    assert len(found) > 5
    for c in found:
        # The target's fused kernels differ from the simulation by a step here and there.
        assert c.measured_mse == pytest.approx(c.simulated_mse, rel=0.25)


def test_float_layers_of_an_equalized_plan_are_exact(small_model, small_data, tmp_path):
    """Layers kept float have the float weights up to powers of two: alone quantized, no other layer adds an error."""
    file = api.quantize(small_model, {"conv1": "int8"}, small_data, tmp_path / "e.onnx", equalize="on")
    plain = api.quantize(small_model, {"conv1": "int8"}, small_data, tmp_path / "p.onnx")
    x = small_network.images(32, seed=7)
    outputs = []
    for path in (small_model, plain, file):
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        outputs.append(ort.InferenceSession(str(path), options).run(None, {"x": x})[0])
    wanted, before, after = outputs
    assert 0 < np.square(after - wanted).mean() < 2 * np.square(before - wanted).mean()
    assert file.read_bytes() != plain.read_bytes()


def test_a_run_goes_on_with_what_was_decided(small_model, small_data, whole_run, tmp_path):
    options = {"samples": 8, "workers": 1}
    api.tune(small_model, small_data, tmp_path / "run", max_trials=1, **options)
    begun = stages_begun(tmp_path / "run")
    assert begun.count("equalize") == 1 and begun.count("equalize-errors") == 1
    api.tune(small_model, small_data, tmp_path / "run", **options)
    assert stages_begun(tmp_path / "run").count("equalize-errors") == 1
    assert essence(tmp_path / "run") == essence(whole_run.run)


@pytest.fixture(scope="module")
def balanced(tmp_path_factory):
    """A network whose channels have equal ranges already, and data for it."""
    chain = Chain()
    for _ in range(3):
        chain.conv(8, 3).op("Relu")
        weight, bias = list(chain.constants.values())[-2:]
        weight[...], bias[...] = np.sign(weight), 0
    folder = tmp_path_factory.mktemp("balanced")
    model = chain.op("GlobalAveragePool").op("Flatten").save(folder / "m.onnx")
    x = np.random.default_rng(0).normal(size=(80, 4, 6, 6)).astype(np.float32)
    np.savez(folder / "data.npz", x=x)
    return model, folder / "data.npz"


def test_a_balanced_model_is_left_alone(balanced, tmp_path):
    found = api.tune(*balanced, tmp_path / "run", samples=8, workers=1, max_trials=2)
    assert not found.summary.settings["equalized"]
    assert all(EQUALIZED not in c.plan.repairs for c in found.candidates)


def test_where_it_is_asked_for_and_not_possible_the_reason_is_told(balanced, tmp_path):
    found = api.tune(*balanced, tmp_path / "run", samples=8, workers=1, max_trials=1, equalize="on")
    assert [note for note in notes_of(found) if "nothing was equalized: rounding would cost as much" in note]


@pytest.mark.parametrize("largest, is_undone", [(0.05, False), (5.0, True)])
def test_channels_behind_a_clip_are_left_where_unseen_values_reach_the_bound(tmp_path, largest, is_undone):
    """The channels are uneven; calibration sees values far below the bound of 6, search samples up to `largest`."""
    chain = Chain().conv(8, 3)
    chain.op("Clip", chain.fixed(0), chain.fixed(6))
    for array in list(chain.constants.values())[:2]:
        array[...] *= np.geomspace(0.01, 1, 8).reshape(-1, *[1] * (array.ndim - 1))
    model = chain.conv(3).op("GlobalAveragePool").op("Flatten").save(tmp_path / "m.onnx")
    draw = np.random.default_rng(0)
    for name, most in (("calibration", 0.05), ("data", largest)):
        np.savez(tmp_path / f"{name}.npz", x=draw.uniform(-most, most, (60, 4, 6, 6)).astype(np.float32))
    found = api.tune(
        model, tmp_path / "data.npz", tmp_path / "run", calibration_data=tmp_path / "calibration.npz",
        samples=8, workers=1, max_trials=1, equalize="on",
    )  # fmt: skip
    assert found.summary.settings["equalized"] == (not is_undone)
    assert any("nothing was equalized: a float output moved by" in note for note in notes_of(found)) == is_undone


def test_errors_are_weighed_by_their_geometric_mean_over_schemes():
    assert Errors({"a": 4.0, "b": 1.0}, {"a": 1.0, "b": 1.0}).ratio == pytest.approx(0.5)
    assert Errors({"a": 0.0}, {"a": 0.0}).ratio == 1


def test_quantize_equalizes_as_asked_or_as_the_plan_says(small_model, small_data, whole_run, tmp_path: Path):
    full = candidate(whole_run, "full int8")
    plan = whole_run.run / "plans" / full.id / "plan.json"
    asked = api.quantize(small_model, "int8", small_data, tmp_path / "asked.onnx", equalize="on")
    said = api.quantize(small_model, plan, small_data, tmp_path / "said.onnx")
    left = api.quantize(small_model, plan, small_data, tmp_path / "left.onnx", equalize="off")
    never = api.quantize(small_model, "int8", small_data, tmp_path / "never.onnx")
    assert asked.read_bytes() == said.read_bytes() == whole_run.file(full.id).read_bytes()
    assert left.read_bytes() == never.read_bytes() != said.read_bytes()
    with pytest.raises(UsageError, match="on or off"):
        api.quantize(small_model, plan, small_data, tmp_path / "x.onnx", equalize="auto")
