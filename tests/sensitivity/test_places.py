"""Groups that layers are found in: names as exporters write them, and the graph where names say nothing."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import made_models
import numpy as np
import pytest
from onnx import helper

import small_network
from quantsieve.model.graph import Graph
from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare
from quantsieve.model.units import find_structure
from quantsieve.sensitivity._halves import halves_by_word, transformers, whole
from quantsieve.sensitivity._names import blocks_by_name, stages_by_name
from quantsieve.sensitivity._segments import blocks_by_graph, segments
from quantsieve.sensitivity.places import find_places

ZOO = Path(__file__).resolve().parents[3] / "shared" / "zoo"


def opened(path):
    model, _ = prepare(load_model(path), (), 0)
    graph = Graph(model)
    return graph, find_structure(graph)


def members(path, size):
    """Layers by name of the group of that size, those in none left out."""
    found = defaultdict(list)
    for layer, place in find_places(*opened(path)).items():
        if getattr(place, size) is not None:
            found[getattr(place, size)].append(layer)
    return dict(found)


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


STAGES = {
    "torch, resnet": (lambda name: "/" + name.split("/")[1]),
    "keras, resnet50": (lambda name: name.split("_")[0]),
    "torch, transformer": None,
    "torch, mobilenetv2": None,
}


@pytest.mark.parametrize("export", STAGES)
def test_the_stage_is_the_shortest_path_around_several_blocks(export):
    inside, block, outside = EXPORTS[export]
    weighted, stage = dict.fromkeys([*outside, *inside], True), STAGES[export]
    found = stages_by_name(weighted, {name: block(name) for name in inside})
    assert found == ({name: stage(name) for name in inside} if stage else {})


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


def test_a_stage_of_one_block_is_none():
    names = [f"/layer{s}/layer{s}.{b}/conv{i}" for s, b in ((1, 0), (1, 1), (2, 0)) for i in (1, 2)]
    weighted = dict.fromkeys(names, True)
    assert stages_by_name(weighted, blocks_by_name(weighted)) == dict.fromkeys(names[:4], "/layer1")


def test_what_lies_between_two_nodes_on_every_path_is_a_block(tmp_path):
    graph, structure = opened(residual(tmp_path / "m.onnx"))
    first = dict.fromkeys(["Conv_1", "Conv_2", "Add_1"], "Conv_1 .. Add_1")
    second = dict.fromkeys(["Conv_3", "Conv_4", "Add_2"], "Conv_3 .. Add_2")
    assert blocks_by_graph(graph, structure) == first | second
    places = find_places(graph, structure)
    assert {name: x.block for name, x in places.items() if x.block} == first | second
    assert {x.stage for x in places.values()} == {None}  # both make one resolution: a stage would say nothing


def test_names_win_where_they_say_something(tmp_path):
    names = iter(["stem", "/b.0/c1", "/b.0/c2", "/b.1/c1", "/b.1/c2", "head"])

    class Next:
        def format(self, number):
            return next(names)

    found = members(residual(tmp_path / "m.onnx", Next()), "block")
    assert found == {f"/b.{i}": [f"/b.{i}/c1", f"/b.{i}/c2"] for i in (0, 1)}


def test_a_chain_has_no_blocks(small_model):
    assert [members(small_model, size) for size in ("stage", "block", "half")] == [{}, {}, {}]


# --- transformers ----------------------------------------------------------------------------


def by_module(module, op_type):
    return f"/{module}/{op_type}"


@pytest.mark.parametrize("norm", ["before", "after"])
@pytest.mark.parametrize("cross", [False, True])
def test_halves_of_a_transformer_without_names_are_told_by_its_graph(tmp_path, norm, cross):
    """The mask binds all blocks together, the Add of GELU looks like a residual sum, numbers say nothing."""
    path = made_models.transformer(tmp_path / "m.onnx", made_models.numbers(), norm, cross)
    halves, blocks = members(path, "half"), members(path, "block")
    assert list(halves) == [f"transformer.{i}/{half}" for i in (0, 1) for half in ("attention", "mlp")]
    assert {block: sorted(layers) for block, layers in blocks.items()} == {
        f"transformer.{i}": sorted(halves[f"transformer.{i}/attention"] + halves[f"transformer.{i}/mlp"])
        for i in (0, 1)
    }
    attention = ["MatMul"] * (6 if cross else 4)  # query, key, value, out; of the memory neither key nor value
    weightless = ["Add", "MatMul", "MatMul", "Add"] * (2 if cross else 1)  # mask, two products, residual sum
    for i in (0, 1):
        ops = [layer.rpartition("_")[0] for layer in halves[f"transformer.{i}/attention"]]
        assert sorted(ops) == sorted(attention + weightless)
        ops = [layer.rpartition("_")[0] for layer in halves[f"transformer.{i}/mlp"]]
        assert sorted(ops) == ["Add", "Add", "MatMul", "MatMul", "Mul"]


@pytest.mark.parametrize("cross", [False, True])
def test_halves_bear_the_name_of_their_block_where_names_tell_it(tmp_path, cross):
    path = made_models.transformer(tmp_path / "m.onnx", by_module, cross=cross)
    halves = members(path, "half")
    assert list(halves) == [f"/encoder/layer.{i}/{half}" for i in (0, 1) for half in ("attention", "mlp")]
    for half, layers in halves.items():
        modules = ("attention", "cross") if half.endswith("attention") else ("mlp",)
        assert {layer.split("/")[3] for layer in layers} == set(modules[: 1 + cross])
    assert sum(map(len, halves.values())) == sum(map(len, members(path, "block").values()))


def residual_sums(path, kinds):
    """x [batch, 4, 8], then a part a kind: a residual sum behind a branch, or 'project', which has none."""
    net = made_models.Network(made_models.numbers())
    last = "x"
    for kind in kinds:
        inner = net.dense("first", last)
        if kind == "project":
            last = inner
            continue
        if kind in ("attention", "product"):
            turned = net.op("Transpose", "turned", inner, perm=[0, 2, 1])
            product = net.op("MatMul", "product", inner, turned)
            inner = net.op("MatMul", "mix", product, inner) if kind == "attention" else net.dense("mix", product, 8, 4)
        if kind != "adapter":
            inner = net.dense("second", inner)
        last = net.op("Add", "sum", last, inner)
    return net.save(path, {"x": ["batch", 4, 8]}, {"y": net.dense("last", last)})


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        (["attention", "mlp"], 1),
        (["attention", "mlp", "mlp"], 1),
        (["attention", "attention", "mlp"], 1),
        (["attention", "mlp", "attention", "mlp"], 2),
        (["product", "mlp"], 0),  # a single product is no attention
        (["attention", "adapter"], 0),  # a single layer is no MLP
        (["attention", "project", "mlp"], 0),
        (["mlp", "mlp"], 0),
    ],
)
def test_a_transformer_block_is_attention_and_the_two_layers_next_to_it(tmp_path, kinds, count):
    graph, _ = opened(residual_sums(tmp_path / "m.onnx", kinds))
    found = transformers(graph)
    assert len(found) == count
    for attention, mlp in found:
        assert attention.isdisjoint(mlp) and max(attention) < min(mlp)
        assert len(attention) % 8 == 0 and len(mlp) == 5  # dense is MatMul and Add; two products, a turn and the sum


def test_words_tell_the_halves_where_the_graph_does_not():
    layers = ["l.0/attention/q", "l.0/attention/output", "l.0/norm", "l.0/intermediate/dense", "l.0/output/dense"]
    known = halves_by_word(layers)
    assert known == dict.fromkeys(layers[:2], "attention") | {layers[3]: "mlp"}
    assert whole(layers, known) == dict.fromkeys(layers[:3], "attention") | dict.fromkeys(layers[3:], "mlp")


def test_a_block_with_one_half_has_none():
    assert whole(["a", "b"], {"a": "attention"}) == {}
    assert whole(["a", "b"], halves_by_word(["l.0/attn/q", "l.0/conv"])) == {}


# --- heads -----------------------------------------------------------------------------------

HEADS = {
    ("kinds", "numbers"): ("head/boxes", "head/scores"),
    ("levels", "numbers"): ("head/boxes", "head/scores"),
    ("one", "numbers"): ("head/4 channels", "head/5 channels"),
    ("kinds", "names"): ("head/boxes", "head/scores"),
    ("levels", "names"): ("head/boxes", "head/scores"),
    ("one", "names"): ("head/boxes_preds", "head/scores_preds"),
}


@pytest.mark.parametrize(("outputs", "names"), HEADS)
def test_heads_are_what_works_for_one_kind_of_result(tmp_path, outputs, names):
    """One head a kind, over the levels of the pyramid: two convolutions a level, and what follows them alone."""
    modules = {}

    def counted(module, op_type, count=made_models.numbers()):  # noqa: B008
        name = count(module, op_type) if names == "numbers" else by_module(module, op_type)
        modules[name] = module
        return name

    path = made_models.detector(tmp_path / "m.onnx", counted, outputs)
    found = members(path, "stage")
    assert tuple(found) == HEADS[outputs, names]
    for layers, kind in zip(found.values(), ("boxes", "scores"), strict=True):
        convs = {modules[layer] for layer in layers if "Conv" in layer}
        assert convs == {f"head/{kind}{part}" for i in range(3) for part in (f".{i}/conv", f"_preds.{i}")}
        assert sum("Sigmoid" in layer for layer in layers) == (3 if kind == "scores" else 0)
        assert not any(modules[layer].startswith(("neck", "backbone", "head/stems")) for layer in layers)
    places = find_places(*opened(path)).values()
    assert len({(place.block, place.stage) for place in places}) == len({place.block for place in places})


def chain(net, name, source, count, inner=4):
    """Convolutions in a row, the first of which halves height and width."""
    for step in range(count):
        source = net.conv(f"{name}.{step}", source, inner if not step else 4, 4, 2 if not step else 1)
    return source


def test_the_late_stages_of_a_backbone_with_several_outputs_are_no_heads(tmp_path):
    net = made_models.Network(by_module)
    features, last = {}, "x"
    for stage, count in enumerate((9, 2, 2, 2)):
        last = features[f"f{stage}"] = chain(net, f"s{stage}", last, count, 4 if stage else 3)
    path = net.save(tmp_path / "m.onnx", {"x": ["batch", 3, 32, 32]}, features)
    assert not any(str(place).count("head/") for place in find_places(*opened(path)).values())


def test_what_holds_most_of_a_network_is_no_head(tmp_path):
    """An output for training leaves the network early; the rest of it is the network, and not a head."""
    net = made_models.Network(by_module)
    early = chain(net, "early", "x", 2, 3)
    outputs = {"help": chain(net, "help", early, 2), "logits": chain(net, "late", early, 6)}
    found = members(net.save(tmp_path / "m.onnx", {"x": ["batch", 3, 32, 32]}, outputs), "stage")
    assert found == {"head/help": ["/help.0/Conv", "/help.1/Conv"]}


def test_a_layer_behind_two_heads_is_in_neither_and_does_not_name_them(tmp_path):
    """Boxes and classes of three levels lie in one tensor and are split again; boxes then pass one more convolution."""
    net = made_models.Network(by_module)
    stem = chain(net, "stem", "x", 3, 3)
    levels = []
    for level in range(3):
        kinds = [
            net.conv(f"{kind}.{level}.1", net.conv(f"{kind}.{level}.0", stem, 4, 4), 4, 4) for kind in ("cv2", "cv3")
        ]
        levels.append(net.op("Concat", f"level.{level}", *kinds, axis=1))
    joined = net.op("Concat", "join", *levels, axis=3)
    ends = (net.ints(0), net.ints(4), net.ints(4), net.ints(8), net.ints(1))
    boxes = net.op("Slice", "boxes", joined, ends[0], ends[1], ends[4])
    scores = net.op("Slice", "scores", joined, ends[2], ends[3], ends[4])
    made = net.op("Concat", "all", net.conv("dfl", boxes, 4, 4), net.op("Sigmoid", "sigmoid", scores), axis=1)
    found = members(net.save(tmp_path / "m.onnx", {"x": ["batch", 3, 8, 8]}, {"y": made}), "stage")
    convs = {f"cv{i}": [f"/cv{i}.{level}.{step}/Conv" for level in range(3) for step in (0, 1)] for i in (2, 3)}
    assert found == {"head/cv2": convs["cv2"], "head/cv3": convs["cv3"]}


def test_what_reads_a_shape_alone_works_for_nothing(tmp_path):
    """Each head's last tensor is flattened by the batch of the other head's: both would reach all results."""
    net = made_models.Network(by_module)
    stem = chain(net, "stem", "x", 4, 3)
    boxes, scores = chain(net, "b", stem, 2), chain(net, "s", stem, 2)
    outputs = {}
    for name, value, other in (("boxes", boxes, scores), ("scores", scores, boxes)):
        batch = net.op("Slice", f"batch/{name}", net.op("Shape", f"shape/{name}", other), net.ints(0), net.ints(1))
        outputs[name] = net.op(
            "Reshape", f"flat/{name}", value, net.op("Concat", f"to/{name}", batch, net.ints(-1), axis=0)
        )
    found = members(net.save(tmp_path / "m.onnx", {"x": ["batch", 3, 32, 32]}, outputs), "stage")
    assert found == {"head/boxes": ["/b.0/Conv", "/b.1/Conv"], "head/scores": ["/s.0/Conv", "/s.1/Conv"]}


def test_a_stage_is_what_makes_one_resolution(tmp_path):
    """Five residual blocks without names, of which the third and the last halve height and width."""
    net = made_models.Network(made_models.numbers())
    last = net.conv("stem", "x", 3, 4)
    for block, stride in enumerate((1, 1, 2, 1, 2)):
        branch = net.conv("b", net.op("Relu", "r", net.conv("a", last, 4, 4, stride)), 4, 4)
        shortcut = last if stride == 1 else net.conv("s", last, 4, 4, stride)
        last = net.op("Add", f"sum{block}", branch, shortcut)
    path = net.save(tmp_path / "m.onnx", {"x": ["batch", 3, 8, 8]}, {"y": net.op("GlobalAveragePool", "p", last)})
    blocks, stages = members(path, "block"), members(path, "stage")
    first, second, third, fourth, _last = blocks.values()
    assert list(stages.values()) == [first + second, third + fourth]
    assert list(stages) == [f"{first[0]} .. {second[-1]}", f"{third[0]} .. {fourth[-1]}"]


# --- trained models --------------------------------------------------------------------------


@pytest.mark.zoo
@pytest.mark.skipif(not ZOO.is_dir(), reason="no trained models in ../shared/zoo beside the checkout")
@pytest.mark.parametrize(
    ("model", "size", "count", "one"),
    [
        ("cifar_resnet20", "block", 9, "/blocks.3"),
        ("cifar_resnet20", "stage", 3, "/blocks.3 .. /blocks.5"),
        ("efficientnet_lite0", "block", 16, "/blocks.15"),
        ("efficientnet_lite0", "stage", 4, "/blocks.5 .. /blocks.10"),
        ("mobilenetv2_cifar10", "block", 8, "/features/features.4"),
        ("mobilenetv2_cifar10", "stage", 3, "/features/features.4 .. /features/features.6"),
        ("kws_dscnn", "block", 0, None),
        ("mlperf_resnet8", "block", 3, "/c.1"),
        ("ppocrv4_rec", "half", 4, "transformer.1/mlp"),
        ("yolox_nano", "block", 4, "Conv_50 .. Concat_66"),
        ("yolox_nano", "stage", 2, "head/4+1 channels"),
    ],
)
def test_groups_of_trained_models(model, size, count, one):
    found = members(ZOO / model / "model.onnx", size)
    assert len(found) == count
    assert one is None or one in found


def test_segments_are_what_removing_a_node_cuts_off(tmp_path):
    """The definition: without a cut node no path leads from the input to the output."""
    graph, _ = opened(residual(tmp_path / "m.onnx"))
    segment = segments(graph)
    names = [node.name for node in graph.nodes]

    def passes(without):
        fed = {"x"}
        for node in graph.nodes:
            if node.name != without and any(v is not None and v.name in fed for v in node.inputs):
                fed |= {v.name for v in node.outputs}
        return graph.outputs[0].name in fed

    cuts = {name for name, after in pairwise(names) if segment[name] != segment[after]}
    assert cuts | {names[-1]} == {name for name in names if not passes(name)}
