"""A prepared model computes what the given one computes, and a step that would change that is undone."""

import re

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantsieve.errors import InputError, UnsupportedModel
from quantsieve.model import prepare as prepare_module
from quantsieve.model.prepare import RELATIVE_TOLERANCE, output_gap, plain_session, prepare

node = helper.make_node


def value(name, shape=None, elem=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, elem, shape)


def tensor(name, *shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return numpy_helper.from_array(values, name)


def positive(name, *shape):
    return numpy_helper.from_array(np.random.default_rng(7).uniform(0.5, 2, shape).astype(np.float32), name)


ONE_OUTPUT = {"y": TensorProto.FLOAT}


def build(nodes, constants=(), opset=17, inputs=None, functions=(), domains=(), outputs=ONE_OUTPUT):
    graph = helper.make_graph(
        nodes,
        "given",
        inputs or [value("x", ["n", 3, 8, 8])],
        [value(name, elem=elem) for name, elem in outputs.items()],
        list(constants),
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))


def constant_nodes():
    return build(
        [
            node("Constant", [], ["w"], value=tensor("w", 4, 3, 3, 3)),
            node("Conv", ["x", "w"], ["c"], name="conv"),
            node("Constant", [], ["six"], value_float=6.0),
            node("Mul", ["c", "six"], ["y"], name="mul"),
        ]
    )


def batch_norm(epsilon=1e-5):
    return build(
        [
            node("Conv", ["x", "w", "b"], ["c"], name="conv"),
            node("BatchNormalization", ["c", "s", "t", "m", "v"], ["n"], name="norm", epsilon=epsilon),
            node("Relu", ["n"], ["y"], name="relu"),
        ],
        [tensor("w", 4, 3, 3, 3), tensor("b", 4), tensor("s", 4), tensor("t", 4), tensor("m", 4), positive("v", 4)],
    )


def old_opset():
    return build(
        [
            node("Conv", ["x", "w"], ["c"], name="conv"),
            node("Unsqueeze", ["c"], ["u"], name="up", axes=[0]),
            node("Squeeze", ["u"], ["s"], name="down", axes=[0]),
            node("ReduceSum", ["s"], ["y"], name="sum", axes=[2, 3], keepdims=0),
        ],
        [tensor("w", 4, 3, 3, 3)],
        opset=11,
    )


def local_function():
    inner = [node("Conv", ["a", "k"], ["z"], name="inside"), node("Relu", ["z"], ["o"])]
    function = helper.make_function("own", "Block", ["a", "k"], ["o"], inner, [helper.make_opsetid("", 17)])
    return build(
        [node("Block", ["x", "w"], ["y"], name="block", domain="own")],
        [tensor("w", 4, 3, 3, 3)],
        functions=[function],
        domains=["own"],
    )


def odd_names():
    return build(
        [
            node("Relu", ["x"], ["a"]),
            node("Relu", ["a"], ["b"], name="same"),
            node("Neg", ["b"], ["c"], name="same"),
            node("Abs", ["c"], ["y"], name="same"),
        ]
    )


def listed_weights():
    return build(
        [node("Conv", ["x", "w"], ["y"], name="conv")],
        [tensor("w", 4, 3, 3, 3)],
        inputs=[value("x", ["n", 3, 8, 8]), value("w", [4, 3, 3, 3])],
    )


def unused_branch():
    return build([node("Relu", ["x"], ["y"], name="used"), node("Neg", ["x"], ["z"], name="unused")])


def two_outputs():
    return build(
        [node("Conv", ["x", "w"], ["first"], name="conv"), node("Shape", ["first"], ["second"], name="shape")],
        [tensor("w", 4, 3, 3, 3)],
        outputs={"first": TensorProto.FLOAT, "second": TensorProto.INT64},
    )


GIVEN = {
    make.__name__: make
    for make in (
        constant_nodes,
        batch_norm,
        old_opset,
        local_function,
        odd_names,
        listed_weights,
        unused_branch,
        two_outputs,
    )
}


def samples(count=3):
    draw = np.random.default_rng(5)
    return [{"x": draw.standard_normal((1 + i, 3, 8, 8)).astype(np.float32)} for i in range(count)]


def prepared(proto, feeds=None):
    return prepare(ir.from_proto(proto), samples() if feeds is None else feeds, 0)


def outputs(proto, feeds):
    """Of the model itself; its nodes lose their names, since onnxruntime refuses two nodes of one name."""
    for found in proto.graph.node:
        found.ClearField("name")
    session = plain_session(ir.from_proto(proto))
    return [session.run(None, feed) for feed in feeds]


@pytest.mark.parametrize("name", GIVEN)
def test_the_prepared_model_gives_the_outputs_of_the_given_one(name):
    """On samples that prepare never saw, and in the order and under the names of the given model."""
    given = GIVEN[name]()
    model, facts = prepared(given)
    assert facts.notes == ()
    fresh = [{"x": np.random.default_rng(99).standard_normal((2, 3, 8, 8)).astype(np.float32)}]
    session = plain_session(model)
    assert [out.name for out in session.get_outputs()] == [out.name for out in given.graph.output]
    for got, wanted in zip(session.run(None, fresh[0]), outputs(given, fresh)[0], strict=True):
        assert output_gap(got, wanted) <= RELATIVE_TOLERANCE


