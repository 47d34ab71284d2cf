"""`inspect`: facts of a model file, exact on models small enough to count by hand."""

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantsieve.errors import InputError
from quantsieve.inspection import inspect

ZOO = Path(__file__).resolve().parents[2] / "shared" / "zoo"


def value(name, shape, elem=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, elem, shape)


def weights(**shapes):
    generator = np.random.default_rng(0)
    return [
        numpy_helper.from_array(generator.standard_normal(shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]


def save(path, nodes, inputs, outputs, constants=(), opset=17, domains=(), **options):
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(constants))
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="tests")
    onnx.save(model, path, **options)
    return path


@pytest.fixture
def cnn(tmp_path):
    """conv+relu, softmax, pool, flatten, gemm on [batch, 3, 8, 8]."""
    node = helper.make_node
    return save(
        tmp_path / "cnn.onnx",
        [
            node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
            node("Relu", ["c"], ["r"], name="relu"),
            node("Softmax", ["r"], ["s"], name="soft", axis=1),
            node("GlobalAveragePool", ["s"], ["p"], name="pool"),
            node("Flatten", ["p"], ["f"], name="flat"),
            node("Gemm", ["f", "v", "u"], ["y"], name="head", transB=1),
        ],
        [value("x", ["batch", 3, 8, 8])],
        [value("y", ["batch", 5])],
        weights(w=(4, 3, 3, 3), b=(4,), v=(5, 4), u=(5,)),
    )


def test_each_layer_has_its_parameters_bytes_shape_and_multiply_adds(cnn):
    conv, soft, pool, head = inspect(cnn).layers
    assert (conv.name, conv.op_type) == ("conv", "Conv")
    assert (conv.num_params, conv.weight_bytes) == (4 * 27 + 4, 4 * (4 * 27 + 4))
    assert conv.output_shape == (None, 4, 8, 8)
    assert conv.macs == 4 * 27 * 64
    assert (head.num_params, head.macs) == (25, 20)
    assert (soft.num_params, soft.macs, pool.macs) == (0, None, None)


def test_each_layer_says_which_schemes_it_can_have_or_why_none(cnn):
    conv, soft, pool, _ = inspect(cnn).layers
    assert conv.schemes == ("a16w8", "int8", "int8-channel", "w8")
    assert pool.schemes == ("a16w8", "int8")
    assert soft.schemes == ()
    assert "Softmax" in soft.refusal
    assert conv.refusal is None


def test_operators_are_counted_in_the_users_own_file(cnn):
    assert dict(inspect(cnn).op_counts) == dict.fromkeys(
        ("Conv", "Relu", "Softmax", "GlobalAveragePool", "Flatten", "Gemm"), 1
    )


def test_file_and_interface_are_told(cnn):
    facts = inspect(cnn)
    assert facts.size_bytes == cnn.stat().st_size
    assert (facts.opset, facts.ir_version, facts.producer) == (17, 8, "tests")
    assert [(v.name, v.dtype, v.shape) for v in facts.inputs] == [("x", "float32", ("batch", 3, 8, 8))]
    assert [(v.name, v.shape) for v in facts.outputs] == [("y", ("batch", 5))]
    assert (facts.num_params, facts.weight_bytes) == (137, 548)
    assert facts.macs == 4 * 27 * 64 + 20


def test_the_file_is_not_changed(cnn):
    before = hashlib.sha256(cnn.read_bytes()).hexdigest()
    inspect(cnn)
    assert hashlib.sha256(cnn.read_bytes()).hexdigest() == before
    assert [p.name for p in cnn.parent.iterdir()] == ["cnn.onnx"]


def test_the_document_is_strict_json_with_a_schema(cnn):
    document = json.loads(json.dumps(inspect(cnn).document(), allow_nan=False))
    assert document["schema"] == 1
    assert document["op_counts"]["Conv"] == 1
    assert [layer["name"] for layer in document["layers"]] == ["conv", "soft", "pool", "head"]
    assert (document["num_layers"], document["num_quantizable"]) == (4, 3)


# By hand: outputs x length of the sum that makes each (transposed: inputs x weights that each meets).
@pytest.mark.parametrize(
    ("node", "input_shape", "constants", "macs"),
    [
        (helper.make_node("Conv", ["x", "w"], ["y"], group=4), [2, 8, 5, 5], {"w": (8, 2, 3, 3)}, 8 * 9 * 18),
        (helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2]), [1, 3, 4, 4],
         {"w": (3, 6, 2, 2)}, 3 * 16 * 24),
        (helper.make_node("Conv", ["x", "w"], ["y"]), ["b", 3, 10], {"w": (4, 3, 3)}, 4 * 8 * 9),
        (helper.make_node("MatMul", ["x", "w"], ["y"]), ["b", 7, 6], {"w": (6, 5)}, 7 * 5 * 6),
        (helper.make_node("MatMul", ["x", "w"], ["y"]), ["b", 3, 7, 6], {"w": (3, 6, 5)}, 3 * 7 * 5 * 6),
        (helper.make_node("Gemm", ["x", "w"], ["y"]), ["b", 6], {"w": (6, 5)}, 30),
        (helper.make_node("MatMul", ["x", "x"], ["y"]), ["b", 6, 6], {}, 6 * 6 * 6),
    ],
    ids=["grouped conv", "transposed conv", "conv 1d", "matmul", "batched weight", "gemm", "two activations"],
)  # fmt: skip
def test_multiply_adds_are_those_of_one_sample(tmp_path, node, input_shape, constants, macs):
    path = save(tmp_path / "m.onnx", [node], [value("x", input_shape)], [value("y", None)], weights(**constants))
    assert inspect(path).layers[0].macs == macs


