"""Old and split files: external data come along, old IR versions and opsets are lifted whole."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantsieve.errors import InputError, UnsupportedModel
from quantsieve.model import load
from quantsieve.model.graph import Graph
from quantsieve.model.load import file_bytes, load_model
from quantsieve.model.prepare import output_gap, plain_session, prepare
from quantsieve.model.units import find_structure


def value(name, shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def array(name, *shape):
    values = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
    return numpy_helper.from_array(values, name)


def build(nodes, inputs, constants, opset, ir_version):
    graph = helper.make_graph(nodes, "g", inputs, [value("y", None)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


@pytest.fixture
def split_file(tmp_path):
    model = build(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="mul")],
        [value("x", ["b", 32])],
        [array("w", 32, 32)],
        17,
        8,
    )
    path = tmp_path / "folder" / "m.onnx"
    path.parent.mkdir()
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    return path


def test_a_model_with_external_data_is_prepared_from_any_folder(split_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    feed = {"x": np.ones((1, 32), np.float32)}
    wanted = plain_session(split_file).run(None, feed)[0]
    prepared, _ = prepare(load_model(split_file), [feed], file_bytes(split_file))
    assert np.array_equal(plain_session(prepared).run(None, feed)[0], wanted)


def test_external_data_that_are_cut_off_are_refused(split_file):
    data = split_file.with_name("m.data")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(InputError, match=r"m\.onnx"):
        load_model(split_file)


def test_a_model_beyond_a_protobuf_message_is_refused_before_it_is_read(split_file, monkeypatch):
    monkeypatch.setattr(load, "MAX_BYTES", 4095)
    with pytest.raises(UnsupportedModel, match="2 GiB"):
        load_model(split_file)


@pytest.mark.parametrize("opset", [7, 11])
def test_weights_that_are_inputs_become_constants_and_the_opset_is_lifted(opset):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("BatchNormalization", ["c", "s", "t", "m", "v"], ["n"], name="norm"),
        helper.make_node("Relu", ["n"], ["y"], name="relu"),
    ]
    one = numpy_helper.from_array(np.ones(4, np.float32), "v")
    constants = [array("w", 4, 3, 3, 3), array("s", 4), array("t", 4), array("m", 4), one]
    listed = [value(t.name, list(t.dims)) for t in constants]
    model = build(nodes, [value("x", [1, 3, 8, 8]), *listed], constants, opset, 3)
    feed = {"x": np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32)}
    given = load.ir.from_proto(model)
    wanted = plain_session(given).run(None, feed)[0]
    prepared, facts = prepare(given, [feed], 0)
    assert (facts.opset, facts.notes) == (13, ())
    (layer,) = find_structure(Graph(prepared)).layers
    assert layer.op_type == "Conv"
    assert layer.is_quantizable
    assert output_gap(plain_session(prepared).run(None, feed)[0], wanted) <= 1e-5


def test_limits_that_the_converter_writes_as_constant_nodes_join_their_layer():
    """In opset 10 the limits of Clip are attributes; one whose limits are no constants would stay alone."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Clip", ["c"], ["y"], name="clip", min=0.0, max=6.0),
    ]
    model = build(nodes, [value("x", [1, 3, 8, 8])], [array("w", 4, 3, 3, 3)], 10, 5)
    prepared, _ = prepare(load.ir.from_proto(model), (), 0)
    assert "Constant" not in [node.op_type for node in prepared.graph]
    (layer,) = find_structure(Graph(prepared)).layers
    assert layer.nodes == ("conv", "clip")