@pytest.mark.parametrize("name", GIVEN)
def test_the_given_model_is_not_changed(name):
    given = GIVEN[name]()
    model = ir.from_proto(given)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    prepare(model, samples(), 0)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def op_types(model):
    return [found.op_type for found in model.graph]


def test_weights_in_constant_nodes_become_initializers():
    model, facts = prepared(constant_nodes())
    assert op_types(model) == ["Conv", "Mul"]
    assert "w" in model.graph.initializers
    assert "lifting constants to initializers" in facts.steps


def test_batch_normalization_behind_a_convolution_is_folded_into_it():
    model, facts = prepared(batch_norm())
    assert op_types(model) == ["Conv", "Relu"]
    assert "folding BatchNormalization" in facts.steps


def test_an_old_opset_is_lifted_to_what_the_schemes_need():
    model, facts = prepared(old_opset())
    assert (facts.original_opset, facts.opset) == (11, 13)
    assert model.opset_imports[""] == 13


def test_a_new_opset_stays_as_it_is():
    _, facts = prepared(batch_norm())
    assert (facts.original_opset, facts.opset) == (17, 17)


def test_a_local_function_is_inlined():
    model, _ = prepared(local_function())
    assert op_types(model) == ["Conv", "Relu"]


def test_every_node_has_a_name_of_its_own_and_changed_names_lead_back():
    model, facts = prepared(odd_names())
    assert [found.name for found in model.graph] == ["a", "same", "same#2", "same#3"]
    assert facts.given_names == (("same#2", "same"), ("same#3", "same"))


def test_a_weight_listed_among_the_inputs_is_no_input_any_more():
    model, _ = prepared(listed_weights())
    assert [found.name for found in model.graph.inputs] == ["x"]


def test_nodes_that_no_output_needs_are_removed():
    model, _ = prepared(unused_branch())
    assert op_types(model) == ["Relu"]


def test_metadata_and_the_ranks_of_outputs_survive():
    given = batch_norm()
    helper.set_model_props(given, {"author": "nobody"})
    given.producer_name = "a trainer"
    model, _ = prepared(given)
    assert model.metadata_props == {"author": "nobody"}
    assert model.producer_name == "a trainer"
    assert len(plain_session(model).get_outputs()[0].shape) == 4


def double_weights(model):
    """A broken step: its model runs and computes something else."""
    weight = model.graph.initializers["w"]
    weight.const_value = ir.tensor(weight.const_value.numpy() * 2, name="w")
    return True


def lose_a_node(model):
    """A broken step: its model does not run."""
    relu = next(found for found in model.graph if found.op_type == "Relu")
    relu.replace_input_with(0, ir.Value(name="nowhere"))
    return True


def raise_an_error(model):
    model.graph.initializers["w"].const_value = None
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (double_weights, r"broken was left out: an output moved by \d\.\de[+-]\d+ of its range"),
        (lose_a_node, "broken was left out: the model no longer runs"),
        (raise_an_error, "broken was left out: it failed with RuntimeError: no such luck"),
    ],
)
def test_a_broken_step_is_undone_and_leaves_a_note(monkeypatch, step, reason):
    steps = (("broken", step), *prepare_module._STEPS)
    monkeypatch.setattr(prepare_module, "_STEPS", steps)
    given, feeds = batch_norm(), samples()
    model, facts = prepared(given, feeds)
    (note,) = facts.notes
    assert re.search(reason, note)
    assert "broken" not in facts.steps
    assert op_types(model) == ["Conv", "Relu"]  # the steps behind it were taken all the same
    for got, wanted in zip(plain_session(model).run(None, feeds[0]), outputs(given, feeds)[0], strict=True):
        assert output_gap(got, wanted) <= RELATIVE_TOLERANCE


@pytest.mark.parametrize("op_type", ["Log", "Reciprocal"])
def test_outputs_that_are_not_finite_are_an_input_error_naming_output_and_sample(op_type):
    given = build([node(op_type, ["x"], ["y"], name="op")])
    feeds = [{"x": np.full((1, 3, 8, 8), fill, np.float32)} for fill in (1, 0)]
    with pytest.raises(InputError, match="output y on sample 1"):
        prepared(given, feeds)


def test_a_model_that_cannot_run_is_unsupported():
    given = build([node("MatMul", ["x", "w"], ["y"], name="mul")], [tensor("w", 5, 5)])
    with pytest.raises(UnsupportedModel, match="fails before any quantization"):
        prepared(given)


@pytest.mark.parametrize(
    ("got", "wanted", "gap"),
    [
        (np.float32([0, 1, 4.5]), np.float32([0, 1, 4]), 0.125),
        (np.float32([3, 3.3]), np.float32([3, 3]), 0.1),
        (np.float32([0, np.nan]), np.float32([0, 1]), np.inf),
        (np.float32([0, 1]), np.float32([[0, 1]]), np.inf),
        (np.float64([0, 1]), np.float32([0, 1]), np.inf),
        (np.int64([2, 1]), np.int64([2, 1]), 0.0),
        (np.int64([2, 1]), np.int64([2, 2]), np.inf),
        ([np.float32([1])], np.float32([1]), np.inf),
    ],
)
def test_the_gap_of_two_outputs_is_relative_to_the_range(got, wanted, gap):
    assert output_gap(got, wanted) == pytest.approx(gap, rel=1e-6)
