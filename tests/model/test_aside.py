"""Large constants in files: the same numbers, little memory, nothing left behind."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from quantsieve.model import aside
from quantsieve.model.load import load_model, open_model
from quantsieve.model.prepare import prepare

SIDE = 640  # of a square weight: 1.6 MB


def large_model(path, opset=17, is_external=False, batchnorm=False):
    """Gemm, BatchNormalization where asked for, and a small MatMul whose weight comes from a Constant node."""
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((SIDE, SIDE), dtype=np.float32) / np.float32(25)
    last = onnx.helper.make_tensor("last", onnx.TensorProto.FLOAT, (SIDE, 3), draw.standard_normal(SIDE * 3))
    constants = [onnx.numpy_helper.from_array(weight, "w"), onnx.numpy_helper.from_array(weight[0], "b")]
    nodes = [onnx.helper.make_node("Gemm", ["x", "w", "b"], ["g"])]
    if batchnorm:
        names = ("scale", "offset", "mean", "variance")
        constants += [onnx.numpy_helper.from_array(draw.random(SIDE, dtype=np.float32) + 0.5, name) for name in names]
        nodes.append(onnx.helper.make_node("BatchNormalization", ["g", "scale", "offset", "mean", "variance"], ["n"]))
    nodes += [
        onnx.helper.make_node("Constant", [], ["last"], value=last),
        onnx.helper.make_node("MatMul", [nodes[-1].output[0], "last"], ["y"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "large",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", SIDE])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 3])],
        constants,
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, path, save_as_external_data=is_external, location="own.data", size_threshold=0)
    return path


def run(session, feeds):
    return session.run(None, feeds)[0]


@pytest.fixture
def feeds():
    return {"x": np.random.default_rng(1).standard_normal((2, SIDE), dtype=np.float32)}


@pytest.mark.parametrize("is_external", [False, True])
def test_a_model_moved_out_computes_the_same_from_the_folder(tmp_path, feeds, is_external):
    path = large_model(tmp_path / "m.onnx", is_external=is_external)
    wanted = run(onnxruntime.InferenceSession(path), feeds)
    folder = tmp_path / "aside"
    folder.mkdir()
    model = aside.move_out(open_model(path), folder)
    (tmp_path / "own.data").unlink(missing_ok=True)  # everything is in the folder or in memory
    assert aside.folder_of(model) == folder
    assert ir.to_proto(model).ByteSize() < SIDE * 20
    found = run(aside.open_session(model, onnxruntime.SessionOptions()), feeds)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert [file.suffix for file in folder.iterdir()] == [".data"]  # the session's own file is gone


def test_moving_out_again_and_copies_leave_what_lies_in_the_folder(tmp_path, feeds):
    model = aside.move_out(open_model(large_model(tmp_path / "m.onnx")), tmp_path)
    files = sorted(tmp_path.iterdir())
    again = aside.copied(aside.move_out(model, tmp_path))
    assert sorted(tmp_path.iterdir()) == files
    assert again.graph.initializers["w"].const_value.numpy().shape == (SIDE, SIDE)


def test_a_saved_model_is_two_files_that_run(tmp_path, feeds):
    path = large_model(tmp_path / "m.onnx")
    aside.save(load_model(path), tmp_path / "copy.onnx")
    assert (tmp_path / "copy.onnx").stat().st_size < SIDE * 20 < (tmp_path / "copy.data").stat().st_size
    path.unlink()
    assert open_model(tmp_path / "copy.onnx").graph.initializers["w"].const_value.nbytes == SIDE * SIDE * 4
    assert run(onnxruntime.InferenceSession(tmp_path / "copy.onnx"), feeds).shape == (2, 3)


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("is_external", [False, True])
def test_prepare_gives_the_same_model_with_a_folder_and_without(tmp_path, feeds, opset, is_external):
    path = large_model(tmp_path / "m.onnx", opset, is_external, batchnorm=True)
    folder = tmp_path / "aside"
    folder.mkdir()
    wanted, fact = prepare(load_model(path), [feeds], 7)
    found, same = prepare(open_model(path), [feeds], 7, folder)
    assert same == fact
    assert not any("left out" in note for note in fact.notes)
    assert [node.op_type for node in found.graph] == ["Gemm", "MatMul"]
    assert found.graph.initializers.keys() == wanted.graph.initializers.keys()
    for name, value in wanted.graph.initializers.items():
        np.testing.assert_array_equal(found.graph.initializers[name].const_value.numpy(), value.const_value.numpy())
    large = [v.const_value for v in found.graph.initializers.values() if v.const_value.nbytes > aside.LARGE]
    assert large
    assert all(isinstance(tensor, ir.ExternalTensor) for tensor in large)
