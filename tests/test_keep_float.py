"""Layers that scan.json marks stay float, in every plan, and a run folder knows which they were."""

import json
from dataclasses import replace

import pytest

import small_network
from quantsieve import api
from quantsieve.calibrate import Calibration
from quantsieve.errors import InputError, RunFolderError, UsageError
from quantsieve.model.graph import Graph
from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare
from quantsieve.model.units import find_structure
from quantsieve.plan import KEPT, find_options
from quantsieve.run.spec import Settings
from quantsieve.schemes import discover


@pytest.fixture(scope="module")
def scanned(small_model, small_data, tmp_path_factory):
    path = tmp_path_factory.mktemp("scan") / "scan.json"
    api.scan(small_model, small_data, samples=4, output=path, drift="off")
    return path


def marked(scanned, path, *layers, scheme=None):
    """The scan with these layers marked as an editor would: on rows of `scheme`, or on all."""
    document = json.loads(scanned.read_text())
    for row in document["layers"]:
        row["keep_float"] = row["layer"] in layers and scheme in (None, row["scheme"])
    path.write_text(json.dumps(document))
    return path


def tune(model, data, run, scan, **options):
    return api.tune(model, data, run, scan=scan, samples=4, workers=1, max_trials=12, **options)


def test_a_scan_is_read_back_as_it_was_written(small_model, small_data, scanned):
    found = api.read_scan(scanned)
    assert found == api.scan(small_model, small_data, samples=4, drift="off")
    assert {row.layer for row in found.layers} | {r.layer for r in found.refused} == {
        layer.name for layer in api.inspect(small_model).layers
    }
    assert found.calibration_samples == 24


def test_marked_layers_are_float_in_every_candidate_and_the_report_says_why(small_model, small_data, scanned, tmp_path):
    scan = marked(scanned, tmp_path / "scan.json", "conv2", scheme="int8-channel")  # one of its two rows
    found = tune(small_model, small_data, tmp_path / "run", scan)
    plans = [candidate.plan for candidate in found.candidates]
    assert len(plans) > 5 and any(plan.is_quantized("dense") for plan in plans)
    assert not any(plan.is_quantized("conv2") for plan in plans)
    layers = {layer.name: layer.refusal for layer in found.summary.layers}
    assert [name for name, refusal in layers.items() if refusal == KEPT] == ["conv2"]
    assert "conv2" not in {price.layer for price in found.summary.prices}
    assert KEPT in (tmp_path / "run/report/report.json").read_text()
    assert json.loads((tmp_path / "run/spec.json").read_text())["settings"]["keep_float"] == ["conv2"]


def test_a_run_folder_with_other_marks_is_refused_and_with_the_same_goes_on(small_model, small_data, scanned, tmp_path):
    first = marked(scanned, tmp_path / "first.json", "conv1")
    run = tmp_path / "run"
    before = tune(small_model, small_data, run, first)
    again = tune(small_model, small_data, run, api.read_scan(first))
    assert [c.id for c in again.candidates] == [c.id for c in before.candidates]
    for other in (marked(scanned, tmp_path / "second.json", "conv1", "conv2"), None):
        with pytest.raises(RunFolderError, match="keep_float"):
            tune(small_model, small_data, run, other)


def test_without_marks_the_settings_are_those_of_a_run_without_a_scan():
    assert "keep_float" not in Settings().document()
    assert Settings(keep_float=("a",)).document()["keep_float"] == ["a"]


def test_a_model_whose_every_layer_is_kept_is_handed_on(small_model, small_data, scanned, tmp_path):
    everything = {row.layer for row in api.read_scan(scanned).layers}
    scan = marked(scanned, tmp_path / "scan.json", *everything)
    found = tune(small_model, small_data, tmp_path / "run", scan)
    assert [candidate.origin for candidate in found.candidates] == ["float"]
    assert any(KEPT in note for note in found.summary.notes)


def test_quantize_leaves_marked_layers_float(small_model, small_data, scanned, tmp_path):
    scan = marked(scanned, tmp_path / "scan.json", "conv2", "pool")
    out = api.quantize(small_model, "int8", small_data, tmp_path / "q.onnx", scan=scan)
    same = api.quantize(small_model, {"conv1": "int8", "dense": "int8"}, small_data, tmp_path / "same.onnx")
    assert out.read_bytes() == same.read_bytes()
    with pytest.raises(UsageError, match=f"conv2: {KEPT}"):
        api.quantize(small_model, {"conv2": "int8"}, small_data, tmp_path / "no.onnx", scan=scan)


def test_a_scan_of_another_model_is_refused(small_data, scanned, tmp_path):
    other = small_network.network(tmp_path / "other.onnx", seed=1)
    with pytest.raises(InputError, match="same model"):
        tune(other, small_data, tmp_path / "run", scanned)
    with pytest.raises(InputError, match="same model"):
        api.quantize(other, "int8", small_data, tmp_path / "q.onnx", scan=api.read_scan(scanned))
    assert not (tmp_path / "run").exists()


