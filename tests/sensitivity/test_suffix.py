"""Prices by suffix execution equal those of the slow way: edit the model for each source and run it whole."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantsieve import schemes
from quantsieve.calibrate import calibrate
from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.units import find_structure
from quantsieve.plan import find_options
from quantsieve.schemes._static import by_name
from quantsieve.sensitivity.suffix import SKETCH, Prices, Source, error_vectors, find_sources, join, scan_batch
from quantsieve.weights import NO_CORRECTIONS, Corrections

node = helper.make_node
COUNT = 6


def value(name, shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def tensor(name, *shape):
    seed = sum(map(ord, name))
    return numpy_helper.from_array(np.random.default_rng(seed).normal(0, 0.4, shape).astype(np.float32), name)


def cnn():
    """Conv, Relu, pool, Conv, residual Add, Gemm with transB, two outputs."""
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], name="first", pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"], name="relu1"),
        node("MaxPool", ["r1"], ["p1"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["p1", "w2"], ["c2"], name="second", pads=[1, 1, 1, 1]),
        node("Add", ["c2", "p1"], ["a"], name="add"),
        node("Relu", ["a"], ["r2"], name="relu2"),
        node("Flatten", ["r2"], ["f"], name="flat"),
        node("Gemm", ["f", "w3", "b3"], ["y"], name="head", transB=1),
        node("GlobalAveragePool", ["r2"], ["g"], name="mean"),
    ]
    constants = [tensor("w1", 4, 3, 3, 3), tensor("b1", 4), tensor("w2", 4, 4, 3, 3)]
    constants += [tensor("w3", 5, 64), tensor("b3", 5)]
    outputs = [value("y", ["n", 5]), value("g", ["n", 4, 1, 1])]
    graph = helper.make_graph(nodes, "cnn", [value("x", ["n", 3, 8, 8])], outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def images(count, seed):
    return np.random.default_rng(seed).standard_normal((count, 3, 8, 8)).astype(np.float32)


class Setup:
    def __init__(self):
        self.proto = cnn()
        graph = Graph(ir.from_proto(self.proto))
        self.executor = Executor(graph, find_structure(graph))
        self.schemes = [schemes.get("int8"), schemes.get("int8-channel")]
        self.calibration = calibrate(self.executor, [({"x": images(16, 1)}, 16)])
        self.options = find_options(graph, self.executor.structure, self.calibration, self.schemes)
        self.sources = find_sources(self.executor, self.options, self.schemes)
        self.x = images(COUNT, 2)

    def scan(self, x, sources=None, corrections=NO_CORRECTIONS, workers=1, tell=lambda done: None):
        return scan_batch(
            self.executor, {"x": x}, len(x), sources or self.sources, self.calibration, corrections,
            by_name(self.schemes), workers, tell,
        )  # fmt: skip


@pytest.fixture(scope="module")
def setup():
    return Setup()


def run_off(proto, x):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"x": x}), strict=True))


def fake_quantize(values, scale, zero_point, low, high):
    return ((np.clip(np.rint(values / scale) + zero_point, low, high) - zero_point) * scale).astype(np.float32)


def slow_weights(proto, layer, is_channel, input_scale):
    """The model with the layer's weights rounded; no bias of this model is so large that it raises a scale."""
    tensors = {constant.name: constant for constant in proto.graph.initializer}
    weight = numpy_helper.to_array(tensors[layer.weight])
    others = tuple(i for i in range(weight.ndim) if i != 0)  # the output channels lie on axis 0 in every layer
    peak = np.abs(weight).max(axis=others, keepdims=True) if is_channel else np.abs(weight).max(keepdims=True)
    scale = (peak / np.float32(127)).astype(np.float32)
    tensors[layer.weight].CopyFrom(numpy_helper.from_array(fake_quantize(weight, scale, 0, -127, 127), layer.weight))
    if layer.bias:
        bias = numpy_helper.to_array(tensors[layer.bias])
        step = (scale.reshape(-1) * input_scale).astype(np.float64)
        rounded = (np.rint(bias / step) * step).astype(np.float32)
        tensors[layer.bias].CopyFrom(numpy_helper.from_array(rounded, layer.bias))