def test_multiply_adds_stay_unknown_where_sizes_depend_on_the_input(tmp_path):
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv")
    path = save(
        tmp_path / "m.onnx",
        [node],
        [value("x", ["b", 3, "h", "w_"])],
        [value("y", None)],
        weights(w=(4, 3, 3, 3)),
    )
    facts = inspect(path)
    assert facts.layers[0].macs is None
    assert any("multiply-adds unknown" in note for note in facts.notes)


def test_a_model_without_quantizable_layers_says_so(tmp_path):
    path = save(
        tmp_path / "m.onnx",
        [helper.make_node("Tanh", ["x"], ["y"])],
        [value("x", [1, 4])],
        [value("y", [1, 4])],
    )
    facts = inspect(path)
    assert facts.quantizable == ()
    assert "no layer of this model can be quantized" in facts.notes


def test_a_model_that_onnxruntime_refuses_is_shown_with_a_note(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Frobnicate", ["c"], ["y"], name="odd", domain="nobody.knows"),
    ]
    path = save(
        tmp_path / "m.onnx",
        nodes,
        [value("x", [1, 3, 8, 8])],
        [value("y", [1])],
        weights(w=(4, 3, 3, 3)),
        domains=("nobody.knows",),
    )
    facts = inspect(path)
    assert any("cannot be tuned" in note and "Frobnicate" in note for note in facts.notes)
    assert [layer.op_type for layer in facts.layers] == ["Conv", "nobody.knows.Frobnicate"]
    assert facts.layers[0].macs == 4 * 27 * 36
    assert dict(facts.opsets) == {"nobody.knows": 1}


def test_weights_in_recurrent_layers_and_branches_count(tmp_path):
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["h", "inner"], ["t"])],
        "then",
        [],
        [value("t", None)],
        weights(inner=(4, 4)),
    )
    other = helper.make_graph([helper.make_node("Identity", ["h"], ["e"])], "else", [], [value("e", None)])
    nodes = [
        helper.make_node("RNN", ["x", "w", "r"], ["", "last"], name="rnn", hidden_size=4),
        helper.make_node("Squeeze", ["last", "zero"], ["h"], name="squeeze"),
        helper.make_node("If", ["go"], ["y"], name="if", then_branch=branch, else_branch=other),
    ]
    zero = numpy_helper.from_array(np.array([0], np.int64), "zero")
    path = save(
        tmp_path / "m.onnx",
        nodes,
        [value("x", [5, 1, 3]), value("go", [], TensorProto.BOOL)],
        [value("y", None)],
        [*weights(w=(1, 4, 3), r=(1, 4, 4)), zero],
    )
    facts = inspect(path)
    assert {layer.name: layer.num_params for layer in facts.layers} == {"rnn": 28, "if": 16}
    assert facts.num_params == 44
    assert dict(facts.op_counts) == {"RNN": 1, "Squeeze": 1, "If": 1, "MatMul": 1, "Identity": 1}


def test_shared_weights_count_once_in_the_total(tmp_path):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
        helper.make_node("MatMul", ["h", "w"], ["y"], name="second"),
    ]
    path = save(tmp_path / "m.onnx", nodes, [value("x", ["b", 6])], [value("y", None)], weights(w=(6, 6)))
    facts = inspect(path)
    assert [layer.num_params for layer in facts.layers] == [36, 36]
    assert facts.num_params == 36


def test_external_data_belong_to_the_models_size(tmp_path):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="mul")]
    path = save(
        tmp_path / "m.onnx",
        nodes,
        [value("x", ["b", 64])],
        [value("y", None)],
        weights(w=(64, 64)),
        save_as_external_data=True,
        location="m.data",
        size_threshold=0,
    )
    facts = inspect(path)
    assert facts.size_bytes == path.stat().st_size + 4 * 64 * 64
    assert facts.layers[0].schemes == ("a16w8", "dynamic8", "int8", "int8-channel", "w4", "w8")
    (tmp_path / "m.data").unlink()
    with pytest.raises(InputError, match=r"external data beside it, found m\.onnx"):
        inspect(path)


def test_a_missing_file_and_a_file_that_is_no_model_are_refused(tmp_path):
    with pytest.raises(InputError, match="no file at"):
        inspect(tmp_path / "missing.onnx")
    (tmp_path / "text.onnx").write_text("this is not a model")
    with pytest.raises(InputError, match="cannot be read as one"):
        inspect(tmp_path / "text.onnx")


@pytest.mark.zoo
@pytest.mark.skipif(not ZOO.is_dir(), reason="no trained models in ../shared/zoo beside the checkout")
@pytest.mark.parametrize(
    ("name", "mega_macs", "layers", "quantizable"),
    # 40.8 million is the published figure of ResNet-20 on CIFAR-10, 12.5 that of the benchmark's ResNet-8.
    [("cifar_resnet20", 40.8, 32, 32), ("mlperf_resnet8", 12.5, 14, 14)],
)
def test_trained_models_have_the_published_multiply_adds(name, mega_macs, layers, quantizable):
    facts = inspect(ZOO / name / "model.onnx")
    assert facts.macs / 1e6 == pytest.approx(mega_macs, abs=0.05)
    assert (len(facts.layers), len(facts.quantizable)) == (layers, quantizable)