def test_a_mark_on_a_layer_that_the_model_lacks_is_wrong_usage_with_the_nearest(
    small_model, small_data, scanned, tmp_path
):
    document = json.loads(scanned.read_text())
    document["layers"].append({**document["layers"][0], "layer": "conv3", "keep_float": True})
    (tmp_path / "scan.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"'conv3'.*conv[12]"):
        tune(small_model, small_data, tmp_path / "run", tmp_path / "scan.json")
    with pytest.raises(UsageError, match="'conv3'"):
        api.quantize(small_model, "int8", small_data, tmp_path / "q.onnx", scan=tmp_path / "scan.json")


def test_a_layer_that_cannot_be_quantized_keeps_its_own_reason(tmp_path):
    model, _ = prepare(load_model(small_network.unquantizable(tmp_path / "m.onnx")), (), 0)
    graph = Graph(model)
    found = find_options(graph, find_structure(graph), Calibration({}, {}, {}, 0, ()), discover(), {"tanh"})
    assert found.refusals["tanh"] == "no int8 scheme for Tanh"


def test_refused_layers_have_reasons_and_no_scores(tmp_path):
    path = small_network.unquantizable(tmp_path / "m.onnx")
    found = api.scan(path, {"x": small_network.images(40)}, drift="off")
    assert (found.layers, found.num_samples) == ((), 0)
    assert {(r.layer, r.op_type) for r in found.refused} == {("mean", "ReduceMean"), ("tanh", "Tanh")}
    assert all(r.reason.startswith("no int8 scheme for") for r in found.refused)


# --- pick, then use it -----------------------------------------------------------------------


def test_what_pick_writes_is_what_quantize_keeps(small_model, small_data, scanned, tmp_path):
    out = tmp_path / "picked.json"
    found = api.pick(scanned, coverage=0.5, output=out)
    assert api.read_scan(out) == found.scan and api.read_scan(out).keep_float == tuple(sorted(found.layers))
    assert 0 < found.num_kept < 4
    quantized = api.quantize(small_model, "int8", small_data, tmp_path / "a.onnx", scan=out)
    rest = {row.layer: "int8" for row in found.scan.layers if row.layer not in found.layers}
    same = api.quantize(small_model, rest, small_data, tmp_path / "b.onnx")
    assert quantized.read_bytes() == same.read_bytes()
    assert set(found.nodes) <= {"conv1", "relu1", "conv2", "relu2", "pool", "dense"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("blocks.toml", 'convolutions = "conv"\nconv1 = "conv1"\n'),
        ("blocks.json", '{"convolutions": "conv", "conv1": "conv1"}'),
    ],
)
def test_a_map_of_blocks_may_be_toml_or_json(scanned, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    found = api.pick(scanned, coverage=1.0, blocks=tmp_path / name)
    assert {g.name: set(g.layers) for g, _ in found.groups} == {
        "convolutions": {"conv1", "conv2"}, "pool": {"pool"}, "dense": {"dense"},
    }  # fmt: skip
    assert api.pick(scanned, coverage=1.0, blocks={"convolutions": "conv", "conv1": "conv1"}) == found


def test_blocks_by_operator_and_as_the_scan_found_them(scanned):
    by_type = api.pick(scanned, coverage=1.0, blocks="op_type")
    assert {g.name for g, _ in by_type.groups} == {"Conv", "GlobalAveragePool", "Gemm"}
    auto = api.pick(scanned, coverage=1.0, blocks="auto")  # a chain: each layer alone
    assert auto == api.pick(scanned, coverage=1.0)


def test_stages_blocks_and_halves_are_three_sizes_of_what_the_scan_found(scanned):
    places = {"conv1": ("s", "b.1", "b.1/attention"), "conv2": ("s", "b.1", "b.1/mlp"), "pool": ("s", "b.2", None)}
    rows = tuple(
        replace(row, stage=stage, block=block, half=half)
        for row in api.read_scan(scanned).layers
        for stage, block, half in [places.get(row.layer, (None, "b.3", None))]
    )
    found = replace(api.read_scan(scanned), layers=rows)

    def groups(blocks):
        picked = api.pick(found, coverage=1.0, blocks=blocks)
        return {group.name: sorted(group.layers) for group, _ in picked.groups}

    assert groups("stage") == {"s": ["conv1", "conv2", "pool"], "b.3": ["dense"]}
    assert groups("auto") == {"b.1": ["conv1", "conv2"], "b.2": ["pool"], "b.3": ["dense"]}
    assert groups("half") == {"b.1/attention": ["conv1"], "b.1/mlp": ["conv2"], "b.2": ["pool"], "b.3": ["dense"]}


@pytest.mark.parametrize(
    ("name", "text"), [("b.toml", "x = ["), ("b.json", "[]"), ("b.toml", "x = 3"), ("b.json", "{")]
)
def test_a_map_that_is_none_is_named(scanned, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=rf"b\.{name[2:]}"):
        api.pick(scanned, coverage=1.0, blocks=tmp_path / name)
    with pytest.raises(InputError, match="auto, stage, half, op_type"):
        api.pick(scanned, coverage=1.0, blocks="nowhere.toml")
