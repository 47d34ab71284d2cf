"""Both engines give the outputs of the edited model run whole, and only what passes the check is taken."""

import gc
import weakref
from itertools import pairwise

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import control_flow
from quantsieve import schemes
from quantsieve.calibrate import calibrate
from quantsieve.model import aside, execute
from quantsieve.model.execute import AMPLE, Affine, Executor, Room, Shelf
from quantsieve.model.graph import Graph
from quantsieve.model.prepare import output_gap
from quantsieve.model.units import find_structure
from quantsieve.plan import find_options, forced_tensors
from quantsieve.schemes._static import by_name
from quantsieve.sensitivity import engine, optimized, suffixes
from quantsieve.sensitivity.engine import ByLayer, BySuffix, open_engine
from quantsieve.sensitivity.suffix import error_vectors, find_sources, scan_batch
from quantsieve.weights import NO_CORRECTIONS

node = helper.make_node
COUNT = 3
# Sums of a few hundred float32 products in another order, each off by 2**-24 of its size.
TOLERANCE = 1e-5
STEP = Affine(np.float32(0.25), 7, "uint8")  # coarse: a change of some ten per cent


def value(name, shape=None, elem=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, elem, shape)


def tensor(name, *shape):
    """Weights that keep the size of what passes a Relu, and small biases, so that a change is seen at the end."""
    seed = sum(map(ord, name))
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    values *= np.float32(1.5 if len(shape) > 1 else 0.2)
    return numpy_helper.from_array(values / np.float32(np.sqrt(np.prod(shape[1:]) or 1)), name)


def model_of(nodes, inputs, outputs, constants):
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def conv(name, read, made, **attributes):
    return node("Conv", [read, f"w_{name}", f"b_{name}"], [made], name=name, **attributes)


def chain():
    """Fourteen convolutions, depthwise ones and odd numbers of channels among them, with Relu and Clip."""
    widths = [3, 24, 24, 24, 20, 20, 32, 32, 32, 17, 17, 16, 16, 8, 8]
    nodes, read = [], "x"
    constants = [numpy_helper.from_array(np.float32(limit), name) for limit, name in ((0, "low"), (6, "high"))]
    for index, (before, after) in enumerate(pairwise(widths)):
        name = f"c{index}"
        is_depthwise = index in (2, 7)
        nodes.append(conv(name, read, f"{name}_y", pads=[1, 1, 1, 1], group=before if is_depthwise else 1))
        constants += [tensor(f"w_{name}", after, 1 if is_depthwise else before, 3, 3), tensor(f"b_{name}", after)]
        read = f"{name}_r"
        kind = [("Relu", []), ("Clip", ["low", "high"])][index % 2]
        nodes.append(node(kind[0], [f"{name}_y", *kind[1]], [read], name=f"{name}_act"))
    nodes.append(node("GlobalAveragePool", [read], ["p"], name="pool"))
    nodes.append(node("Flatten", ["p"], ["f"], name="flat"))
    nodes.append(node("Gemm", ["f", "w_head", "b_head"], ["y"], name="head", transB=1))
    constants += [tensor("w_head", 5, 8), tensor("b_head", 5)]
    return model_of(nodes, [value("x", ["n", 3, 8, 8])], [value("y", ["n", 5])], constants)


