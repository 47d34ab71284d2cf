"""Layers chosen by hand on real files: what quantize, tune and scan write, say and refuse."""

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import chosen_network
import small_network
from quantsieve import api, cli
from quantsieve.api._line import open_line, open_sources
from quantsieve.errors import RunFolderError, UnsupportedModel, UsageError
from quantsieve.model.graph import Graph
from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare
from quantsieve.model.units import find_structure
from quantsieve.plan import Plan
from quantsieve.readback import check_written
from quantsieve.reports.decisions import decide, refused_text
from quantsieve.run.spec import Limits, Settings
from quantsieve.schemes import names as scheme_names
from quantsieve.selection import Selection
from quantsieve.targets.audit import audit_layers
from quantsieve.targets.ort import OrtCpu

BY_NODES = "kept float by --nodes-to-exclude"
STEM = "node_Conv_0"  # what folding its BatchNorm calls the Conv that is /stem/conv:0 in the file
LAYERS = {
    STEM: "Conv", "body a": "Conv", "body b": "Conv", "sum": "Add", "p": "GlobalAveragePool",
    "dense": "MatMul", "head:gemm": "Gemm",
}  # fmt: skip
WEIGHTED = [name for name, op_type in LAYERS.items() if op_type not in ("Add", "GlobalAveragePool")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chosen_network.network(tmp_path_factory.mktemp("chosen") / "m.onnx")


@pytest.fixture(scope="module")
def data(model):
    return small_network.save_arrays(model.with_name("data.npz"), small_network.arrays(model, count=120))


@pytest.fixture(scope="module")
def structure(model):
    found, _ = prepare(load_model(model), ({"x": small_network.images(1)},), 0)
    graph = Graph(found)
    return graph, find_structure(graph)


class Written:
    """A file by names."""

    def __init__(self, path):
        graph = onnx.load(path).graph
        self.path = path
        self.nodes = {node.name: node for node in graph.node}
        self.makers = {name: node for node in graph.node for name in node.output}
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}

    def weight(self, layer):
        """The numbers that the layer's node reads as its weight, as they lie in the file."""
        name = self.nodes[layer].input[1]
        if name in self.constants:
            return self.constants[name]
        assert self.makers[name].op_type == "DequantizeLinear"
        return self.constants[self.makers[name].input[0]]

    def is_float(self, layer):
        return self.weight(layer).dtype == np.float32


def test_the_model_has_the_layers_that_the_tests_speak_of(structure):
    assert {layer.name: layer.op_type for layer in structure[1].quantizable} == LAYERS


EXCLUDED = [
    (["/stem/norm:0"], {STEM}),  # folded away
    (["/stem/relu 0"], {STEM}),
    (["relu, b"], {"body b"}),
    (["dense/bias"], {"dense"}),
    (["head:gemm"], {"head:gemm"}),
    (["p", "sum"], {"p", "sum"}),
    ([r"re:body [ab]", "flat"], {"body a", "body b"}),
    ([r"re:.*[:/].*"], {STEM, "dense", "head:gemm"}),
]


@pytest.mark.parametrize(("entries", "wanted"), EXCLUDED)
def test_excluded_nodes_are_in_the_file_with_their_float_weights_and_run_in_float(
    entries, wanted, model, data, structure, tmp_path
):
    path = api.quantize(model, "int8", data, tmp_path / "q.onnx", nodes_to_exclude=entries, bias_correction=False)
    graph, layers = structure
    written, weighted = Written(path), wanted & set(WEIGHTED)
    assert {layer for layer in WEIGHTED if written.is_float(layer)} == weighted
    ran = audit_layers(OrtCpu(threads=1).audit(path), {x.name: x.nodes for x in layers.quantizable})
    assert {layer for layer in LAYERS if ran[layer] == "float"} == wanted
    for layer in weighted:
        np.testing.assert_array_equal(written.weight(layer), graph.constant(layers.layer(layer).weight))


@pytest.mark.parametrize("kept", ["body a", "body b"])
def test_a_weight_that_a_kept_and_a_quantized_layer_share_is_split(kept, model, data, structure, tmp_path):
    other = {"body a": "body b", "body b": "body a"}[kept]
    path = api.quantize(model, "int8-channel", data, tmp_path / "q.onnx", nodes_to_exclude=[kept])
    written, graph = Written(path), structure[0]
    np.testing.assert_array_equal(written.weight(kept), graph.constant("w2"))
    np.testing.assert_array_equal(written.constants[written.nodes[kept].input[2]], graph.constant("b2"))
    ints = written.weight(other)
    assert ints.dtype in (np.int8, np.uint8)
    made = written.makers[written.nodes[other].input[1]]
    scale = written.constants[made.input[1]].reshape(-1, 1, 1, 1)
    zero = written.constants[made.input[2]].reshape(-1, 1, 1, 1).astype(np.int32)
    # Rounding moves a weight by half a step at most; the product and the quotient are rounded to float32 once each.
    assert (np.abs((ints - zero) * scale - graph.constant("w2")) <= scale * 0.5001).all()


