"""The same command again: nothing is computed twice, everything comes out the same."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from run_folders import essence, file_digests, stages_begun

import small_network
from quantsieve import api
from quantsieve.api._line import open_sources
from quantsieve.errors import RunFolderError
from quantsieve.example import data_path, model_path


@pytest.fixture
def copied(whole_run, tmp_path):
    """A run folder that a test may harm."""
    shutil.copytree(whole_run.run, tmp_path / "run")
    return tmp_path / "run"


def again(model: Path, data: Path, run: Path, **options: object) -> api.TuneResult:
    return api.tune(model, data, run, **{"samples": 8, "workers": 1, **options})


def test_a_second_tune_computes_nothing_and_finds_the_same(small_model, small_data, whole_run, copied):
    before, begun = essence(copied), stages_begun(copied)
    found = again(small_model, small_data, copied)
    assert stages_begun(copied) == begun
    assert essence(copied) == before
    assert found.front == whole_run.front and found.recommendation == whole_run.recommendation


def test_another_budget_goes_on_in_the_same_folder_and_computes_nothing(small_model, small_data, copied):
    begun = stages_begun(copied)
    found = again(small_model, small_data, copied, max_drop=0.9)
    assert stages_begun(copied) == begun
    assert found.recommended is not None and found.recommended.plan.quantized()


def test_a_run_folder_may_be_given_relative_to_the_current_folder(small_model, small_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = again(small_model, small_data, Path("here/run"), max_trials=1)
    assert found.run == Path("here/run")
    assert (tmp_path / "here/run/report/report.json").is_file()
    assert found.file(found.candidates[0].id).is_file()


def test_the_number_of_workers_changes_no_plan_and_no_byte(small_model, small_data, whole_run, tmp_path):
    again(small_model, small_data, tmp_path / "run", workers=2)
    assert essence(tmp_path / "run") == essence(whole_run.run)


@pytest.mark.slow
def test_the_number_of_workers_changes_no_plan_of_a_model_with_many(tmp_path):
    """The small network has so few layers that most of its plans are tried whatever the prices."""
    for workers in (1, 2):
        api.tune(
            model_path(), data_path(), tmp_path / f"run{workers}",
            max_samples=200, samples=8, max_trials=12, workers=workers,
        )  # fmt: skip
    assert essence(tmp_path / "run2") == essence(tmp_path / "run1")


def test_another_folder_for_other_settings(small_model, small_data, copied):
    before = essence(copied)
    with pytest.raises(RunFolderError, match=r"settings\.seed: 0 -> 1"):
        again(small_model, small_data, copied, seed=1)
    assert essence(copied) == before


def test_another_folder_for_another_calibration_method(small_model, small_data, copied, tmp_path):
    with pytest.raises(RunFolderError, match=r'settings\.calibration_method: absent -> "mse"'):
        again(small_model, small_data, copied, calibration_method="mse")
    other = tmp_path / "other"
    options = {"calibration_method": "percentile", "percentile": 99, "max_trials": 1}
    found = again(small_model, small_data, other, **options)
    with pytest.raises(RunFolderError, match=r"settings\.percentile: 99.0 -> 98.0"):
        again(small_model, small_data, other, **{**options, "percentile": 98})
    begun = stages_begun(other)
    assert again(small_model, small_data, other, **options).front == found.front
    assert stages_begun(other) == begun
    assert found.summary.settings["calibration_method"] == "percentile 99"
    assert "24, percentile 99)" in (other / "report" / "report.txt").read_text()


def test_another_folder_for_other_data(small_model, copied):
    other = small_network.arrays(small_model, seed=9)
    with pytest.raises(RunFolderError, match="data: "):
        again(small_model, other, copied)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "stage", ["prepare", "calibrate", "sensitivity", "build", "reference", "evaluate", "audit", "latency"]
)
def test_a_fact_that_was_cut_off_is_computed_again(small_model, small_data, copied, stage):
    before, begun = essence(copied), stages_begun(copied)
    harmed = sorted((copied / "facts" / stage).glob("*.json"))[0]
    content = harmed.read_bytes()
    harmed.write_bytes(content[: len(content) // 2])
    again(small_model, small_data, copied)
    assert essence(copied) == before
    if stage == "build":  # a plan's file is no stage of its own in the events
        assert harmed.read_bytes() == content
    elif stage != "reference":  # which is asked for only where something is measured
        assert stages_begun(copied)[len(begun) :] == [stage]


@pytest.mark.parametrize("pattern", ["facts/*/*.npz", "facts/prepare/*.onnx", "plans/*/model.onnx"])
def test_arrays_and_models_that_were_cut_off_are_made_again(small_model, small_data, copied, pattern):
    before = essence(copied)
    harmed = sorted(copied.glob(pattern))
    assert harmed
    for path in harmed:
        path.write_bytes(path.read_bytes()[:100])
    again(small_model, small_data, copied)
    assert essence(copied) == before


def test_a_plan_file_that_was_altered_is_written_again(small_model, small_data, copied):
    before = file_digests(copied)
    path = sorted((copied / "plans").glob("*/model.onnx"))[0]
    path.write_bytes(path.read_bytes() + b"\0")
    again(small_model, small_data, copied)
    assert file_digests(copied) == before


def test_a_model_whose_bytes_changed_is_refused_in_the_old_folder(small_model, small_data, tmp_path, copied):
    other = small_network.network(tmp_path / "small.onnx", seed=5)
    with pytest.raises(RunFolderError, match="model: "):
        again(other, small_data, copied)


def test_the_input_file_is_never_changed(small_model, whole_run, tmp_path):
    assert small_model.read_bytes() == small_network.network(tmp_path / "fresh.onnx").read_bytes()


def test_samples_keep_to_their_parts(small_model, small_data, tmp_path):
    """Calibration sees no search or final sample, the search no final one; the seed fixes who is who."""
    splits = {}
    for seed in (0, 1):
        line = _split_of(small_model, small_data, tmp_path / f"run{seed}", seed)
        splits[seed] = line
        parts = [set(part.tolist()) for part in (line.calibration, line.search, line.final)]
        assert sum(map(len, parts)) == 120 == len(set.union(*parts))
    same = _split_of(small_model, small_data, tmp_path / "run2", 0)
    for name in ("calibration", "search", "final"):
        np.testing.assert_array_equal(getattr(same, name), getattr(splits[0], name))
        assert set(getattr(same, name)) != set(getattr(splits[1], name))


def test_calibration_data_of_its_own_leaves_all_samples_to_search_and_final(small_model, small_data, tmp_path):
    own = {"x": small_network.images(20, seed=3)}
    found = again(small_model, small_data, tmp_path / "run", calibration_data=own, max_trials=1)
    splits = found.summary.splits
    assert (splits.calibration, splits.search + splits.final) == (20, 120)
    without = again(small_model, small_data, tmp_path / "other", max_trials=1)
    assert file_digests(tmp_path / "run") != file_digests(tmp_path / "other")
    assert without.summary.splits.search + without.summary.splits.final < 120


def _split_of(model: Path, data: Path, run: Path, seed: int) -> object:
    from quantsieve.run.line import Line
    from quantsieve.run.progress import Silent
    from quantsieve.run.spec import Settings
    from quantsieve.run.store import Store
    from quantsieve.targets.ort import OrtCpu

    sources = open_sources(model, data, None, None, None, False, None, seed)
    with Store.open(run, {}) as store:
        return Line(store, model, sources, Settings(seed=seed), OrtCpu(), 1, Silent()).split