def branches():
    """A stem, two branches of several layers, a residual Add, Concat; a value that is an output and is read again."""
    nodes = [
        conv("stem", "x", "s", pads=[1, 1, 1, 1]),
        node("Relu", ["s"], ["stem_r"], name="stem_act"),
        conv("l0", "stem_r", "l0_y", pads=[1, 1, 1, 1]),
        conv("l1", "l0_y", "l1_y", pads=[1, 1, 1, 1]),
        node("Add", ["l1_y", "stem_r"], ["sum"], name="join"),
        node("Relu", ["sum"], ["left"], name="join_act"),
        *(conv(f"r{i}", "stem_r" if i == 0 else f"r{i - 1}_y", f"r{i}_y", pads=[1, 1, 1, 1]) for i in range(6)),
        node("Sigmoid", ["r5_y"], ["right"], name="soft"),
        node("Concat", ["left", "right"], ["both"], name="concat", axis=1),
        node("AveragePool", ["both"], ["small"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        conv("last", "small", "map"),
        node("GlobalAveragePool", ["map"], ["mean"], name="mean"),
        node("ArgMax", ["mean"], ["best"], name="best", axis=1),
    ]
    constants = [
        tensor("w_stem", 16, 3, 3, 3),
        tensor("b_stem", 16),
        tensor("w_last", 7, 32, 1, 1),
        tensor("b_last", 7),
    ]
    for name in ("l0", "l1", *(f"r{i}" for i in range(6))):
        constants += [tensor(f"w_{name}", 16, 16, 3, 3), tensor(f"b_{name}", 16)]
    outputs = [value("map", ["n", 7, 4, 4]), value("mean", ["n", 7, 1, 1]), value("best", None, TensorProto.INT64)]
    return model_of(nodes, [value("x", ["n", 3, 8, 8])], [*outputs, value("left", ["n", 16, 8, 8])], constants)


def inputs():
    """Two inputs, a scaled product, attention-like products of activations; an initializer as output."""
    nodes = [
        node("MatMul", ["x", "w_a"], ["a0"], name="a"),
        node("Add", ["a0", "b_a"], ["a1"], name="a_bias"),
        node("Mul", ["a1", "half"], ["a2"], name="scale"),
        node("MatMul", ["z", "w_b"], ["b0"], name="b"),
        node("Transpose", ["b0"], ["b1"], name="turn", perm=[0, 2, 1]),
        node("MatMul", ["a2", "b1"], ["m"], name="scores"),
        node("Softmax", ["m"], ["soft"], name="soft", axis=-1),
        node("MatMul", ["soft", "b0"], ["mixed"], name="mix"),
        node("Mul", ["mixed", "a1"], ["gated"], name="gate"),
        node("MatMul", ["gated", "w_c"], ["y"], name="c"),
    ]
    constants = [tensor("w_a", 24, 16), tensor("b_a", 16), tensor("w_b", 12, 16), tensor("w_c", 16, 6)]
    constants.append(numpy_helper.from_array(np.float32(0.5), "half"))
    ends = [value("x", ["n", "t", 24]), value("z", ["n", "t", 12])]
    return model_of(nodes, ends, [value("y", ["n", "t", 6]), value("w_c", [16, 6])], constants)


def control():
    return onnx.shape_inference.infer_shapes(control_flow.model(tensor))


def fixed():
    """The chain with a batch of one in the file."""
    model = chain()
    for end in (*model.graph.input, *model.graph.output):
        end.type.tensor_type.shape.dim[0].dim_value = 1
    del model.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(model)


MODELS = {"chain": chain, "branches": branches, "inputs": inputs, "control": control, "fixed": fixed}
SHAPES = {
    "chain": {"x": (3, 8, 8)}, "branches": {"x": (3, 8, 8)}, "inputs": {"x": (5, 24), "z": (5, 12)},
    "control": {"x": (6,)}, "fixed": {"x": (3, 8, 8)},
}  # fmt: skip
every_model = pytest.mark.parametrize("name", MODELS)


def feeds_of(name, seed=0):
    draw = np.random.default_rng(seed)
    count = 1 if name == "fixed" else COUNT
    return {key: draw.standard_normal((count, *shape)).astype(np.float32) for key, shape in SHAPES[name].items()}


def open_model(name, room=AMPLE):
    graph = Graph(ir.from_proto(MODELS[name]()))
    return Executor(graph, find_structure(graph), room)


def num_samples(feeds):
    return next(iter(feeds.values())).shape[0]


def fast(executor, feeds):
    found = open_engine(executor, feeds, num_samples(feeds))
    assert engine.refusal(executor) is None
    assert isinstance(found, BySuffix)
    return found


def run_off(proto, feeds):
    """Float outputs by name of a whole model, optimizations off."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, feeds), strict=True))
    return {name: array for name, array in found.items() if array.dtype == np.float32}


def assert_equal(got, wanted):
    assert set(got) == set(wanted)
    for name, array in wanted.items():
        assert output_gap(got[name], array) <= TOLERANCE, name


def assert_near(got, wanted):
    """As `assert_equal`, but for single values that another order of sums puts beyond the middle of two steps: these
    are a step apart where they are rounded, and few, so the mean moves little."""
    assert set(got) == set(wanted)
    for name, array in wanted.items():
        spread = np.sqrt(np.mean(np.square(array.astype(np.float64)))) + 1e-12
        gap = np.abs(got[name].astype(np.float64) - array)
        assert np.median(gap) <= TOLERANCE * spread and gap.mean() <= 1e-3 * spread, name


def rounded_model(proto, root, affine=STEP):
    """Every reader of `root`, in subgraphs too, and the graph's output of that name read it rounded."""
    back, step = f"{root}/back", f"{root}/step"

    def rename(graph):
        for found in graph.node:
            found.input[:] = [back if read == root else read for read in found.input]
            for attribute in found.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    rename(attribute.g)

    rename(proto.graph)
    at = next((i + 1 for i, found in enumerate(proto.graph.node) if root in found.output), 0)
    proto.graph.node.insert(at, node("DequantizeLinear", [f"{step}_q", f"{step}_s", f"{step}_z"], [back], name=back))
    proto.graph.node.insert(at, node("QuantizeLinear", [root, f"{step}_s", f"{step}_z"], [f"{step}_q"], name=step))
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(affine.scale), f"{step}_s"))
    proto.graph.initializer.append(numpy_helper.from_array(np.uint8(affine.zero_point), f"{step}_z"))
    for output in proto.graph.output:
        output.name = back if output.name == root else output.name
    return proto