@pytest.mark.parametrize("kept", ["words", "last"])
def test_an_embedding_and_the_product_that_shares_its_table_are_two(kept, tmp_path):
    model = chosen_network.tied(tmp_path / "m.onnx")
    data = {"ids": np.random.default_rng(0).integers(0, 15, (60, 5), np.int64)}
    written = Written(api.quantize(model, "w8", data, tmp_path / "q.onnx", nodes_to_exclude=[kept]))
    table = numpy_helper.to_array(onnx.load(model).graph.initializer[0])
    read = {name: written.nodes[name].input[index] for name, index in (("words", 0), ("last", 1))}
    np.testing.assert_array_equal(written.constants[read.pop(kept)], table)
    ((_, other),) = read.items()
    while other not in written.constants:
        other = written.makers[other].input[0]
    assert written.constants[other].dtype in (np.int8, np.uint8)


def test_the_nodes_in_front_of_an_embedding_do_not_belong_to_it(tmp_path):
    model = chosen_network.tied(tmp_path / "m.onnx")
    data, notes = {"ids": np.random.default_rng(0).integers(0, 15, (60, 5), np.int64)}, []
    api.quantize(model, "w8", data, tmp_path / "q.onnx", nodes_to_exclude=["next"], tell=notes.append)
    assert notes[-1] == "0 of the 2 layers that could be quantized stay float by hand"
    scan = api.scan(model, data, schemes=["w8"], samples=4, drift="off")
    assert {row.layer: row.nodes for row in scan.layers} == {"words": ("words",), "last": ("last",)}


def test_a_weight_shared_by_two_kept_layers_stays_one(model, data, tmp_path):
    written = Written(api.quantize(model, "int8", data, tmp_path / "q.onnx", nodes_to_exclude=["re:body.*"]))
    assert written.nodes["body a"].input[1] == written.nodes["body b"].input[1] == "w2"


def test_the_quantized_file_still_answers_like_the_model(model, data, tmp_path):
    path = api.quantize(model, "int8-channel", data, tmp_path / "q.onnx", nodes_to_exclude=["body a", "dense/bias"])
    x = small_network.images(20, seed=3)
    asked, found = (ort.InferenceSession(str(file)).run(None, {"x": x})[0] for file in (model, path))
    assert np.square(found - asked).mean() < 0.01 * asked.var()


def test_what_is_to_be_quantized_alone_is(model, data, tmp_path):
    given = {"nodes_to_quantize": ["relu, b", "dense", "act/tanh"]}
    notes = []
    path = api.quantize(model, "int8", data, tmp_path / "q.onnx", **given, tell=notes.append, bias_correction=False)
    rest = api.quantize(model, {"body b": "int8", "dense": "int8"}, data, tmp_path / "r.onnx", bias_correction=False)
    assert path.read_bytes() == rest.read_bytes()
    assert "--nodes-to-quantize: float stays act/tanh: no int8 scheme for Tanh" in notes
    assert notes[-1] == "5 of the 7 layers that could be quantized stay float by hand"


@pytest.mark.parametrize("scheme", sorted(set(scheme_names()) - {"int8", "int8-channel"}))
def test_the_other_schemes_leave_out_what_is_excluded_as_well(scheme, model, data, structure, tmp_path):
    written = Written(api.quantize(model, scheme, data, tmp_path / "q.onnx", nodes_to_exclude=["body a", "dense/bias"]))
    for layer, weight in (("body a", "w2"), ("dense", "wm")):
        np.testing.assert_array_equal(written.constants[written.nodes[layer].input[1]], structure[0].constant(weight))
    assert "head:gemm" not in written.nodes or "wg" not in written.nodes["head:gemm"].input


def test_op_types_choose_by_the_operator_of_a_layer(model, data, tmp_path):
    only = Written(api.quantize(model, "int8", data, tmp_path / "a.onnx", op_types_to_quantize=["Conv", "Gemm"]))
    assert [layer for layer in WEIGHTED if only.is_float(layer)] == ["dense"]
    less = Written(api.quantize(model, "int8", data, tmp_path / "b.onnx", op_types_to_exclude=["Add", "re:.*Conv"]))
    assert [layer for layer in WEIGHTED if not less.is_float(layer)] == ["dense", "head:gemm"]


