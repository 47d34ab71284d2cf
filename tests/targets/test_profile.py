"""Where the time goes, told by the nodes and tensors of the file itself."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny_models
from fragile_targets import Fragile

from quantsieve.targets.base import Profile, TargetFailure
from quantsieve.targets.isolation import Isolated
from quantsieve.targets.ort import OrtCpu
from quantsieve.targets.profile import profile_graph

RUNS = 4


def profile(path: Path, level: str = "all") -> Profile:
    shape = [d.dim_value or 1 for d in onnx.load(path).graph.input[0].type.tensor_type.shape.dim]
    feed = {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    return OrtCpu(optimization=level).profile(path, [feed], RUNS)


@pytest.mark.parametrize("level", ["off", "extended", "all"])
def test_kernels_are_told_by_the_nodes_of_the_file(tmp_path: Path, level: str) -> None:
    path = tiny_models.float_layer_between_integers(tmp_path / "m.onnx", "Sum")
    found = profile(path, level)
    heavy = {"conv1", "conv2", "conv3"}
    labels = {node.name for node in onnx.load(path).graph.node}
    assert heavy <= set(found.nodes) <= labels
    assert all(ms > 0 for name, ms in found.nodes.items() if name in heavy)


@pytest.mark.parametrize("level", ["extended", "all"])
def test_conversions_are_told_by_the_tensors_that_they_convert(tmp_path: Path, level: str) -> None:
    """The float layer in the middle reads integers of the first as floats, and the third quantizes what it makes."""
    graph = onnx.load(path := tiny_models.float_layer_between_integers(tmp_path / "m.onnx", "Sum")).graph
    sources = {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}
    found = profile(path, level)
    assert set(found.quantize) <= sources
    assert set(found.dequantize) <= sources
    assert graph.input[0].name in found.quantize
    assert len(found.dequantize) >= 2


def test_nameless_nodes_count_in_the_whole_alone(tmp_path: Path) -> None:
    path = tiny_models.float_layer_between_integers(tmp_path / "m.onnx", "Sum", name_nodes=False)
    found = profile(path, "off")
    assert not found.nodes
    assert found.total > 0


def test_all_parts_add_up_to_no_more_than_the_whole(tmp_path: Path) -> None:
    found = profile(tiny_models.quantized_network(tmp_path / "m.onnx"))
    parts = [*found.nodes.values(), *found.quantize.values(), *found.dequantize.values()]
    assert 0 < sum(parts) <= found.total * (1 + 1e-9)


def test_milliseconds_of_a_run_from_events_of_several() -> None:
    """A kernel that runs twice a run counts twice; the median leaves an outlier out; others count in the whole only."""
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], "conv")
    graph = onnx.helper.make_graph([node], "g", [], [])
    ran = onnx.helper.make_graph([node, onnx.helper.make_node("ReorderOutput", ["y"], ["z"], "reorder")], "g", [], [])
    events = [{"cat": "Node", "name": "conv_kernel_time", "dur": dur} for dur in (100, 300, 200, 9000, 200, 200)]
    events += [{"cat": "Node", "name": "reorder_kernel_time", "dur": 50}] * 3
    events += [
        {"cat": "Node", "name": "conv_fence_before", "dur": 7},
        {"cat": "Session", "name": "model_run", "dur": 1},
    ]
    found = profile_graph(graph, ran, events, 3)
    assert found == Profile({"conv": pytest.approx(0.4)}, {}, {}, pytest.approx(0.45))


def test_a_worker_hands_on_what_the_target_inside_tells(tmp_path: Path) -> None:
    path = tiny_models.quantized_network(tmp_path / "m.onnx")
    shape = [d.dim_value or 1 for d in onnx.load(path).graph.input[0].type.tensor_type.shape.dim]
    feed = {"x": np.zeros(shape, np.float32)}
    with Isolated(OrtCpu()) as target:
        assert set(target.profile(path, [feed], RUNS).nodes) == set(OrtCpu().profile(path, [feed], RUNS).nodes)
    with Isolated(Fragile()) as target, pytest.raises(TargetFailure, match="does not tell where the time goes"):
        target.profile(path, [feed], RUNS)