def run_rounded(proto, roots, feeds):
    for root in roots:
        proto = rounded_model(proto, root)
    return {output.removesuffix("/back"): array for output, array in run_off(proto, feeds).items()}


def other_weights(executor, layer):
    draw = np.random.default_rng(9)
    found = []
    for constant in (layer.weight, layer.bias):
        array = executor.graph.constant(constant) if constant else None
        noise = None if array is None else draw.standard_normal(array.shape).astype(np.float32) / 8
        found.append(None if array is None else array + noise)
    return found


def reweighted_model(proto, layer, weight, bias):
    for constant in proto.graph.initializer:
        for own, array in ((layer.weight, weight), (layer.bias, bias)):
            if own == constant.name:
                constant.CopyFrom(numpy_helper.from_array(array, own))
    return proto


def differ(got, wanted):
    return any(output_gap(got[name], wanted[name]) > 1e-3 for name in got)


@every_model
def test_without_a_source_the_outputs_are_those_of_the_model(name):
    feeds = feeds_of(name)
    assert_equal(fast(open_model(name), feeds).reference(), run_off(MODELS[name](), feeds))


@every_model
def test_each_rounded_tensor_gives_the_outputs_of_the_model_that_rounds_it(name):
    feeds = feeds_of(name)
    executor = open_model(name)
    found = fast(executor, feeds)
    plain = ByLayer(executor, feeds)
    changed = 0
    for tensor in executor.structure.tensors:
        wanted = run_rounded(MODELS[name](), [tensor.root], feeds)
        assert_equal(found.rounded(tensor.root, STEP), wanted)
        assert_equal(plain.rounded(tensor.root, STEP), wanted)
        changed += differ(wanted, found.reference())
    assert changed >= len(executor.structure.tensors) - 1  # a rounding that nothing sees proves nothing


@every_model
def test_each_layer_with_other_weights_gives_the_outputs_of_the_model_with_them(name):
    feeds = feeds_of(name)
    executor = open_model(name)
    found = fast(executor, feeds)
    plain = ByLayer(executor, feeds)
    layers = [layer for layer in executor.structure.quantizable if layer.weight]
    assert layers
    for layer in layers:
        weight, bias = other_weights(executor, layer)
        wanted = run_off(reweighted_model(MODELS[name](), layer, weight, bias), feeds)
        wanted.pop("w_c", None)  # here the constant itself is an output: the layer alone has other weights
        for got in (found.reweighted(layer, weight, bias), plain.reweighted(layer, weight, bias)):
            got.pop("w_c", None)
            assert_equal(got, wanted)
            assert differ(wanted, found.reference()), layer.name


