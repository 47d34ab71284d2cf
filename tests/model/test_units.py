"""Layers: what is decided together, what stays float and why, and that no node is forgotten."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantsieve.model.graph import Graph
from quantsieve.model.units import find_structure, layout_root, unreached

node = helper.make_node
IMAGE = ["n", 4, 8, 8]


def value(name, shape=None, elem=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, elem, shape)


def tensor(name, *shape):
    return numpy_helper.from_array(np.random.default_rng(0).standard_normal(shape).astype(np.float32), name)


def scalar(name, number):
    return numpy_helper.from_array(np.float32(number), name)


def graph_of(nodes, constants=(), inputs=None, outputs=("y",), domains=()):
    """The graph with shapes and types inferred, as prepare leaves it."""
    proto = helper.make_graph(
        nodes, "g", inputs or [value("x", IMAGE)], [value(name) for name in outputs], list(constants)
    )
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(domain, 1) for domain in domains)]
    model = helper.make_model(proto, opset_imports=opsets, ir_version=8)
    return Graph(ir.from_proto(onnx.shape_inference.infer_shapes(model)))


CONV_WEIGHT = tensor("w", 4, 4, 3, 3)


def conv(read="x", made="c", name="conv", **options):
    return node("Conv", [read, "w"], [made], name=name, pads=[1, 1, 1, 1], **options)


def layers_of(graph):
    structure = find_structure(graph)
    assert unreached(graph, structure) == ()
    return {layer.name: layer for layer in structure.layers}


def clip(low, high):
    limits = ["low" if low is not None else "", "high" if high is not None else ""]
    constants = [scalar(n, v) for n, v in (("low", low), ("high", high)) if v is not None]
    return node("Clip", ["c", *limits], ["y"], name="clip"), constants


def test_a_convolution_and_its_relu_are_one_layer():
    graph = graph_of([conv(), node("Relu", ["c"], ["y"], name="relu")], [CONV_WEIGHT])
    (layer,) = layers_of(graph).values()
    assert layer.nodes == ("conv", "relu")
    assert (layer.inputs, layer.output, layer.weight, layer.bias) == (("x",), "y", "w", None)


@pytest.mark.parametrize("high", [6.0, None])
def test_a_convolution_and_a_clip_from_zero_are_one_layer(high):
    clipped, limits = clip(0.0, high)
    assert layers_of(graph_of([conv(), clipped], [CONV_WEIGHT, *limits]))["conv"].nodes == ("conv", "clip")


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (None, 6.0), (0.5, 6.0)])
def test_a_clip_with_another_lower_bound_does_not_fuse(low, high):
    clipped, limits = clip(low, high)
    layers = layers_of(graph_of([conv(), clipped], [CONV_WEIGHT, *limits]))
    assert layers["conv"].nodes == ("conv",)
    assert layers["clip"].refusal == "no int8 scheme for Clip"


def test_a_clip_with_a_computed_bound_does_not_fuse():
    nodes = [conv(), node("Clip", ["c", "low", "limit"], ["y"], name="clip")]
    inputs = [value("x", IMAGE), value("limit", [])]
    assert layers_of(graph_of(nodes, [CONV_WEIGHT, scalar("low", 0)], inputs))["conv"].nodes == ("conv",)


def test_an_activation_whose_input_is_read_elsewhere_stays_outside():
    nodes = [conv(), node("Relu", ["c"], ["r"], name="relu"), node("Add", ["c", "r"], ["y"], name="add")]
    layers = layers_of(graph_of(nodes, [CONV_WEIGHT]))
    assert layers["conv"].nodes == ("conv",)
    assert not layers["relu"].is_quantizable


def test_an_activation_whose_input_is_an_output_of_the_graph_stays_outside():
    graph = graph_of([conv(), node("Relu", ["c"], ["y"], name="relu")], [CONV_WEIGHT], outputs=("c", "y"))
    assert layers_of(graph)["conv"].nodes == ("conv",)


@pytest.mark.parametrize("order", [("m", "b"), ("b", "m")])
def test_a_product_of_matrices_takes_its_bias_and_activation_along(order):
    nodes = [
        node("MatMul", ["x", "w"], ["m"], name="mul"),
        node("Add", list(order), ["a"], name="add"),
        node("Relu", ["a"], ["y"], name="relu"),
    ]
    graph = graph_of(nodes, [tensor("w", 8, 5), tensor("b", 5)], [value("x", ["n", 8])])
    (layer,) = layers_of(graph).values()
    assert layer.nodes == ("mul", "add", "relu")
    assert layer.output == "y"


def test_an_add_of_a_matrix_is_no_bias():
    nodes = [node("MatMul", ["x", "w"], ["m"], name="mul"), node("Add", ["m", "b"], ["y"], name="add")]
    graph = graph_of(nodes, [tensor("w", 8, 5), tensor("b", 2, 5)], [value("x", [2, 8])])
    assert layers_of(graph)["mul"].nodes == ("mul",)


def test_an_add_of_two_activations_takes_its_relu_along():
    nodes = [conv(), node("Add", ["c", "x"], ["a"], name="add"), node("Relu", ["a"], ["y"], name="relu")]
    layer = layers_of(graph_of(nodes, [CONV_WEIGHT]))["add"]
    assert layer.nodes == ("add", "relu")
    assert layer.inputs == ("c", "x")
    assert layer.weight is None


def test_an_add_of_one_activation_to_itself_reads_it_once():
    (layer,) = layers_of(graph_of([node("Add", ["x", "x"], ["y"], name="add")])).values()
    assert layer.inputs == ("x",)


def layout_graph():
    nodes = [
        conv(),
        node("MaxPool", ["c"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Transpose", ["p"], ["t"], name="turn", perm=[0, 2, 3, 1]),
        node("Flatten", ["t"], ["f"], name="flat"),
        node("Gemm", ["f", "g", "h"], ["y"], name="gemm"),
    ]
    return graph_of(nodes, [CONV_WEIGHT, tensor("g", 64, 5), tensor("h", 5)])


def test_layout_ops_are_no_layers_but_pass_a_tensor_on():
    graph = layout_graph()
    structure = find_structure(graph)
    assert [layer.name for layer in structure.layers] == ["conv", "gemm"]
    assert layout_root(graph, "f") == "c"
    tensors = {tensor.root: tensor for tensor in structure.tensors}
    assert set(tensors) == {"x", "c", "y"}
    assert tensors["c"].members == ("c", "p", "t", "f")
    assert (tensors["c"].producer, tensors["c"].readers) == ("conv", ("gemm",))
    assert (tensors["x"].producer, tensors["y"].readers) == (None, ())


def test_a_max_pool_whose_indices_are_read_is_no_layout_op():
    nodes = [
        node("MaxPool", ["x"], ["p", "i"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("MaxUnpool", ["p", "i"], ["y"], name="unpool", kernel_shape=[2, 2], strides=[2, 2]),
    ]
    graph = graph_of(nodes)
    assert layout_root(graph, "p") == "p"
    assert set(layers_of(graph)) == {"pool", "unpool"}


def test_only_products_of_matrices_without_an_activation_may_leave_their_output_unrounded():
    assert {n: layer.rounds_output for n, layer in layers_of(layout_graph()).items()} == {
        "conv": True,
        "gemm": False,
    }
    with_relu = [node("MatMul", ["x", "w"], ["m"], name="mul"), node("Relu", ["m"], ["y"], name="relu")]
    graph = graph_of(with_relu, [tensor("w", 8, 5)], [value("x", ["n", 8])])
    assert layers_of(graph)["mul"].rounds_output


def branch(name, op_type):
    return helper.make_graph([node(op_type, ["x"], [f"{name}_y"], name=f"{name}_op")], name, [], [value(f"{name}_y")])


def one(op_type, *reads, constants=(), inputs=None, domains=(), outs=1, **attributes):
    made = ["y", *(f"y{i}" for i in range(1, outs))]
    only = node(op_type, list(reads), made, name="op", **attributes)
    return graph_of([only], constants, inputs, tuple(made), domains)


MATRIX = [value("x", ["n", 4])]
NAN = numpy_helper.from_array(np.full((4, 5), np.nan, np.float32), "w")
HALF = numpy_helper.from_array(np.ones((4, 5), np.float16), "w")
REFUSED = {
    "foreign domain": (
        lambda: one("Gelu", "x", domains=["com.microsoft"], domain="com.microsoft"),
        "operator com.microsoft.Gelu is outside the standard domain",
    ),
    "subgraph": (
        lambda: one(
            "If",
            "flag",
            inputs=[value("flag", [], TensorProto.BOOL), value("x", IMAGE)],
            then_branch=branch("then", "Relu"),
            else_branch=branch("other", "Neg"),
        ),
        "If holds a subgraph and is one unit",
    ),
    "no scheme": (lambda: one("Tanh", "x"), "no int8 scheme for Tanh"),
    "not float32": (
        lambda: one(
            "MatMul", "x", "w", constants=[HALF], inputs=[value("x", ["n", 4], TensorProto.FLOAT16)]
        ),
        "x is float16, not float32",
    ),
    "constant operand": (
        lambda: one("Add", "x", "w", constants=[tensor("w", 8)]),
        "Add with a constant operand",
    ),
    "concat of one": (lambda: one("Concat", "x", axis=1), "Concat of one input"),
    "left constant": (
        lambda: one("MatMul", "w", "x", constants=[tensor("w", 3, 4)], inputs=[value("x", [4, 2])]),
        "the constant is the left operand",
    ),
    "computed weight": (
        lambda: one("Gemm", "x", "z", inputs=[*MATRIX, value("z", [4, 5])]),
        "its weight is computed, not constant",
    ),
    "empty weight": (
        lambda: one("MatMul", "x", "w", constants=[tensor("w", 4, 0)], inputs=MATRIX),
        "its weight is empty",
    ),
    "weight of NaN": (
        lambda: one("MatMul", "x", "w", constants=[NAN], inputs=MATRIX),
        "its weight w holds NaN or infinity",
    ),
    "weight of rank 3": (
        lambda: one("MatMul", "x", "w", constants=[tensor("w", 2, 4, 5)], inputs=MATRIX),
        "its weight has 3 dimensions, not 2",
    ),
    "computed bias": (
        lambda: one(
            "Gemm", "x", "w", "z", constants=[tensor("w", 4, 5)], inputs=[*MATRIX, value("z", [5])]
        ),
        "its bias is computed, not constant",
    ),
    "bias of NaN": (
        lambda: one(
            "Gemm",
            "x",
            "w",
            "b",
            constants=[tensor("w", 4, 5), numpy_helper.from_array(np.full(5, np.inf, np.float32), "b")],
            inputs=MATRIX,
        ),
        "its bias b holds NaN or infinity",
    ),
    "bias of another shape": (
        lambda: one("Gemm", "x", "w", "b", constants=[tensor("w", 4, 5), tensor("b", 1)], inputs=MATRIX),
        "its bias has the shape [1], not one value a column",
    ),
    "alpha": (
        lambda: one("Gemm", "x", "w", constants=[tensor("w", 4, 5)], inputs=MATRIX, alpha=0.5),
        "Gemm with alpha = 0.5",
    ),
    "transA": (
        lambda: one("Gemm", "x", "w", constants=[tensor("w", 4, 5)], inputs=[value("x", [4, 3])], transA=1),
        "Gemm with transA = 1",
    ),
    "groups": (
        lambda: one("ConvTranspose", "x", "w", constants=[tensor("w", 4, 2, 3, 3)], group=2),
        "ConvTranspose with groups",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_carries_its_reason_and_the_node_still_is_a_layer(case):
    make, reason = REFUSED[case]
    graph = make()
    layer = layers_of(graph)["op"]
    assert layer.refusal == reason
    assert layer.inputs == ()
    assert find_structure(graph).tensors == ()


def test_a_value_of_unknown_type_is_refused_as_such():
    graph = one("Sigmoid", "z", inputs=[value("z", IMAGE)])
    graph.model.graph.inputs[0].type = None
    assert layers_of(graph)["op"].refusal == "z is unknown type, not float32"


def test_a_product_of_two_activations_is_a_layer_without_weights():
    graph = one("MatMul", "x", "z", inputs=[*MATRIX, value("z", [4, 5])])
    layer = layers_of(graph)["op"]
    assert layer.is_quantizable
    assert (layer.weight, layer.inputs) == (None, ("x", "z"))


@pytest.mark.parametrize(
    ("op_type", "shape", "attributes", "axis"),
    [
        ("Conv", (5, 4, 3, 3), {}, 0),
        ("ConvTranspose", (4, 5, 3, 3), {}, 1),
        ("Gemm", (8, 5), {}, 1),
        ("Gemm", (5, 8), {"transB": 1}, 0),
        ("MatMul", (8, 5), {}, 1),
    ],
)
def test_the_channel_axis_is_that_of_the_outputs(op_type, shape, attributes, axis):
    inputs = [value("x", ["n", 8])] if len(shape) == 2 else None
    layer = layers_of(one(op_type, "x", "w", constants=[tensor("w", *shape)], inputs=inputs, **attributes))["op"]
    assert layer.channel_axis == axis
    assert layer.weight_shape[axis] == 5


def test_every_node_of_a_mixed_model_has_an_owner():
    nodes = [
        conv(),
        node("Softmax", ["c"], ["s"], name="soft", axis=1),
        node("Shape", ["s"], ["shape"], name="shape"),
        node("Reshape", ["s", "shape"], ["r"], name="reshape"),
        node("If", ["flag"], ["i"], name="if", then_branch=branch("a", "Relu"), else_branch=branch("b", "Neg")),
        node("Mul", ["r", "i"], ["y"], name="mul"),
    ]
    graph = graph_of(nodes, [CONV_WEIGHT], [value("x", IMAGE), value("flag", [], TensorProto.BOOL)])
    layers = layers_of(graph)  # checks that none is unreached
    assert set(layers) == {"conv", "soft", "shape", "if", "mul"}
    assert all(layer.refusal for name, layer in layers.items() if name not in ("conv", "mul"))


def test_a_forgotten_node_is_seen():
    graph = layout_graph()
    structure = find_structure(graph)
    assert unreached(graph, type(structure)(structure.layers[:1], structure.tensors)) == ("gemm",)
