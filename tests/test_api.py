"""The Python door on real models: what each function gives back, and each kind of data that it takes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnxruntime.quantization import CalibrationDataReader
from PIL import Image

import small_network
from quantsieve import api
from quantsieve.data import Preprocess
from quantsieve.errors import InputError, QuantsieveError, UsageError
from quantsieve.evaluation import Failed, Measured
from quantsieve.example import data_path, model_path
from quantsieve.front import dominates, final_loss
from quantsieve.plan import BIAS

QUICK = {"samples": 8, "max_trials": 1}


# --- tune: what the front and the recommendation promise -------------------------------------------------------


def test_the_front_holds_only_measured_models_that_no_other_of_it_dominates(whole_run):
    members = [whole_run.summary.candidate(id) for id in whole_run.front]
    assert len(members) >= 2
    assert all(isinstance(c.final, Measured) for c in members)
    assert not any(dominates(a, b) for a in members for b in members)
    outside = [c for c in whole_run.candidates if isinstance(c.final, Measured) and c.id not in whole_run.front]
    assert all(any(dominates(member, c) for member in members) for c in outside)


@pytest.mark.parametrize("max_drop", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("confident", [False, True])
def test_the_recommended_model_meets_the_budget_on_final_samples(
    small_model, small_data, tmp_path, max_drop, confident
):
    options = {"max_drop": max_drop, "confident": confident, "samples": 8, "max_trials": 3}
    found = api.tune(small_model, small_data, tmp_path / "run", **options)
    assert found.recommended is not None
    loss = final_loss(found.recommended)
    assert (loss.high if confident else loss.value) <= max_drop
    cheaper = [c for c in found.candidates if c.size_bytes < 0.99 * found.recommended.size_bytes]
    losses = [final_loss(c) for c in cheaper if isinstance(c.final, Measured)]
    assert all((loss.high if confident else loss.value) > max_drop for loss in losses)


def test_the_report_says_when_no_quantized_model_meets_the_budget(small_model, small_data, tmp_path):
    found = api.tune(small_model, small_data, tmp_path / "run", max_drop=0, confident=True, **QUICK)
    assert found.recommended is not None and not found.recommended.plan.quantized()
    assert found.recommendation.reason.startswith("No quantized model has a loss of at most 0")
    assert "No quantized model" in (tmp_path / "run/report/report.json").read_text()


def test_baselines_are_measured_beside_the_programme(whole_run):
    origins = {c.origin.split(" ")[0] for c in whole_run.candidates}
    assert {"float", "full", "programme"} <= origins and origins & {"first", "last", "ranking"}


def test_final_samples_are_for_survivors_only(whole_run):
    finals = [c for c in whole_run.candidates if c.final is not None]
    assert 0 < len(finals) < len(whole_run.candidates)
    assert all(c.search is not None for c in whole_run.candidates)


def test_the_demo_model_tunes_with_few_samples_and_trials(tmp_path):
    found = api.tune(model_path(), data_path(), tmp_path / "run", max_samples=200, samples=8, max_trials=2, workers=1)
    splits = found.summary.splits
    assert splits.calibration + splits.search + splits.final == 200
    assert found.summary.metric == "top1" and len(found.candidates) == 3


# --- kinds of data --------------------------------------------------------------------------------------------


class Reader(CalibrationDataReader):
    def __init__(self, images: np.ndarray):
        self.feeds = iter([{"x": image[None]} for image in images])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


@pytest.mark.parametrize("kind", ["npz", "npy", "dict", "array", "reader", "feeds", "generator"])
def test_the_same_samples_give_the_same_files_in_whatever_form_they_come(small_model, tmp_path, kind):
    x = small_network.images(60)
    np.save(tmp_path / "x.npy", x)
    sources = {
        "npz": small_network.save_arrays(tmp_path / "d.npz", {"x": x}),
        "npy": tmp_path / "x.npy",
        "dict": {"x": x},
        "array": x,
        "reader": Reader(x),
        "feeds": [{"x": image[None]} for image in x],
        "generator": ({"x": image[None]} for image in x),
    }
    out = api.quantize(small_model, "int8", sources[kind], tmp_path / "q.onnx")
    expected = api.quantize(small_model, "int8", {"x": x}, tmp_path / "e.onnx")
    assert out.read_bytes() == expected.read_bytes()


def test_a_folder_of_class_folders_gives_labels_and_keeps_its_preprocessing(small_model, tmp_path):
    draw = np.random.default_rng(0)
    for label in range(small_network.CLASSES):
        folder = tmp_path / "pictures" / f"c{label}"
        folder.mkdir(parents=True)
        for i in range(12):
            Image.fromarray(draw.integers(0, 255, (8, 8, 3), np.uint8)).save(folder / f"{i}.png")
    options = Preprocess(mean=(120.0, 120.0, 120.0), std=(60.0, 60.0, 60.0))
    run = tmp_path / "run"
    found = api.tune(small_model, tmp_path / "pictures", run, preprocess=options, **QUICK)
    assert found.summary.metric == "top1"
    assert Preprocess.from_toml(run / "preprocess.toml") == replace(options, layout="nchw", color="rgb", resize=(8, 8))


def test_the_preprocessing_in_use_is_in_the_run_from_its_start_and_gives_the_same_run_again(small_model, tmp_path):
    draw = np.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    for i in range(40):
        Image.fromarray(draw.integers(0, 255, (8, 8, 3), np.uint8)).save(tmp_path / "pictures" / f"{i}.png")

    def interrupted(step: object) -> None:
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        api.tune(small_model, tmp_path / "pictures", run, progress=interrupted, **QUICK)
    kept = Preprocess.from_toml(run / "preprocess.toml")
    assert kept.layout == "nchw" and kept.color == "rgb"
    api.tune(small_model, tmp_path / "pictures", run, preprocess=kept, **QUICK)  # else refused as another run's folder


def test_without_labels_agreement_is_measured(small_model, tmp_path):
    found = api.tune(small_model, {"x": small_network.images(60)}, tmp_path / "run", **QUICK)
    assert found.summary.metric == "agreement"


def test_synthetic_samples_are_said_loudly(small_model, tmp_path):
    found = api.tune(small_model, synthetic=60, run=tmp_path / "run", **QUICK)
    assert found.summary.synthetic
    assert "direction" in (tmp_path / "run/report/report.html").read_text().lower()


@pytest.mark.parametrize("options", [{}, {"data": {"x": np.zeros((40, 3, 8, 8), np.float32)}, "synthetic": 40}])
def test_data_and_synthetic_samples_exclude_each_other(small_model, tmp_path, options):
    for door in (api.tune, api.scan):
        with pytest.raises(UsageError, match="either data or"):
            door(small_model, **options)
    with pytest.raises(UsageError, match="either data or"):
        api.quantize(small_model, "int8", output=tmp_path / "q.onnx", **options)


# --- quantize, export, scan, evaluate, report -----------------------------------------------------------------


def test_a_plan_of_a_run_gives_the_same_file_again(small_model, small_data, whole_run, tmp_path):
    """The build key names the samples of both calls alike: same data, same seed, same split."""
    for id, relative in whole_run.summary.files.items():
        plan = whole_run.run / "plans" / id / "plan.json"
        if "uncorrected" in whole_run.summary.candidate(id).origin:
            continue
        out = api.quantize(small_model, plan, small_data, tmp_path / f"{id}.onnx")
        assert out.read_bytes() == (whole_run.run / relative).read_bytes(), id


def test_a_plan_says_itself_whether_biases_are_corrected(small_model, small_data, whole_run, tmp_path):
    plain = next(c for c in whole_run.candidates if c.plan.quantized() and BIAS not in c.plan.repairs)
    plan = whole_run.run / "plans" / plain.id / "plan.json"
    out = api.quantize(small_model, plan, small_data, tmp_path / "q.onnx")
    assert out.read_bytes() == whole_run.file(plain.id).read_bytes()


def test_a_plan_may_be_layers_with_schemes(small_model, small_data, tmp_path):
    mixed = api.quantize(small_model, {"conv1": "int8"}, small_data, tmp_path / "m.onnx")
    whole = api.quantize(small_model, "int8", small_data, tmp_path / "w.onnx")
    plain = api.quantize(small_model, "float", small_data, tmp_path / "f.onnx")
    assert whole.stat().st_size < mixed.stat().st_size
    x = small_network.images(4)
    outputs = [ort.InferenceSession(str(p)).run(None, {"x": x})[0] for p in (small_model, plain, mixed)]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert np.abs(outputs[2] - outputs[0]).max() > 0


@pytest.mark.parametrize(
    "plan, words",
    [({"conv3": "int8"}, "conv1|conv2"), ({"conv1": "int9"}, "int8"), ({"conv1": "int8-chanel"}, "int8-channel")],
)
def test_a_plan_with_unknown_names_is_refused_with_the_nearest(small_model, small_data, tmp_path, plan, words):
    with pytest.raises(UsageError, match=words):
        api.quantize(small_model, plan, small_data, tmp_path / "q.onnx")
    assert not (tmp_path / "q.onnx").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"layers": 3}', "\xff"])
def test_a_file_that_is_no_plan_is_named(small_model, small_data, tmp_path, content):
    path = tmp_path / "wrong.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"wrong\.json"):
        api.quantize(small_model, path, small_data, tmp_path / "q.onnx")


@pytest.mark.parametrize("name", ["recommended", "smallest", "fastest", "best quality"])
def test_export_copies_a_model_by_its_name(whole_run, tmp_path, name):
    out = api.export(whole_run.run, tmp_path / "deep/m.onnx", candidate=name)
    ids = [id for id, found in whole_run.summary.names.items() if name in found]
    assert out.read_bytes() == whole_run.file(ids[0]).read_bytes()


def test_export_copies_a_model_by_its_id_and_knows_no_other(whole_run, tmp_path):
    id = whole_run.candidates[1].id
    assert api.export(whole_run.run, tmp_path / "m.onnx", candidate=id).read_bytes() == whole_run.file(id).read_bytes()
    with pytest.raises(UsageError, match="recommended"):
        api.export(whole_run.run, tmp_path / "n.onnx", candidate="best")


def test_a_scan_scores_every_layer_under_every_scheme(small_model, small_data, tmp_path):
    found = api.scan(small_model, small_data, samples=8, output=tmp_path / "scan.json")
    document = json.loads((tmp_path / "scan.json").read_text())
    assert document == json.loads(json.dumps(found.document()))
    assert (document["samples"], document["schema"], document["kind"]) == (8, 3, "scan")
    scored = {(row["layer"], row["scheme"]) for row in document["layers"]}
    assert {(layer, s) for layer in small_network.LAYERS for s in ("int8", "int8-channel")} <= scored
    scores = [row["score"] for row in document["layers"]]
    assert scores == sorted(scores, reverse=True) and min(scores) >= 0
    assert all(row["low"] <= row["score"] <= row["high"] for row in document["layers"])


def test_the_scores_of_a_scan_are_the_prices_of_a_run(small_model, small_data, tmp_path):
    found = api.scan(small_model, small_data, samples=8, drift="off")
    run = api.tune(small_model, small_data, tmp_path / "run", samples=8, equalize="off", max_trials=4)
    prices = {(price.layer, price.scheme): price for price in run.summary.prices}
    assert {(score.layer, score.scheme) for score in found.layers} == set(prices)
    for score in found.layers:
        price = prices[score.layer, score.scheme]
        np.testing.assert_allclose([score.value, score.high], [price.value, price.high], rtol=1e-9)
        np.testing.assert_allclose(score.weights + sum(score.tensors.values()), score.value, rtol=1e-9)


def test_a_scan_of_one_sample_is_written_as_strict_json(small_model, small_data, tmp_path):
    api.scan(small_model, small_data, samples=1, output=tmp_path / "scan.json", drift="off")
    found = json.loads((tmp_path / "scan.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert found["samples"] == 1 and all(row["high"] is None for row in found["layers"])


def test_a_scan_of_no_samples_is_wrong_usage(small_model, small_data):
    with pytest.raises(UsageError, match="samples of at least 1"):
        api.scan(small_model, small_data, samples=0)


def test_evaluate_measures_files_against_float_as_the_run_did(small_model, small_data, whole_run):
    ids = [c.id for c in whole_run.candidates if isinstance(c.final, Measured)]
    files = [whole_run.file(id) for id in ids]
    found = api.evaluate(small_model, files, small_data)
    for id, file in zip(ids, files, strict=True):
        outcome, before = found.outcomes[str(file)], whole_run.summary.candidate(id).final
        assert isinstance(outcome, Measured) and isinstance(before, Measured)
        np.testing.assert_array_equal(outcome.errors, before.errors)
    assert len(found.document()["candidates"]) == len(files)  # type: ignore[arg-type]


def test_evaluate_of_a_model_with_other_outputs_is_a_failure(small_model, small_data, tmp_path):
    other = small_network.unquantizable(tmp_path / "other.onnx")
    outcome = api.evaluate(small_model, [other], small_data).outcomes[str(other)]
    assert isinstance(outcome, Failed) and outcome.kind == "shape"


def test_report_writes_its_files_again(whole_run, tmp_path):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(whole_run.run, run)
    before = {path.name: path.read_bytes() for path in (run / "report").iterdir()}
    shutil.rmtree(run / "report")
    found = api.report(run)
    assert {path.name: path.read_bytes() for path in found.report_files} == before
    assert set(before) == {"report.txt", "report.json", "front.json", "report.html"}
    assert found.recommended.id in before["report.txt"].decode()
    with pytest.raises(UsageError):
        api.report(run, top_k=0)


def test_every_public_name_is_importable_from_the_root():
    import quantsieve

    assert all(callable(getattr(quantsieve, name)) for name in quantsieve.__all__)
    assert set(quantsieve.__all__) == set(api.__all__)


def test_inspect_needs_no_data(small_model):
    assert {layer.name for layer in api.inspect(small_model).layers} >= set(small_network.LAYERS)
    with pytest.raises(QuantsieveError):
        api.inspect(Path("absent.onnx"))