def slow_tensor(proto, root, low, high):
    """The model in which every reader of the tensor reads it through QuantizeLinear and DequantizeLinear."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32((high - low) / 255)
    for found in proto.graph.node:
        found.input[:] = ["rounded" if read == root else read for read in found.input]
    makers = [i for i, found in enumerate(proto.graph.node) if root in found.output]
    at = makers[0] + 1 if makers else 0
    proto.graph.node.insert(at, node("DequantizeLinear", ["q", "s", "z"], ["rounded"], name="back"))
    proto.graph.node.insert(at, node("QuantizeLinear", [root, "s", "z"], ["q"], name="round"))
    proto.graph.initializer.append(numpy_helper.from_array(scale, "s"))
    proto.graph.initializer.append(numpy_helper.from_array(np.uint8(np.rint(-low / scale)), "z"))
    for output in proto.graph.output:
        output.name = "rounded" if output.name == root else output.name


def slow_prices(setup, source):
    """float64 [samples]: relative squared error, mean over the outputs, of the edited model."""
    proto = cnn()
    if source.kind == "tensor":
        found = setup.calibration.ranges[source.owner]
        slow_tensor(proto, source.owner, found.low, found.high)
    else:
        layer = setup.executor.structure.layer(source.owner)
        read = {"first": "x", "second": "r1", "head": "r2"}[layer.name]
        low, high = setup.calibration.ranges[read].low, setup.calibration.ranges[read].high
        slow_weights(proto, layer, source.form == "int8-channel", (max(high, 0.0) - min(low, 0.0)) / 255)
    got, wanted = run_off(proto, setup.x), run_off(cnn(), setup.x)
    many = run_off(cnn(), images(16, 1))  # the calibration samples, whose variance scales each output
    prices = []
    for name, array in wanted.items():
        moved = got.get(name, got.get("rounded")).astype(np.float64) - array
        error = np.square(moved).reshape(COUNT, -1).mean(axis=1)
        prices.append(error / many[name].astype(np.float64).var())
    return np.mean(prices, axis=0)


SOURCES = [
    *(("weight", layer, form) for layer in ("first", "second", "head") for form in ("int8", "int8-channel")),
    *(("tensor", root, "uint8") for root in ("x", "r1", "c2", "r2", "y", "g")),
]


def test_the_sources_are_all_weights_and_all_tensors_of_the_model(setup):
    assert {(s.kind, s.owner, s.form) for s in setup.sources} == set(SOURCES)


@pytest.mark.parametrize(("kind", "owner", "form"), SOURCES)
def test_a_price_is_that_of_the_edited_model_run_whole(setup, kind, owner, form):
    source = Source(kind, owner, form)
    fast = setup.scan(setup.x, [source]).errors[0]
    slow = slow_prices(setup, source)
    assert slow.mean() > 1e-8
    # The outputs agree within some 1e-6 of their spread, an error vector is longer than 1e-3 of it.
    np.testing.assert_allclose(fast, slow, rtol=5e-3)


def test_the_prices_of_two_batches_joined_are_those_of_one(setup):
    whole = setup.scan(setup.x)
    parts = join([setup.scan(setup.x[:2]), setup.scan(setup.x[2:])])
    assert parts.sources == whole.sources
    assert parts.num_samples == COUNT
    np.testing.assert_allclose(parts.errors, whole.errors, rtol=5e-3)
    np.testing.assert_allclose(parts.mean_vectors, whole.mean_vectors, atol=1e-5)


def test_the_number_of_workers_changes_nothing(setup):
    one, two = setup.scan(setup.x, workers=1), setup.scan(setup.x, workers=2)
    assert one.sources == two.sources
    np.testing.assert_array_equal(one.errors, two.errors)
    np.testing.assert_array_equal(one.mean_vectors, two.mean_vectors)


def test_progress_is_told_source_by_source(setup):
    told = []
    setup.scan(setup.x, tell=told.append)
    assert told == list(range(1, len(setup.sources) + 1))


def test_a_correction_of_the_bias_enters_the_price(setup):
    source = Source("weight", "head", "int8")
    shift = np.full(5, 3, np.float32)
    plain = setup.scan(setup.x, [source]).mean()[0]
    moved = setup.scan(setup.x, [source], Corrections({"int8": {"head": shift}})).mean()[0]
    # Every value of y moves by 3; y is one of two outputs.
    np.testing.assert_allclose(moved, 9 / setup.calibration.output_variance["y"] / 2, rtol=0.2)
    assert moved > 10 * plain


def test_the_error_is_relative_to_the_variance_and_a_mean_over_outputs():
    reference = {"a": np.zeros((2, 4), np.float32), "b": np.zeros((2, 3), np.float32)}
    outputs = {"a": np.float32([[2, 2, 2, 2], [0, 0, 0, 0]]), "b": np.float32([[0, 0, 0], [3, 0, 0]])}
    errors, vectors = error_vectors(outputs, reference, {"a": 16.0, "b": 1.0}, 2)
    np.testing.assert_allclose(errors, [4 / 16 / 2, 9 / 3 / 2], rtol=1e-6)
    np.testing.assert_allclose(np.square(vectors).sum(axis=1), errors, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_costs_one_variance(bad):
    reference = {"a": np.zeros((2, 4), np.float32)}
    outputs = {"a": np.float32([[bad, 0, 0, 0], [0, 0, 0, 0]])}
    errors, _ = error_vectors(outputs, reference, {"a": 1.0}, 2)
    np.testing.assert_allclose(errors, [0.25, 0])


def test_an_output_of_another_shape_costs_one_variance_an_element():
    errors, _ = error_vectors({"a": np.zeros((2, 3))}, {"a": np.zeros((2, 4), np.float32)}, {"a": 1.0}, 2)
    np.testing.assert_allclose(errors, [1, 1])


def test_long_error_vectors_keep_their_length_on_average_in_the_sketch():
    draw = np.random.default_rng(0)
    outputs = {"a": draw.standard_normal((40, 5 * SKETCH + 7)).astype(np.float32)}
    reference = {"a": np.zeros_like(outputs["a"])}
    errors, vectors = error_vectors(outputs, reference, {"a": 1.0}, 40)
    assert vectors.shape == (40, SKETCH)
    # Squared lengths spread by sqrt(2 / 1024) around the truth, their mean over 40 by 0.7 %.
    np.testing.assert_allclose(np.square(vectors).sum(axis=1).mean(), errors.mean(), rtol=0.03)


def prices_of(vectors):
    vectors = np.asarray(vectors, np.float64)
    return Prices((Source("weight", "l", "int8"),), np.square(vectors).sum(axis=1)[None], vectors.mean(axis=0)[None])


def test_an_error_that_all_samples_share_is_corrected_away():
    prices = prices_of(np.tile([0.3, -0.4], (5, 1)))
    np.testing.assert_allclose(prices.mean(), [0.25])
    np.testing.assert_allclose(prices.common(), [0.25])
    np.testing.assert_allclose(prices.corrected(), [0], atol=1e-12)


def test_independent_errors_have_no_common_part_on_average():
    draw = np.random.default_rng(1)
    shared = np.asarray([1.0, 0.0, 0.0])
    # Errors of deviation 1 in 3 dimensions: |mean of 4|^2 is 3/4 too large on average, which `common` takes back. Then
    # the estimate has a deviation near 1.2 around 1, or of sqrt(3/8) around 0; clipping at 0 adds 0.08 and 0.27.
    with_shared = [prices_of(draw.standard_normal((4, 3)) + shared).common()[0] for _ in range(4000)]
    without = [prices_of(draw.standard_normal((4, 3))).common()[0] for _ in range(4000)]
    np.testing.assert_allclose(np.mean(with_shared), 1.0, atol=0.15)
    assert 0 <= np.mean(without) < 0.35
    many = [prices_of(draw.standard_normal((400, 3))).common()[0] for _ in range(200)]
    assert np.mean(many) < 0.005


def test_an_interval_shrinks_with_samples_and_holds_the_price():
    draw = np.random.default_rng(2)
    few, many = (prices_of(draw.standard_normal((count, 3))) for count in (4, 400))
    for prices in (few, many):
        low, high = prices.interval()
        assert 0 <= low[0] <= prices.mean()[0] <= high[0]
    assert np.diff(np.ravel(many.interval())) < np.diff(np.ravel(few.interval()))