def test_a_plan_that_quantizes_an_excluded_layer_is_wrong_usage(model, data, tmp_path):
    with pytest.raises(UsageError, match=f"int8 for body a: {BY_NODES}"):
        api.quantize(model, {"body a": "int8"}, data, tmp_path / "q.onnx", nodes_to_exclude=["body a"])
    assert not (tmp_path / "q.onnx").exists()


# --- tune and scan ------------------------------------------------------------------------------------------------


def tune(model, data, run, **options):
    return api.tune(model, data, run, samples=4, workers=1, max_trials=10, **options)


def test_no_candidate_of_a_run_quantizes_what_is_excluded(model, data, tmp_path):
    found = tune(model, data, tmp_path / "run", nodes_to_exclude=["/stem/norm:0"], op_types_to_exclude=["MatMul"])
    plans = [candidate.plan for candidate in found.candidates]
    assert len(plans) > 4 and any(plan.is_quantized("body a") for plan in plans)
    refusals = {layer.name: layer.refusal for layer in found.summary.layers if layer.refusal is not None}
    assert refusals == {
        STEM: BY_NODES, "dense": "kept float by --op-types-to-exclude", "act/tanh": "no int8 scheme for Tanh",
    }  # fmt: skip
    for candidate in found.candidates:
        written = Written(found.file(candidate.id))
        assert written.is_float(STEM) and written.is_float("dense")
    assert not {STEM, "dense"} & {price.layer for price in found.summary.prices}
    notes = (tmp_path / "run/report/report.txt").read_text().replace("\n", " ")
    assert "'/stem/norm:0' matches 1 node, 1 layer" in " ".join(notes.split())
    assert BY_NODES in (tmp_path / "run/report/report.json").read_text()
    decisions = decide(found.summary, found.candidates[-1])
    assert refused_text(decisions) == "1 that cannot be quantized, 2 kept float by you"
    assert [d.reason for d in decisions if d.layer.name == STEM] == [BY_NODES]
    settings = json.loads((tmp_path / "run/spec.json").read_text())["settings"]
    assert settings["selection"] == {"nodes_to_exclude": ["/stem/norm:0"], "op_types_to_exclude": ["MatMul"]}


def test_another_selection_is_another_run_and_the_same_goes_on(model, data, tmp_path):
    run = tmp_path / "run"
    before = tune(model, data, run, nodes_to_exclude=["sum", "dense"])
    again = tune(model, data, run, nodes_to_exclude=["dense", "sum", "dense"])
    assert [c.id for c in again.candidates] == [c.id for c in before.candidates]
    assert again.summary.notes == before.summary.notes
    for other in ({}, {"nodes_to_exclude": ["sum"]}, {"nodes_to_quantize": ["dense", "sum"]}):
        with pytest.raises(RunFolderError, match="selection"):
            tune(model, data, run, **other)


def test_without_a_selection_the_settings_are_those_of_older_runs():
    assert "selection" not in Settings().document()
    given = Settings(selection=Selection.of(nodes_to_exclude=["a"])).document()
    assert given == {**Settings().document(), "selection": {"nodes_to_exclude": ["a"]}}


def test_a_scan_scores_what_is_left_and_lists_the_others_with_the_reason(model, data, tmp_path):
    out = tmp_path / "scan.json"
    found = api.scan(model, data, samples=4, drift="off", op_types_to_quantize=["Conv"], output=out)
    assert {row.layer for row in found.layers} == {STEM, "body a", "body b"}
    reason = "kept float by --op-types-to-quantize"
    assert {r.layer for r in found.refused if r.reason == reason} == {"sum", "p", "dense", "head:gemm"}
    assert any("'Conv' matches 3 nodes, 3 layers" in note for note in found.notes)
    assert api.read_scan(out) == found
    all_of_it = api.scan(model, data, samples=4, drift="off")
    scores = {(row.layer, row.scheme): row.value for row in all_of_it.layers}
    assert all(row.value == scores[row.layer, row.scheme] for row in found.layers)  # alone is alone


@pytest.mark.parametrize("options", [{"metric": "sqnr"}, {"mode": "rescue"}, {"drift": "auto"}])
def test_every_kind_of_scan_leaves_excluded_layers_out(options, model, data):
    found = api.scan(model, data, samples=4, **{"drift": "off", **options}, nodes_to_exclude=["body a", "p"])
    assert {row.layer for row in found.layers} == set(LAYERS) - {"body a", "p"}


