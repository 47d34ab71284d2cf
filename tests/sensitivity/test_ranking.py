"""Ranking: scores are sums of sources, ties are paired, and the nodes are those of the user's own file."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import onnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import helper, numpy_helper

import small_network
from quantsieve.model.graph import Graph
from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare
from quantsieve.model.units import find_structure
from quantsieve.plan import Rounded
from quantsieve.sensitivity.origin import original_nodes
from quantsieve.sensitivity.places import Place
from quantsieve.sensitivity.ranking import Choice, is_tie, rank
from quantsieve.sensitivity.suffix import Prices, Source

SOURCES = (
    Source("weight", "a", "int8"), Source("weight", "a", "int8-channel"), Source("weight", "b", "int8"),
    Source("tensor", "t", "uint8"), Source("tensor", "u", "uint8"), Source("tensor", "t", "uint16"),
)  # fmt: skip
ERRORS = arrays.arrays(np.float64, (len(SOURCES), 6), elements=st.floats(0, 10))


T, U = (Rounded("t", "uint8"),), (Rounded("u", "uint8"),)


def layer(name):
    return SimpleNamespace(name=name, op_type="Conv", num_params=3, weight_bytes=12, macs=9)


def choices():
    return [
        Choice(
            layer("a"),
            ("int8", "int8-channel"),
            {"int8": T, "int8-channel": T},
            ("n1", "n2"),
            Place("stage", "block", "half"),
        ),
        Choice(layer("b"), ("int8",), {"int8": (*T, *U)}, ("n3",), Place()),
        Choice(layer("add"), ("int8",), {"int8": U}, (), Place()),
    ]


def ranked(errors):
    """mean vectors whose squared length is half the mean error: half of each price is common."""
    vectors = np.sqrt(errors.mean(axis=1, keepdims=True) / 2).astype(np.float32)
    prices = Prices(SOURCES, errors, vectors)
    return prices, rank(choices(), prices)


@given(ERRORS)
def test_a_score_is_the_sum_of_its_parts_and_the_order_is_worst_first(errors):
    _prices, rows = ranked(errors)
    mean = dict(zip([(s.owner, s.form) for s in SOURCES], errors.mean(axis=1), strict=True))
    wanted = {
        ("a", "int8"): mean["a", "int8"] + mean["t", "uint8"],
        ("a", "int8-channel"): mean["a", "int8-channel"] + mean["t", "uint8"],
        ("b", "int8"): mean["b", "int8"] + mean["t", "uint8"] + mean["u", "uint8"],
        ("add", "int8"): mean["u", "uint8"],
    }
    found = {(row.layer, row.scheme): row for row in rows}
    assert set(found) == set(wanted)
    for key, row in found.items():
        # Two orders of at most 18 float64 additions differ by less than 18 eps of the sum.
        np.testing.assert_allclose(row.value, wanted[key], rtol=1e-14, atol=1e-300)
        np.testing.assert_allclose(row.weights + sum(row.tensors.values()), row.value, rtol=1e-14, atol=1e-300)
        assert 0 <= row.weights_corrected <= row.weights
        assert 0 <= row.low <= row.value <= row.high
    assert [row.value for row in rows] == sorted((row.value for row in rows), reverse=True)
    assert all(row.keep_float is False for row in rows)


def test_what_all_samples_share_is_taken_out_of_the_corrected_part():
    errors = np.full((len(SOURCES), 6), 1.0)
    prices, rows = ranked(errors)
    row = next(row for row in rows if row.layer == "b")
    assert row.weights == 1.0
    np.testing.assert_allclose(row.weights_corrected, prices.corrected()[2], rtol=1e-12)
    assert 0 < row.weights_corrected < 1


def test_a_tie_is_of_the_paired_difference_not_of_the_intervals():
    """Samples differ far more than layers do: both intervals overlap, the difference is certain."""
    hard = np.array([0.1, 1.0, 5.0, 20.0, 80.0, 300.0])
    assert not is_tie(hard + 0.5, hard)
    noise = np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    assert is_tie(hard + 0.1 + noise, hard)


@given(ERRORS)
def test_a_row_ties_with_its_next_by_the_samples_of_both(errors):
    _, rows = ranked(errors)
    index = {(s.kind, s.owner, s.form): i for i, s in enumerate(SOURCES)}

    def sums(row):
        found = [index["tensor", root, "uint8"] for root in row.tensors]
        if row.layer != "add":
            found.append(index["weight", row.layer, row.scheme])
        return errors[found].sum(axis=0)

    for row, after in pairwise(rows):
        assert row.tie == is_tie(sums(row), sums(after))
    assert rows[-1].tie is None


@given(arrays.arrays(np.float64, 5, elements=st.floats(0, 10)))
def test_a_layer_ties_with_itself_and_one_sample_ties_all(values):
    assert is_tie(values, values)
    assert is_tie(values[:1], values[:1] + 1)


# --- nodes of the user's own file ------------------------------------------------------------


def with_batchnorm(path):
    """Conv, BatchNorm, Relu, where the weight comes from a Constant and a Transpose, and a MatMul with its bias Add."""
    draw = np.random.default_rng(0)
    weight = draw.normal(size=(3, 4, 3, 3)).astype(np.float32)
    constants = {name: np.abs(draw.normal(size=4)).astype(np.float32) for name in ("scale", "shift", "mean", "var")}
    constants |= {"m": draw.normal(size=(4, 4)).astype(np.float32), "b": draw.normal(size=4).astype(np.float32)}
    nodes = [
        helper.make_node("Constant", [], ["w0"], "constant", value=numpy_helper.from_array(weight)),
        helper.make_node("Transpose", ["w0"], ["w"], "turned", perm=[1, 0, 2, 3]),
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"], "norm"),
        helper.make_node("Relu", ["n"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "m"], ["q"], "dense"),
        helper.make_node("Add", ["q", "b"], ["logits"], "bias"),
    ]
    return small_network.save_model(path, nodes, constants)


def origins(path):
    original = load_model(path)
    prepared, facts = prepare(original, (), 0)
    graph = Graph(prepared)
    structure = find_structure(graph)
    return original_nodes(Graph(original), graph, structure.quantizable, dict(facts.given_names))


def test_the_nodes_of_a_layer_are_those_of_the_users_file(tmp_path):
    path = with_batchnorm(tmp_path / "m.onnx")
    found = set(origins(path).values())
    assert found == {("conv", "norm", "relu"), ("pool",), ("dense", "bias")}


def test_nodes_without_a_name_are_left_out(tmp_path):
    path = with_batchnorm(tmp_path / "m.onnx")
    model = onnx.load(path)
    for node in model.graph.node:
        if node.name in ("norm", "pool"):
            node.name = ""
    onnx.save(model, path)
    assert set(origins(path).values()) == {("conv", "relu"), (), ("dense", "bias")}


def test_the_layers_of_a_function_that_was_inlined_are_its_calls(tmp_path):
    """Swish as a function of the model: no value between its Sigmoid and its Mul is in the user's graph."""
    path = with_batchnorm(tmp_path / "m.onnx")
    model = onnx.load(path)
    nodes = [helper.make_node("Sigmoid", ["a"], ["s"], "s"), helper.make_node("Mul", ["a", "s"], ["b"], "m")]
    model.functions.append(helper.make_function("own", "Swish", ["a"], ["b"], nodes, [helper.make_opsetid("", 17)]))
    model.opset_import.append(helper.make_opsetid("own", 1))
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    relu.op_type, relu.domain, relu.name = "Swish", "own", "swish"
    onnx.save(model, path)
    assert list(origins(path).values()) == [("conv", "norm"), ("swish",), ("swish",), ("pool",), ("dense", "bias")]