def forced_roots(executor, layer):
    return tuple(root for root, _ in forced_tensors(executor.graph, layer, schemes.get("int8")))


@every_model
def test_a_layer_with_all_its_sources_gives_the_outputs_of_the_model_with_all_of_them(name):
    feeds = feeds_of(name)
    executor = open_model(name)
    found = fast(executor, feeds)
    plain = ByLayer(executor, feeds)
    layers = executor.structure.quantizable
    changed = 0
    for layer in layers:
        weights = other_weights(executor, layer) if layer.weight else None
        roots = forced_roots(executor, layer)
        proto = MODELS[name]() if weights is None else reweighted_model(MODELS[name](), layer, *weights)
        wanted = run_rounded(proto, roots, feeds)
        wanted.pop("w_c", None)
        for way in (found, plain):
            got = way.together(dict.fromkeys(roots, STEP), layer, weights)
            got.pop("w_c", None)
            assert_near(got, wanted)
        changed += differ(wanted, found.reference())
    assert changed == len(layers)


@every_model
def test_one_source_together_is_that_source_alone(name):
    feeds = feeds_of(name)
    executor = open_model(name)
    for found in (fast(executor, feeds), ByLayer(executor, feeds)):
        for layer in executor.structure.quantizable:
            root = forced_roots(executor, layer)[0]
            assert_equal(found.together({root: STEP}, layer, None), found.rounded(root, STEP))
            if layer.weight:
                weights = other_weights(executor, layer)
                assert_equal(found.together({}, layer, weights), found.reweighted(layer, *weights))


def test_a_tensor_behind_another_is_rounded_as_the_first_leaves_it():
    """`sum` is the sum of `stem_r` and of what two layers make of it."""
    feeds = feeds_of("branches")
    executor = open_model("branches")
    layer = executor.structure.layer("join")
    roots = forced_roots(executor, layer)
    assert roots == ("l1_y", "stem_r", "left")
    wanted = run_rounded(branches(), roots, feeds)
    apart = ByLayer(executor, feeds)
    base = executor.forward(feeds)
    at_once = executor.after_values(base, {root: executor.round(base[root], STEP) for root in roots})
    assert differ({"left": at_once["left"].numpy()}, wanted)
    for found in (fast(executor, feeds), apart):
        assert_near(found.together(dict.fromkeys(roots, STEP), layer, None), wanted)


@every_model
def test_prices_of_both_engines_are_the_same(name, monkeypatch):
    executors = open_model(name), open_model(name)
    calibration = calibrated(name)
    prices = [prices_of(name, executors[0], calibration)]
    monkeypatch.setattr(engine, "optimize", refuse)
    prices.append(prices_of(name, executors[1], calibration))
    assert [engine.refusal(executor) for executor in executors] == [None, "by the test"]
    assert_same_prices(*prices)


@pytest.mark.parametrize("is_fast", [True, False])
@every_model
def test_prices_are_the_same_when_next_to_nothing_may_be_held(name, is_fast, monkeypatch):
    """All weights read from outside the sessions, all base values from a file, integers made anew."""
    if not is_fast:
        monkeypatch.setattr(engine, "optimize", refuse)
    calibration = calibrated(name)
    wanted = prices_of(name, open_model(name), calibration)
    monkeypatch.setattr(aside, "LARGE", 16)
    monkeypatch.setattr(execute, "_PAGE", 1)
    executor = open_model(name, Room(is_lean=True, values=0, keeps_integers=False))
    assert_same_prices(prices_of(name, executor, calibration), wanted)
    assert engine.refusal(executor) == (None if is_fast else "by the test")


def calibrated(name):
    return calibrate(open_model(name), [(feeds_of(name, seed), num_samples(feeds_of(name))) for seed in range(4)])


