"""Running piece by piece equals running whole, and a probe equals a whole run of an edited model."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import OrtValue

import control_flow
from quantsieve.errors import UnsupportedModel
from quantsieve.model.execute import Affine, Executor
from quantsieve.model.graph import Graph
from quantsieve.model.prepare import output_gap, prepare
from quantsieve.model.units import find_structure

node = helper.make_node
# Pieces run with onnxruntime's optimizations, the whole model without: sums of a few hundred float32 products in
# another order, each off by 2**-24 of its size.
TOLERANCE = 1e-5


def value(name, shape=None, elem=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, elem, shape)


def tensor(name, *shape):
    seed = sum(map(ord, name))
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return numpy_helper.from_array(values / np.float32(np.sqrt(np.prod(shape[1:]) or 1)), name)


def model_of(nodes, inputs, outputs, constants):
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def residual():
    """A small CNN with a residual Add, a layout chain and a head."""
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], name="first", pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"], name="relu"),
        node("Conv", ["r1", "w2", "b2"], ["c2"], name="second", pads=[1, 1, 1, 1]),
        node("Add", ["c2", "r1"], ["a"], name="add"),
        node("Relu", ["a"], ["r2"], name="relu2"),
        node("GlobalAveragePool", ["r2"], ["p"], name="pool"),
        node("Flatten", ["p"], ["f"], name="flat"),
        node("Gemm", ["f", "w3", "b3"], ["y"], name="head"),
    ]
    constants = [tensor("w1", 4, 3, 3, 3), tensor("b1", 4), tensor("w2", 4, 4, 3, 3), tensor("b2", 4)]
    constants += [tensor("w3", 4, 5), tensor("b3", 5)]
    return model_of(nodes, [value("x", ["n", 3, 6, 6])], [value("y", ["n", 5])], constants)


def many():
    """Two inputs, three outputs: one inside the graph, one an integer, one an initializer."""
    nodes = [
        node("MatMul", ["x", "w1"], ["m"], name="left"),
        node("Add", ["m", "b1"], ["h"], name="bias"),
        node("MatMul", ["z", "w2"], ["k"], name="right"),
        node("Mul", ["h", "k"], ["g"], name="gate"),
        node("Sigmoid", ["g"], ["y"], name="soft"),
        node("ArgMax", ["y"], ["best"], name="best", axis=1),
    ]
    outputs = [value("y", ["n", 5]), value("h", ["n", 5]), value("best", None, TensorProto.INT64), value("w2", [6, 5])]
    constants = [tensor("w1", 8, 5), tensor("b1", 5), tensor("w2", 6, 5)]
    return model_of(nodes, [value("x", ["n", 8]), value("z", ["n", 6])], outputs, constants)


def branching():
    return control_flow.model(tensor)


SHAPES = {
    "residual": {"x": (3, 6, 6)},
    "many": {"x": (8,), "z": (6,)},
    "branching": {"x": (6,)},
}
MODELS = {"residual": residual, "many": many, "branching": branching}
every_model = pytest.mark.parametrize("name", MODELS)


def feeds_of(name, count=3, seed=0):
    draw = np.random.default_rng(seed)
    return {key: draw.standard_normal((count, *shape)).astype(np.float32) for key, shape in SHAPES[name].items()}


def open_model(proto, feeds):
    model, facts = prepare(ir.from_proto(proto), [feeds], 0)
    assert facts.notes == ()
    graph = Graph(model)
    return Executor(graph, find_structure(graph))


def run_off(proto, feeds):
    """Outputs by name of a whole model, optimizations off."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def assert_equal(got, wanted):
    assert set(got) == set(wanted)
    for name, array in wanted.items():
        assert output_gap(got[name].numpy(), array) <= TOLERANCE, name


def moved(proto, name, delta):
    """The model in which every reader of `name`, in subgraphs too, reads `name` + `delta` instead."""
    edited = onnx.ModelProto()
    edited.CopyFrom(proto)

    def rename(graph):
        for found in graph.node:
            found.input[:] = ["moved" if read == name else read for read in found.input]
            for attribute in found.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    rename(attribute.g)

    rename(edited.graph)
    makers = [i for i, found in enumerate(edited.graph.node) if name in found.output]
    add = node("Add", [name, "delta"], ["moved"], name="moving")
    edited.graph.node.insert(makers[0] + 1 if makers else 0, add)
    edited.graph.initializer.append(numpy_helper.from_array(delta, "delta"))
    return edited


def with_constants(proto, **arrays):
    edited = onnx.ModelProto()
    edited.CopyFrom(proto)
    for constant in edited.graph.initializer:
        if constant.name in arrays:
            constant.CopyFrom(numpy_helper.from_array(arrays[constant.name], constant.name))
    return edited