def test_prices_of_another_selection_have_another_key(model, data, tmp_path):
    """What is stored for one cannot be taken for the other."""

    def keys(name, **given):
        sources = open_sources(model, data, None, None, None, False, None, 0)
        settings = Settings(samples=4, selection=Selection.of(**given))
        with open_line(tmp_path / name, model, sources, settings, Limits(workers=1), None) as line:
            assert line.prices.num_samples == 4
        return {path.stem for path in (tmp_path / name / "facts/sensitivity").glob("*.json")}

    plain = keys("a")
    assert plain == keys("b", nodes_to_exclude=["act/tanh"])  # what keeps nothing changes nothing
    assert plain.isdisjoint(keys("c", nodes_to_exclude=["sum"]))


@pytest.mark.parametrize("command", [api.tune, api.scan, lambda m, d, **given: api.quantize(m, "int8", d, **given)])
def test_an_unknown_name_is_told_before_anything_is_measured(command, model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"'body c', which names none.*body [ab]"):
        command(model, data, nodes_to_exclude=["body c"])
    with pytest.raises(UsageError, match="regular expression"):
        command(model, data, nodes_to_quantize=["re:("])


# --- the command line ---------------------------------------------------------------------------------------------


def test_options_are_repeatable_take_commas_and_leave_those_of_a_pattern(model, data, tmp_path, capsys):
    out = tmp_path / "q.onnx"
    arguments = ["quantize", str(model), "--data", str(data), "-o", str(out), "--quiet"]
    arguments += ["--nodes-to-exclude", "dense/bias, sum", "--nodes-to-exclude", "re:relu, .{1,2}"]
    assert cli.main(arguments) == 0
    told = capsys.readouterr()
    assert [layer for layer in WEIGHTED if Written(out).is_float(layer)] == ["body b", "dense"]
    assert told.out == f"Wrote {out}\n"
    assert "note: --nodes-to-exclude: 'dense/bias' matches 1 node, 1 layer; 're:relu, .{1,2}'" in told.err
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][-1].startswith("3 of the 7 layers")


@pytest.mark.parametrize("command", ["tune", "scan", "quantize"])
@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("--nodes-to-exclude", "body", "body a"),
        ("--nodes-to-quantize", "re:[", "regular expression"),
        ("--op-types-to-exclude", "Cnov", "The model has Add, BatchNormalization, Conv"),
        ("--op-types-to-quantize", ",", "at least one"),
    ],
)
def test_a_wrong_entry_exits_with_2_and_a_hint(
    command, option, value, hint, model, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.main([command, str(model), "--data", str(data), option, value, "--quiet"]) == 2
    assert hint in " ".join(capsys.readouterr().err.split())


# --- what is written against what was asked ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_a(model, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("without") / "q.onnx"
    return api.quantize(model, "int8", data, out, nodes_to_exclude=["body a"], bias_correction=False)


def changed_file(path, change):
    graph = onnx.load(path).graph
    change(graph)
    return graph


def double(graph):
    tensor = next(tensor for tensor in graph.initializer if tensor.name == "w2")
    tensor.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(tensor), "w2"))


def rename(graph):
    next(node for node in graph.node if node.name == "body a").name = "elsewhere"


def round_inside(graph):
    next(node for node in graph.node if node.op_type == "Relu" and node.input[0] == "c2").input[0] = "rounded"


def take_integers(graph):
    quantized = next(node for node in graph.node if node.name == "body b")
    next(node for node in graph.node if node.name == "body a").input[1] = quantized.input[1]


def unquantize(graph):
    next(node for node in graph.node if node.name == "body b").input[1] = "w2"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (double, "body a float.*other numbers in 'w2'"),
        (rename, "no Conv of the name body a"),
        (round_inside, "reading 'rounded' instead of 'c2'"),
        (take_integers, "body a reading .* instead of 'w2'"),
        (unquantize, "body b quantized.*its weight as 'w2'"),
    ],
)
def test_a_file_that_is_not_what_was_asked_for_is_refused(change, found, without_a, structure):
    plan = Plan({layer: "int8" for layer in LAYERS if layer != "body a"})
    check_written(onnx.load(without_a).graph, *structure, plan, {"body a"})
    with pytest.raises(UnsupportedModel, match=found):
        check_written(changed_file(without_a, change), *structure, plan, {"body a"})
    with pytest.raises(UnsupportedModel, match="the plan makes it int8"):
        check_written(onnx.load(without_a).graph, *structure, Plan({"body a": "int8"}), {"body a"})