def prices_of(name, executor, calibration):
    # 16-bit formats would price what is float noise here.
    feeds, known = feeds_of(name), [scheme for scheme in schemes.discover() if scheme.activation != "uint16"]
    options = find_options(executor.graph, executor.structure, calibration, known)
    sources = find_sources(executor, options, known)
    return scan_batch(executor, feeds, num_samples(feeds), sources, calibration, NO_CORRECTIONS, by_name(known)).mean()


def assert_same_prices(found, wanted):
    # A price p is |e|^2; float noise of at most 1e-6 of an output's deviation moves e, so p by 2e-6 sqrt(p).
    assert np.all(np.abs(found - wanted) <= 1e-5 * wanted + 2e-6 * np.sqrt(wanted) + 1e-12)
    assert wanted.max() > 1e-5


def test_a_shelf_keeps_what_it_has_room_for_and_puts_the_rest_into_a_file():
    arrays = [np.random.default_rng(seed).standard_normal((2, 4096)).astype(np.float32) for seed in range(3)]
    shelf = Shelf(arrays[0].nbytes + 10)
    kept = [shelf.put(array) for array in arrays]
    assert kept[0] is arrays[0]
    assert [isinstance(array, np.memmap) for array in kept] == [False, True, True]
    del shelf
    gc.collect()
    for array, wanted in zip(kept, arrays, strict=True):
        np.testing.assert_array_equal(array, wanted)


def refuse(*_):
    raise optimized.Refused("by the test")


def test_a_coarse_change_has_the_price_of_the_edited_model_to_five_digits():
    feeds = feeds_of("branches")
    executor = open_model("branches")
    found = fast(executor, feeds)
    variance = {name: float(array.var()) for name, array in found.reference().items()}
    before = run_off(branches(), feeds)
    for root in ("x", "stem_r", "l1_y", "left", "right", "both", "small", "map"):
        got, _ = error_vectors(found.rounded(root, STEP), found.reference(), variance, COUNT)
        wanted, _ = error_vectors(run_rounded(branches(), [root], feeds), before, variance, COUNT)
        np.testing.assert_allclose(got.mean(), wanted.mean(), rtol=1e-5)


def test_a_rounding_that_changes_nothing_has_the_price_zero():
    feeds = feeds_of("chain")
    feeds["x"] = np.clip(np.rint(feeds["x"] * 4), -7, 248) / 4  # on the grid of STEP
    found = fast(open_model("chain"), feeds)
    for name, array in found.rounded("x", STEP).items():
        np.testing.assert_array_equal(array, found.reference()[name])


def test_a_change_reruns_no_branch_that_it_does_not_reach():
    feeds = feeds_of("branches")
    executor = open_model("branches")
    found = fast(executor, feeds)._suffixes
    ran = found._plan(frozenset({found.optimized.places["l0_y"]}))
    regions = {index for run in ran for index in range(run.first, run.last)}
    place = {name: found.optimized.makers[found.optimized.places[name]] for name in ("r3_y", "r4_y", "both", "map")}
    assert place["r3_y"] not in regions and place["r4_y"] not in regions
    assert place["both"] in regions and place["map"] in regions


def test_behind_the_first_regions_one_session_runs_the_rest():
    executor = open_model("chain")
    found = fast(executor, feeds_of("chain"))._suffixes
    runs = found._plan(frozenset({found.optimized.places["c0_r"]}))
    assert runs[-1].last == len(found.optimized.regions)
    assert len(runs) <= suffixes.STRIDE


@pytest.mark.parametrize(("twice", "light"), [(1 << 30, 1), (0, 1)])
@pytest.mark.parametrize("name", ["inputs", "chain"])
def test_where_packed_weights_are_held_changes_no_output(name, twice, light, monkeypatch):
    monkeypatch.setattr(suffixes, "TWICE", twice)
    monkeypatch.setattr(suffixes, "LIGHT", light)
    feeds = feeds_of(name)
    executor = open_model(name)
    found = fast(executor, feeds)
    for tensor in executor.structure.tensors:
        assert_equal(found.rounded(tensor.root, STEP), run_rounded(MODELS[name](), [tensor.root], feeds))
    packed = {
        name
        for region in found._suffixes.optimized.regions
        for name in set(region.constants) - set(found._suffixes._inputs([region]))
        if found._suffixes.optimized.constants[name].nbytes > light
    }
    holders = [
        (first, last)
        for first, last, is_open in found._suffixes._sessions
        if not is_open
        for region in found._suffixes.optimized.regions[first:last]
        if last > first + 1 and packed & set(region.constants)
    ]
    assert bool(holders) == (twice > 0)