def sequences():
    """A value that is a list of tensors goes from one piece to the next."""
    nodes = [
        node("MatMul", ["x", "w1"], ["m"], name="first"),
        node("SplitToSequence", ["m"], ["parts"], name="split", axis=1),
        node("ConcatFromSequence", ["parts"], ["turned"], name="join", axis=0),
        node("MatMul", ["turned", "w2"], ["y"], name="second"),
    ]
    return model_of(nodes, [value("x", ["n", 8])], [value("y")], [tensor("w1", 8, 5), tensor("w2", 1, 4)])


def test_lists_of_tensors_pass_between_pieces():
    feeds = {"x": feeds_of("many")["x"]}
    graph = Graph(ir.from_proto(sequences()))
    executor = Executor(graph, find_structure(graph))
    got = executor.forward(feeds)
    assert got["parts"].data_type().startswith("seq(")
    assert_equal({"y": got["y"]}, run_off(sequences(), feeds))
    moved = executor.after_values(got, {"m": OrtValue.ortvalue_from_numpy(got["m"].numpy() * 2)})
    np.testing.assert_allclose(moved["y"].numpy(), 2 * got["y"].numpy(), rtol=TOLERANCE)


@every_model
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_piece_by_piece_equals_the_whole_model(name, seed):
    feeds = feeds_of(name, seed=seed)
    executor = open_model(MODELS[name](), feeds)
    values = executor.forward(feeds)
    got = {out: values[out] for out in executor.graph.output_names}
    assert_equal(got, run_off(MODELS[name](), feeds))


@every_model
def test_values_that_are_not_kept_are_dropped_on_the_way(name):
    feeds = feeds_of(name)
    executor = open_model(MODELS[name](), feeds)
    assert set(executor.forward(feeds, keep=lambda _: False)) == executor.graph.output_names
    assert len(executor.forward(feeds)) > len(executor.graph.output_names)


INNER = [
    *(("residual", inner) for inner in ("x", "r1", "c2", "r2", "p", "f")),
    *(("many", inner) for inner in ("x", "z", "k", "g")),
    *(("branching", inner) for inner in ("x", "m", "chosen", "looped")),
]


@pytest.mark.parametrize(("name", "inner"), INNER)
def test_a_changed_value_gives_the_outputs_of_the_model_with_that_change(name, inner):
    feeds = feeds_of(name)
    executor = open_model(MODELS[name](), feeds)
    base = executor.forward(feeds)
    array = base[inner].numpy().copy()
    delta = np.random.default_rng(3).standard_normal(array.shape).astype(np.float32)
    changed = {inner: OrtValue.ortvalue_from_numpy(array + delta)}
    wanted = run_off(moved(MODELS[name](), inner, delta), feeds)
    before = run_off(MODELS[name](), feeds)
    assert any(output_gap(wanted[out], before[out]) > 1e-3 for out in wanted)  # the change is seen at all
    assert_equal(executor.after_values(base, changed), wanted)


def test_a_change_leaves_the_base_values_alone():
    feeds = feeds_of("residual")
    executor = open_model(residual(), feeds)
    base = executor.forward(feeds)
    before = {name: found.numpy().copy() for name, found in base.items()}
    executor.after_values(base, {"r1": executor.round(base["r1"], Affine(np.float32(0.1), 0, "uint8"))})
    assert set(base) == set(before)
    for name, array in before.items():
        np.testing.assert_array_equal(base[name].numpy(), array)


@pytest.mark.parametrize(
    ("name", "layer", "weight", "bias"),
    [
        ("residual", "first", "w1", "b1"),
        ("residual", "second", "w2", "b2"),
        ("residual", "head", "w3", "b3"),
        ("many", "left", "w1", None),
        ("branching", "mul", "w1", None),
        ("branching", "last", "w3", None),
    ],
)
def test_other_weights_give_the_outputs_of_the_model_with_those_weights(name, layer, weight, bias):
    feeds = feeds_of(name)
    executor = open_model(MODELS[name](), feeds)
    base = executor.forward(feeds)
    draw = np.random.default_rng(4)
    arrays = {
        constant: executor.graph.constant(constant) + draw.standard_normal(executor.graph.constant(constant).shape)
        for constant in (weight, bias)
        if constant
    }
    arrays = {constant: array.astype(np.float32) for constant, array in arrays.items()}
    got = executor.after_weights(base, executor.structure.layer(layer), arrays[weight], arrays.get(bias))
    assert_equal(got, run_off(with_constants(MODELS[name](), **arrays), feeds))


