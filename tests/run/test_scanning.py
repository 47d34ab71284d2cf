"""What a scan says about itself: why it took long, and what it could not see."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantsieve import api, cli
from quantsieve.errors import InputError
from quantsieve.run.store import Store
from quantsieve.sensitivity import engine
from quantsieve.sensitivity.optimized import Refused


def test_a_scan_that_ran_layer_by_layer_says_why(small_model, small_data, tmp_path, monkeypatch):
    quick = api.scan(small_model, small_data, samples=2, drift="off")
    assert not any("layer by layer" in note for note in quick.notes)

    def refuse(*arguments):
        raise Refused("a reason of this test")

    monkeypatch.setattr(engine, "optimize", refuse)
    slow = api.scan(small_model, small_data, samples=2, drift="off")
    assert [note for note in slow.notes if "layer by layer" in note and "a reason of this test" in note]
    api.tune(small_model, small_data, tmp_path / "run", samples=2, max_trials=2)
    events = Store.read(tmp_path / "run").events()
    assert [event.fields["reason"] for event in events if event.kind == "scan"] == ["a reason of this test"]


def branches(path):
    """x [batch, 4] -> Gemm `seen` -> Softmax -> y, and z [batch, 4] -> Gemm `unseen` -> ArgMax -> k, integers."""
    draw = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gemm", ["x", "a", "c"], ["s"], "seen"),
        helper.make_node("Softmax", ["s"], ["y"], "soft"),
        helper.make_node("Gemm", ["z", "b", "c"], ["u"], "unseen"),
        helper.make_node("ArgMax", ["u"], ["k"], "best", axis=1, keepdims=0),
    ]
    constants = {"a": draw.normal(size=(4, 3)), "b": draw.normal(size=(4, 3)), "c": draw.normal(size=3)}
    graph = helper.make_graph(
        nodes,
        "branches",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "z")],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3]),
            helper.make_tensor_value_info("k", TensorProto.INT64, ["batch"]),
        ],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_layer_whose_rounding_no_float_output_shows_is_named_and_not_scored_0_silently(tmp_path):
    found = api.scan(branches(tmp_path / "m.onnx"), synthetic=16, samples=4, drift="off")
    scores = {row.layer: row.value for row in found.layers}
    assert scores["unseen"] == 0 < scores["seen"]
    (note,) = [note for note in found.notes if "the score is 0" in note]
    assert "for unseen;" in note
    assert {(r.layer, r.reason) for r in found.refused} == {
        ("soft", "no int8 scheme for Softmax"), ("best", "no int8 scheme for ArgMax"),
    }  # fmt: skip


def test_pick_counts_the_layers_that_stay_float_in_any_case(tmp_path, capsys):
    path = tmp_path / "scan.json"
    api.scan(branches(tmp_path / "m.onnx"), synthetic=16, samples=4, output=path, drift="off")
    assert cli.main(["pick", str(path), "--coverage", "0"]) == 0
    assert "\nFloat anyway  2 layers that cannot be quantized\n" in capsys.readouterr().out


def test_a_model_without_float_outputs_is_refused(small_model, small_data, tmp_path):
    model = onnx.load(small_model)
    model.graph.node.append(helper.make_node("ArgMax", ["logits"], ["class"], "argmax", axis=1))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("class", onnx.TensorProto.INT64, ["batch", 1]))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(InputError, match="at least one float output, found 'class' of int64"):
        api.scan(tmp_path / "m.onnx", small_data, samples=4)