def test_a_reader_that_passes_a_tensor_by_is_found_by_the_check(monkeypatch):
    """onnxruntime takes the factor of `scale` into the product behind it, which then does not read `a2` any more."""
    monkeypatch.setattr(optimized, "_BYPASSING", [])
    executor = open_model("inputs")
    open_engine(executor, feeds_of("inputs"), COUNT)
    assert "is another in onnxruntime's optimized graph" in engine.refusal(executor)


@pytest.mark.parametrize("name", ["chain", "inputs"])
def test_weights_that_lie_elsewhere_than_thought_are_found_by_the_check(name, monkeypatch):
    found = optimized.Slots.arrays

    def half(self, weight, bias, shapes):
        return {key: array * np.float32(0.98) for key, array in found(self, weight, bias, shapes).items()}

    monkeypatch.setattr(optimized.Slots, "arrays", half)
    executor = open_model(name)
    open_engine(executor, feeds_of(name), COUNT)
    assert "is another" in engine.refusal(executor)


def test_a_model_without_a_fast_way_runs_layer_by_layer(monkeypatch):
    monkeypatch.setattr(engine, "optimize", refuse)
    executor = open_model("branches")
    feeds = feeds_of("branches")
    found = open_engine(executor, feeds, COUNT)
    assert isinstance(found, ByLayer)
    assert engine.refusal(executor) == "by the test"
    assert_equal(found.rounded("stem_r", STEP), run_rounded(MODELS["branches"](), ["stem_r"], feeds))


def test_lists_of_tensors_may_lie_between_layers():
    nodes = [
        node("MatMul", ["x", "w_a"], ["m"], name="a"),
        node("SplitToSequence", ["m"], ["parts"], name="split", axis=1),
        node("ConcatFromSequence", ["parts"], ["turned"], name="join", axis=0),
        node("MatMul", ["turned", "w_b"], ["y"], name="b"),
    ]
    constants = [tensor("w_a", 6, 5), tensor("w_b", 1, 4)]
    model = model_of(nodes, [value("x", ["n", 6])], [value("y", ["m", 4])], constants)
    graph = Graph(ir.from_proto(model))
    executor = Executor(graph, find_structure(graph))
    feeds = feeds_of("control")
    assert_equal(fast(executor, feeds).reference(), run_off(model, feeds))


def test_batches_share_their_sessions_and_may_have_other_shapes():
    executor = open_model("inputs")
    draw = np.random.default_rng(5)
    first = fast(executor, feeds_of("inputs"))
    for length in (3, 9):
        feeds = {
            key: draw.standard_normal((2, length, width)).astype(np.float32) for key, width in (("x", 24), ("z", 12))
        }
        found = fast(executor, feeds)
        assert found._suffixes is first._suffixes
        assert_equal(found.rounded("a1", STEP), run_rounded(MODELS["inputs"](), ["a1"], feeds))


def test_sessions_end_with_their_executor():
    executor = open_model("chain")
    watched = weakref.ref(fast(executor, feeds_of("chain"))._suffixes)
    del executor
    gc.collect()
    assert watched() is None


def test_integers_are_made_anew_for_another_calibration():
    executor = open_model("chain")
    fast(executor, feeds_of("chain"))
    layer, scheme = executor.structure.layer("c3"), schemes.get("int8")
    found = []
    for seed in (0, 1):
        calibration = calibrate(executor, [(feeds_of("chain", seed), COUNT)])
        made = engine.kept_integers(executor, layer, scheme, calibration, NO_CORRECTIONS)
        assert engine.kept_integers(executor, layer, scheme, calibration, NO_CORRECTIONS) is made
        found.append(made.bias.scale)
    assert found[0] != found[1]