@pytest.mark.parametrize(
    ("name", "layer", "weight", "bias"),
    [
        ("residual", "first", "w1", "b1"),
        ("residual", "second", "w2", "b2"),
        ("residual", "head", "w3", "b3"),
        ("many", "left", "w1", None),
        ("branching", "mul", "w1", None),
        ("branching", "last", "w3", None),
    ],
)
def test_weights_that_come_again_step_by_step_are_the_right_ones(name, layer, weight, bias):
    """Three weights in turn, more than are kept, and the same weights with another bias."""
    feeds = feeds_of(name)
    executor = open_model(MODELS[name](), feeds)
    for seed in (0, 1, 0, 2, 1):
        for other in range(2):
            constants = {c: executor.graph.constant(c).astype(np.float32) for c in (weight, bias) if c}
            constants[weight] = constants[weight] + np.float32(seed)
            if bias:
                constants[bias] = constants[bias] + np.float32(other)
            values = executor.feed_values(feeds)
            for index, found in enumerate(executor.steps):
                is_it = found is not None and found.name == layer
                executor.run_step(index, values, (constants[weight], constants.get(bias)) if is_it else None)
            assert_equal(values, run_off(with_constants(MODELS[name](), **constants), feeds))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
def test_rounding_is_the_formula_with_half_to_even(dtype):
    executor = open_model(residual(), feeds_of("residual"))
    limits = np.iinfo(dtype)
    zero_point = int(limits.min) + 10
    scale = np.float32(0.25)
    x = np.float32([-1e9, -0.375, -0.125, 0, 0.125, 0.375, 0.3, 1e9])
    got = executor.round(OrtValue.ortvalue_from_numpy(x), Affine(scale, zero_point, dtype)).numpy()
    steps = np.clip(np.rint(x / scale) + zero_point, limits.min, limits.max)
    np.testing.assert_array_equal(got, ((steps - zero_point) * scale).astype(np.float32))


def test_the_core_of_a_layer_is_its_main_node_without_bias_and_activation():
    executor = open_model(residual(), feeds_of("residual"))
    x = feeds_of("residual")["x"]
    weight = executor.graph.constant("w1") * np.float32(2)
    plain = model_of(
        [node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])],
        [value("x", ["n", 3, 6, 6])],
        [value("y")],
        [numpy_helper.from_array(weight, "w")],
    )
    got = executor.core_output(executor.structure.layer("first"), x, weight)
    assert output_gap(got, run_off(plain, {"x": x})["y"]) <= TOLERANCE


def test_stepwise_running_rounds_what_one_reader_reads_and_no_other():
    """r1 is read by second and add; only second sees it rounded."""
    feeds = feeds_of("residual")
    executor = open_model(residual(), feeds)
    coarse = Affine(np.float32(0.5), 0, "uint8")
    values = executor.feed_values(feeds)
    for index, layer in enumerate(executor.steps):
        reads = {"r1": coarse} if layer is not None and layer.name == "second" else {}
        executor.run_step(index, values, reads=reads)
    edited = residual()
    second = next(found for found in edited.graph.node if found.name == "second")
    second.input[0] = "d"
    at = list(edited.graph.node).index(second)
    edited.graph.node.insert(at, node("DequantizeLinear", ["q", "s", "zero"], ["d"], name="d"))
    edited.graph.node.insert(at, node("QuantizeLinear", ["r1", "s", "zero"], ["q"], name="q"))
    edited.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "s"))
    edited.graph.initializer.append(numpy_helper.from_array(np.uint8(0), "zero"))
    assert_equal(values, run_off(edited, feeds))


def test_the_bytes_of_a_sample_are_those_of_all_its_values():
    feeds = feeds_of("residual", count=1)
    executor = open_model(residual(), feeds)
    image, map_, vector = 3 * 36, 4 * 36, 4
    # x; behind relu, second and relu2 (c1 and a lie inside their layers); p and f; the five outputs
    assert executor.bytes_per_sample(feeds) == 4 * (image + 3 * map_ + 2 * vector + 5)


def test_a_layer_that_onnxruntime_refuses_is_named():
    graph = Graph(ir.from_proto(model_of(
        [node("Conv", ["x", "w1"], ["y"], name="wrong", kernel_shape=[5, 5])],
        [value("x", ["n", 3, 6, 6])],
        [value("y")],
        [tensor("w1", 4, 3, 3, 3)],
    )))  # fmt: skip
    for op in graph.nodes:
        op.op_type = "NoSuchOp"
    with pytest.raises(UnsupportedModel, match="wrong, which it refuses"):
        Executor(graph, find_structure(graph))
