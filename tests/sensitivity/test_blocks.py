"""Blocks: the user's map, names as exporters write them, and the graph where names say nothing."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

import small_network
from quantsieve.errors import InputError, UsageError
from quantsieve.model.graph import Graph
from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare
from quantsieve.model.units import find_structure
from quantsieve.sensitivity.blocks import (
    _segments,
    aggregate,
    blocks_by_graph,
    blocks_by_name,
    find_blocks,
    group,
    match,
)

ZOO = Path(__file__).resolve().parents[3] / "shared" / "zoo"

# --- the user's map --------------------------------------------------------------------------

NAMES = st.lists(st.text("ab1/", min_size=1, max_size=5), max_size=8, unique=True)
PATTERNS = st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["a", "b", "^a", "1$", "/", "a.b"]), max_size=3)


@given(NAMES, PATTERNS)
def test_the_first_pattern_that_matches_wins(layers, patterns):
    found = match(layers, patterns)
    for layer in layers:
        hits = [name for name, pattern in patterns.items() if re.search(pattern, layer)]
        assert found.get(layer) == (hits[0] if hits else None)


@given(NAMES, PATTERNS)
def test_every_layer_is_in_exactly_one_group_and_unmatched_ones_stand_alone(layers, patterns):
    found = match(layers, patterns)
    groups = group(layers, found)
    assert sorted(layer for g in groups for layer in g.layers) == sorted(layers)
    for g in groups:
        assert len({found.get(layer) for layer in g.layers}) == 1
        assert len(g.layers) == 1 or found.get(g.layers[0]) == g.name


def test_a_layer_alone_is_not_joined_with_a_block_of_its_name():
    assert [g.layers for g in group(["x", "y"], {"y": "x"})] == [("x",), ("y",)]


def test_an_expression_that_is_none_is_refused_with_its_block():
    with pytest.raises(InputError, match=r"block head, found '\('"):
        match(["a"], {"stem": "a", "head": "("})


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5))
def test_aggregates_are_what_their_names_say(values):
    assert aggregate("sum", values) == pytest.approx(sum(values))
    assert aggregate("max", values) == max(values)
    assert aggregate("mean", values) == pytest.approx(sum(values) / len(values))
    with pytest.raises(UsageError, match="median"):
        aggregate("median", values)


# --- names -----------------------------------------------------------------------------------

EXPORTS = {
    "torch, resnet": (
        [f"/layer{s}/layer{s}.{b}/{conv}/Conv" for s in (1, 2) for b in (0, 1) for conv in ("conv1", "conv2")],
        lambda name: name.rsplit("/", 2)[0],
        ["/conv1/Conv", "/fc/Gemm"],
    ),
    "torch, one block a stage": (
        [f"/layer{s}/layer{s}.0/{conv}/Conv" for s in (1, 2, 3) for conv in ("conv1", "conv2")],
        lambda name: name.split("/layer")[0] + "/" + name.split("/")[1],
        ["/conv1/Conv"],
    ),
    "torch, mobilenetv2": (
        [f"/features/features.{b}/conv/conv.{i}/conv.{i}.0/Conv" for b in (2, 3, 4) for i in (0, 1)],
        lambda name: name[: name.index("/conv/")],
        ["/features/features.0/features.0.0/Conv", "/classifier/classifier.1/Gemm"],
    ),
    "torch, transformer": (
        [
            f"/bert/encoder/layer.{b}/{part}/MatMul"
            for b in (0, 1, 10)
            for part in ("attention/self/query", "attention/self/key", "attention/output/dense", "output/dense")
        ],
        lambda name: name[: name.index("/", name.index("layer."))],
        ["/bert/pooler/dense/Gemm"],
    ),
    "dotted": (
        [f"encoder.layer.{b}.{part}" for b in (0, 5) for part in ("attention.query", "attention.key", "mlp.fc1")],
        lambda name: ".".join(name.split(".")[:3]),
        ["encoder.head"],
    ),
    "tf2onnx, mobilenet": (
        [f"model/block_{b}_{part}" for b in (1, 2, 16) for part in ("expand/Conv2D", "project/Conv2D")],
        lambda name: name[: name.index("_", name.index("block_") + 6)],
        ["model/Conv1/Conv2D", "model/Logits/MatMul"],
    ),
    "tf2onnx, slim": (
        [f"MobilenetV2/expanded_conv_{b}/{part}/Conv2D" for b in (1, 2) for part in ("expand", "project")],
        lambda name: name.rsplit("/", 2)[0],
        ["MobilenetV2/Conv/Conv2D"],
    ),
    "keras, resnet50": (
        [f"conv{s}_block{b}_{i}_conv/Conv2D" for s in (2, 3) for b in (1, 2) for i in (1, 2, 3)],
        lambda name: "_".join(name.split("_")[:2]),
        ["conv1_conv/Conv2D", "predictions/MatMul"],
    ),
    "keras, efficientnet": (
        [f"block{b}_{part}_conv/Conv2D" for b in ("2a", "2b", "3a") for part in ("expand", "project")],
        lambda name: name.split("_")[0],
        ["stem_conv/Conv2D", "top_conv/Conv2D"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("export", EXPORTS)
def test_names_of_exporters_tell_their_blocks(export):
    inside, block, outside = EXPORTS[export]
    found = blocks_by_name(dict.fromkeys([*outside[:1], *inside, *outside[1:]], True))
    assert found == {name: block(name) for name in inside}


def test_the_first_block_of_tensorflow_has_no_number():
    names = [f"expanded_conv{n}/{part}/Conv2D" for n in ("", "_1", "_2") for part in ("expand", "project")]
    found = blocks_by_name(dict.fromkeys(names, True))
    assert found == {name: name.split("/")[0] for name in names}


@pytest.mark.parametrize(
    "names",
    [
        [f"Conv_{i}" for i in range(9)],
        [f"node_conv2d_{i}" for i in range(9)],
        [f"conv2d_{i}/Conv2D" for i in range(9)],
        [f"/conv{i}/Conv" for i in range(9)],
        [f"/{kind}.{i}/Conv" for i in range(4) for kind in ("dw", "pw")],
        ["/a1/conv/Conv", "/a1/pool/Conv", "/a2/fc/Gemm", "/a2/out/Gemm"],  # siblings that share nothing
    ],
)
def test_numbers_that_only_count_layers_are_no_blocks(names):
    assert blocks_by_name(dict.fromkeys(names, True)) == {}


def test_layers_without_weights_belong_to_blocks_but_make_none():
    named = {f"/b.{i}/conv{j}/Conv": True for i in (0, 1) for j in (1, 2)} | {"/b.0/Add": False, "/b.1/Add": False}
    assert blocks_by_name(named) == {name: name[:4] for name in named}
    silu = {f"/{i}/{op}": op == "Conv" for i in range(4) for op in ("Conv", "Sigmoid", "Mul")}
    assert blocks_by_name(silu) == {}


# --- the graph -------------------------------------------------------------------------------


def residual(path, name="Conv_{}"):
    """stem, two residual blocks of two convolutions, head; names are numbers."""
    draw = np.random.default_rng(0)
    constants, nodes, last = {}, [], "x"

    def conv(source, number, channels_in=4):
        constants[f"w{number}"] = (draw.normal(size=(4, channels_in, 3, 3)) * 0.3).astype(np.float32)
        inputs, outputs = [source, f"w{number}"], [f"c{number}"]
        nodes.append(helper.make_node("Conv", inputs, outputs, name.format(number), pads=[1, 1, 1, 1]))
        return f"c{number}"

    last = conv("x", 0, 3)
    for block in (1, 2):
        inner = conv(last, 2 * block - 1)
        nodes.append(helper.make_node("Relu", [inner], [f"r{block}"], f"Relu_{block}"))
        inner = conv(f"r{block}", 2 * block)
        nodes.append(helper.make_node("Add", [last, inner], [f"a{block}"], f"Add_{block}"))
        last = f"a{block}"
    last = conv(last, 5)
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["logits"], "flat"),
    ]
    return small_network.save_model(path, nodes, constants)


def opened(path):
    model, _ = prepare(load_model(path), (), 0)
    graph = Graph(model)
    return graph, find_structure(graph)


def test_what_lies_between_two_nodes_on_every_path_is_a_block(tmp_path):
    graph, structure = opened(residual(tmp_path / "m.onnx"))
    first = dict.fromkeys(["Conv_1", "Conv_2", "Add_1"], "Conv_1 .. Add_1")
    second = dict.fromkeys(["Conv_3", "Conv_4", "Add_2"], "Conv_3 .. Add_2")
    assert blocks_by_graph(graph, structure) == first | second
    assert find_blocks(graph, structure) == first | second


def test_names_win_where_they_say_something(tmp_path):
    names = iter(["stem", "/b.0/c1", "/b.0/c2", "/b.1/c1", "/b.1/c2", "head"])

    class Next:
        def format(self, number):
            return next(names)

    graph, structure = opened(residual(tmp_path / "m.onnx", Next()))
    assert find_blocks(graph, structure) == {f"/b.{i}/c{j}": f"/b.{i}" for i in (0, 1) for j in (1, 2)}


def test_a_chain_has_no_blocks(small_model):
    graph, structure = opened(small_model)
    assert find_blocks(graph, structure) == {}


@pytest.mark.zoo
@pytest.mark.skipif(not ZOO.is_dir(), reason="no trained models in ../shared/zoo beside the checkout")
@pytest.mark.parametrize(
    ("model", "count", "one"),
    [
        ("cifar_resnet20", 9, "/blocks.3"),
        ("efficientnet_lite0", 16, "/blocks.15"),
        ("mobilenetv2_cifar10", 8, "/features/features.4"),
        ("kws_dscnn", 0, None),
        ("mlperf_resnet8", 3, "/c.1"),
        ("yolox_nano", 2, "Conv_50 .. Concat_66"),
    ],
)
def test_blocks_of_trained_models(model, count, one):
    graph, structure = opened(ZOO / model / "model.onnx")
    found = find_blocks(graph, structure)
    groups = [g for g in group([layer.name for layer in structure.quantizable], found) if len(g.layers) > 1]
    assert len(groups) == count
    assert one is None or one in {g.name for g in groups}


def test_segments_are_what_removing_a_node_cuts_off(tmp_path):
    """The definition: without a cut node no path leads from the input to the output."""
    graph, _ = opened(residual(tmp_path / "m.onnx"))
    segment = _segments(graph)
    names = [node.name for node in graph.nodes]

    def passes(without):
        fed = {"x"}
        for node in graph.nodes:
            if node.name != without and any(v is not None and v.name in fed for v in node.inputs):
                fed |= {v.name for v in node.outputs}
        return graph.outputs[0].name in fed

    cuts = {name for name, after in pairwise(names) if segment[name] != segment[after]}
    assert cuts | {names[-1]} == {name for name in names if not passes(name)}
