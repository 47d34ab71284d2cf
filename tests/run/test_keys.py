"""Equal work has equal keys; a changed byte of a model, its external data or an array has another."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from onnx import TensorProto, helper, numpy_helper

from quantsieve.errors import InputError, UnsupportedModel
from quantsieve.run.keys import array_key, content_key, file_key, model_key

NAMES = st.text(max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
ARRAYS = npst.arrays(
    npst.boolean_dtypes() | npst.integer_dtypes() | npst.floating_dtypes(),
    npst.array_shapes(min_dims=0, min_side=0),
)


def external_model(folder: Path, initializer: bool = True) -> Path:
    """A Gemm whose 64 byte weight lies in weights.bin, as an initializer or inside a Constant in an If."""
    folder.mkdir(exist_ok=True)
    weight = numpy_helper.from_array(np.arange(16, dtype=np.float32).reshape(4, 4), "w")
    (folder / "weights.bin").write_bytes(weight.raw_data)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", "64")):
        weight.external_data.add(key=key, value=value)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if not initializer:
        branch = helper.make_graph(
            [helper.make_node("Constant", [], ["c"], value=weight)],
            "branch",
            [],
            [helper.make_tensor_value_info("c", TensorProto.FLOAT, [4, 4])],
        )
        nodes.insert(0, helper.make_node("If", ["flag"], ["w"], then_branch=branch, else_branch=branch))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])]
    if not initializer:
        inputs.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight] if initializer else [])
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


def relocate(path: Path, location: str) -> None:
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = location
    path.write_bytes(model.SerializeToString())


@given(st.dictionaries(NAMES, VALUES, max_size=5), st.randoms(use_true_random=False))
def test_a_key_ignores_the_order_of_settings(settings, random):
    shuffled = list(settings.items())
    random.shuffle(shuffled)
    assert content_key("scan", 1, dict(shuffled), ["a"]) == content_key("scan", 1, settings, ["a"])


@given(st.dictionaries(NAMES, VALUES, max_size=3), st.dictionaries(NAMES, VALUES, max_size=3))
def test_two_settings_share_a_key_only_when_their_canonical_text_is_one(first, second):
    same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert (content_key("scan", 1, first, []) == content_key("scan", 1, second, [])) == same


def test_stage_version_settings_and_inputs_each_change_the_key():
    keys = {
        content_key("scan", 1, {"n": 8}, ["a", "b"]),
        content_key("price", 1, {"n": 8}, ["a", "b"]),
        content_key("scan", 2, {"n": 8}, ["a", "b"]),
        content_key("scan", 1, {"n": 9}, ["a", "b"]),
        content_key("scan", 1, {"n": 8}, ["b", "a"]),
        content_key("scan", 1, {"n": 8}, ["a"]),
    }
    assert len(keys) == 6
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in keys)


def test_a_key_stays_what_it_was_in_earlier_versions():
    # A changed value here means that every run folder in the world is computed again.
    key = content_key("scan", 1, {"b": [1, 2.5, None], "a": True}, ["x"])
    assert key == "a9588ec950c78d881d9bb829dbbc689f3d434fd759c82ee827e39ad92a6ba4ab"


def test_settings_without_canonical_text_have_no_key():
    with pytest.raises(ValueError):
        content_key("scan", 1, {"x": float("nan")}, [])
    with pytest.raises(TypeError):
        content_key("scan", 1, {"x": np.float32(1)}, [])
    with pytest.raises(TypeError):
        content_key("scan", 1, {"x": {1: "a"}}, [])


@given(ARRAYS)
def test_an_arrays_key_ignores_byte_order_and_memory_layout(array):
    swapped = array.astype(array.dtype.newbyteorder())
    assert array_key(swapped) == array_key(np.array(array, order="F")) == array_key(array)
    assert array_key(np.repeat(array, 2, axis=0)[::2] if array.ndim else array) == array_key(array)


def test_an_arrays_key_tells_dtype_shape_and_values_apart():
    array = np.arange(6, dtype=np.int32)
    different = [
        array,
        array.astype(np.uint32),
        array.reshape(2, 3),
        array.reshape(3, 2),
        array[::-1],
        array[:0],
    ]
    assert len({array_key(each) for each in different}) == len(different)


def test_an_array_of_objects_has_no_key():
    with pytest.raises(TypeError):
        array_key(np.array(["a", 1], dtype=object))


def test_a_model_has_the_same_key_in_another_folder_under_another_name(tmp_path):
    first, second = external_model(tmp_path / "a"), external_model(tmp_path / "b")
    assert model_key(first) == model_key(second.rename(second.with_name("other.onnx")))


@pytest.mark.parametrize("initializer", [True, False], ids=["initializer", "constant in a branch"])
def test_a_changed_byte_of_external_data_changes_the_models_key(tmp_path, initializer):
    path = external_model(tmp_path, initializer)
    before = model_key(path)
    data = bytearray((tmp_path / "weights.bin").read_bytes())
    data[63] ^= 1
    (tmp_path / "weights.bin").write_bytes(data)
    assert model_key(path) != before


def test_a_changed_byte_of_the_model_changes_its_key(tmp_path):
    path = external_model(tmp_path)
    before = model_key(path)
    model = onnx.load(path, load_external_data=False)
    model.doc_string = "other"
    path.write_bytes(model.SerializeToString())
    assert model_key(path) != before


def test_missing_and_cut_off_external_data_are_named(tmp_path):
    path = external_model(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 63)
    with pytest.raises(InputError, match=r"64 bytes of external data in weights.bin .* found 63 bytes"):
        model_key(path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(InputError, match=r"no file weights.bin"):
        model_key(path)


@pytest.mark.parametrize("location", ["../weights.bin", "/weights.bin", "a/../../weights.bin", ""])
def test_external_data_outside_the_models_folder_is_refused(tmp_path, location):
    path = external_model(tmp_path / "inner")
    (tmp_path / "weights.bin").write_bytes(b"\0" * 64)
    relocate(path, location)
    with pytest.raises(InputError, match="inside the folder"):
        model_key(path)


def test_a_missing_model_and_a_file_that_is_no_model_are_told_apart(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        model_key(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("this is not protobuf")
    with pytest.raises(UnsupportedModel, match=r"text\.onnx"):
        model_key(tmp_path / "text.onnx")


def test_a_files_key_is_the_sha256_of_its_bytes(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    assert file_key(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(InputError, match="Is a directory"):
        file_key(tmp_path)
