"""The contract of every target, bare and isolated: a new file in `targets/` is under test at once."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantsieve import targets
from quantsieve.errors import UsageError
from quantsieve.targets.base import Target, TargetFailure, Timing, predict_each
from quantsieve.targets.isolation import Isolated

FEEDS = {"x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)}


@pytest.fixture(scope="module", params=[(n, w) for n in targets.names() for w in ("bare", "isolated")], ids="-".join)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    name, wrapping = request.param
    bare = targets.get(name)
    if wrapping == "bare":
        yield bare
        return
    with Isolated(bare, timeout_s=120) as isolated:
        yield isolated


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """second = x @ w + b, first = relu(second): float32 (4, 8) to two (4, 5), the outputs in this order."""
    draw = np.random.default_rng(0)
    weights = {
        "w": draw.normal(size=(8, 5)).astype(np.float32),
        "b": draw.normal(size=5).astype(np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "w", "b"], ["second"], "gemm"),
            helper.make_node("Relu", ["second"], ["first"], "relu"),
        ],
        "contract",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 5]) for name in ("first", "second")],
        [numpy_helper.from_array(tensor, name) for name, tensor in weights.items()],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def reference(model: Path) -> dict[str, np.ndarray]:
    w, b = (numpy_helper.to_array(tensor) for tensor in onnx.load(model).graph.initializer)
    second = FEEDS["x"] @ w + b
    return {"first": np.maximum(second, 0), "second": second}


def test_it_keeps_the_seam(target: Target) -> None:
    assert isinstance(target, Target)
    assert target.name in targets.names()


def test_its_environment_is_text_that_json_can_hold_and_does_not_change(target: Target) -> None:
    environment = target.environment()
    assert json.loads(json.dumps(environment)) == environment == target.environment()
    assert all(isinstance(text, str) for item in environment.items() for text in item)
    assert {"runtime", "version", "processor", "features", "threads"} <= set(environment)


def test_it_pickles_into_an_equal_one(target: Target) -> None:
    again = pickle.loads(pickle.dumps(target))
    assert again.name == target.name
    assert again.environment() == target.environment()
    again.close()


def test_it_computes_all_outputs_by_name_in_the_models_order(target: Target, model: Path) -> None:
    outputs = target.load(model)(FEEDS)
    assert list(outputs) == ["first", "second"]
    for name, expected in reference(model).items():
        assert outputs[name].dtype == np.float32
        # 8 products and a bias, summed in any order; weights and inputs are of size 1.
        np.testing.assert_allclose(outputs[name], expected, atol=9 * 8 * np.finfo(np.float32).eps)


def test_it_repeats_itself_bit_by_bit_and_leaves_its_feeds_alone(target: Target, model: Path) -> None:
    before = FEEDS["x"].copy()
    predict = target.load(model)
    first, again = predict(FEEDS), target.load(model)(FEEDS)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    np.testing.assert_array_equal(FEEDS["x"], before)


def test_several_inputs_give_what_each_gives_alone_in_their_order(target: Target, model: Path) -> None:
    predict = target.load(model)
    inputs = [{"x": FEEDS["x"] * np.float32(factor)} for factor in range(7)]
    found = predict_each(predict, inputs)
    assert len(found) == len(inputs)
    for outputs, feeds in zip(found, inputs, strict=True):
        alone = predict(feeds)
        assert all(np.array_equal(outputs[name], alone[name]) for name in alone)


def test_isolation_changes_no_output(target: Target, model: Path) -> None:
    bare = targets.get(target.name).load(model)(FEEDS)
    outputs = target.load(model)(FEEDS)
    assert all(np.array_equal(outputs[name], bare[name]) for name in bare)


def test_it_does_not_change_the_file(target: Target, model: Path) -> None:
    before = model.read_bytes()
    target.load(model)(FEEDS)
    target.audit(model)
    assert model.read_bytes() == before
    assert [path.name for path in model.parent.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("content", [b"", b"this is no model"])
def test_it_refuses_a_broken_file_with_a_reason(target: Target, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    for request in (target.load, target.audit, lambda path: target.latency([path], [FEEDS], Timing())):
        with pytest.raises(TargetFailure) as caught:
            request(path)
        assert caught.value.reason and caught.value.kind == "error"


def test_it_refuses_feeds_of_the_wrong_shape_and_goes_on(target: Target, model: Path) -> None:
    predict = target.load(model)
    with pytest.raises(TargetFailure) as caught:
        predict({"x": np.zeros((4, 7), np.float32)})
    assert (caught.value.kind, caught.value.stage) == ("error", "run")
    assert predict(FEEDS)["first"].shape == (4, 5)


def test_its_latency_has_one_positive_time_a_round_for_each_path(target: Target, model: Path) -> None:
    times = target.latency([model, model], [FEEDS], Timing(rounds=6, warmup_s=0.05, max_seconds=20))
    assert [len(ms) for ms in times] == [6, 6]
    assert all(ms > 0 for each in times for ms in each)


def test_its_audit_names_the_models_nodes_and_finds_no_integers_in_a_float_model(target: Target, model: Path) -> None:
    audit = target.audit(model)
    assert [name for name, _ in audit.ran] == ["gemm", "relu"]
    assert audit.precision(["gemm", "relu"]) == "float"
    assert audit.boundaries == 0


def test_its_saturation_is_a_ratio_to_the_exact_sum(target: Target) -> None:
    found = target.probe_saturation()
    assert 0.25 < found.s8 < 1.01
    assert 0.25 < found.u8 < 1.01


def test_it_can_be_used_again_after_closing(target: Target, model: Path) -> None:
    target.close()
    target.close()
    assert target.load(model)(FEEDS)["first"].shape == (4, 5)


def test_every_target_is_found_by_its_own_name() -> None:
    assert "ort-cpu" in targets.names()
    assert all(targets.get(name).name == name for name in targets.names())


def test_an_unknown_name_suggests_a_near_one() -> None:
    with pytest.raises(UsageError, match="ort-cpu"):
        targets.get("ort-cup")
