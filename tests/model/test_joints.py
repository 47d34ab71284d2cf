"""Joints: which channels can be scaled, and that scaling them changes no bit of what the model computes."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import Chain, feeds_of, found_in, outputs, powers
from quantsieve.model.equalize import equalized

LINKS = st.lists(
    st.tuples(
        st.sampled_from(["dense", "grouped", "depthwise", "transposed"]),
        st.sampled_from(["Relu", "LeakyRelu", "PRelu", "Clip", "Identity", "MaxPool", "AveragePool", ""]),
        st.booleans(),
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(links=LINKS, end=st.sampled_from(["gemm", "turned", "matmul", "none"]), seed=st.integers(0, 1000))
def test_scaled_channels_change_no_bit_of_the_outputs(
    links: list[tuple[str, str, bool]], end: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chain = Chain(seed)
    for kind, between, has_bias in links:
        if kind == "transposed":
            chain.transposed(4)
        else:
            chain.conv(4, 3, {"dense": 1, "grouped": 2, "depthwise": 4}[kind], has_bias)
        if between == "Clip":
            chain.op("Clip", chain.fixed(0), chain.fixed(1e9))
        elif between == "PRelu":
            chain.op("PRelu", chain.weight(4, 1, 1))
        elif between.endswith("Pool"):
            chain.op(between, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        elif between:
            chain.op(between)
    if end in ("gemm", "turned"):
        chain.gemm(5, end == "turned").op("Relu").matmul(3)
    if end == "matmul":
        chain.op("GlobalAveragePool").op("Flatten")
        chain.side = 1
        chain.matmul(5).op("Relu").matmul(3)
    if end == "none":
        chain.op("GlobalAveragePool").op("Flatten")
    model, joints = found_in(chain.save(tmp_path_factory.mktemp("chain") / "m.onnx"))
    expected = len(links) - 1 + {"gemm": 2, "turned": 2, "matmul": 2, "none": 0}[end]
    assert len(joints) == expected

    changed = equalized(model, joints, powers(joints, seed))

    feeds = feeds_of()
    for before, after in zip(outputs(model, feeds), outputs(changed, feeds), strict=True):
        np.testing.assert_array_equal(before, after)
    weights = [joint.maker.weight for joint in joints]
    initializers = (model.graph.initializers, changed.graph.initializers)
    assert any(not np.array_equal(*(held[name].const_value.numpy() for held in initializers)) for name in weights)


def test_channels_that_two_layers_read_are_divided_in_both(tmp_path: Path) -> None:
    chain = Chain().conv(6, 3).op("Relu")
    fork = chain.last
    chain.conv(4)
    first, chain.last, chain.channels = chain.last, fork, 6
    chain.conv(4)
    chain.op("Add", first).op("GlobalAveragePool").op("Flatten")
    model, joints = found_in(chain.save(tmp_path / "m.onnx"))
    assert [len(joint.readers) for joint in joints] == [2]
    changed = equalized(model, joints, powers(joints))
    for before, after in zip(outputs(model, feeds_of()), outputs(changed, feeds_of()), strict=True):
        np.testing.assert_array_equal(before, after)


def test_an_add_a_concat_and_a_curve_end_a_joint(tmp_path: Path) -> None:
    def add(chain: Chain) -> None:
        chain.op("Add", chain.nodes[-2].output[0])

    def concat(chain: Chain) -> None:
        chain.op("Concat", chain.nodes[-2].output[0], axis=1)
        chain.channels = 8

    def curve(chain: Chain) -> None:
        chain.op("Sigmoid")

    for end in (add, concat, curve):
        chain = Chain().conv(4, 3).op("Relu")
        end(chain)
        chain.conv(3).op("GlobalAveragePool").op("Flatten")
        assert found_in(chain.save(tmp_path / "m.onnx"))[1] == ()


def test_an_output_of_the_graph_ends_a_joint(tmp_path: Path) -> None:
    chain = Chain().conv(4, 3).op("Relu").conv(3).op("GlobalAveragePool").op("Flatten")
    path = chain.save(tmp_path / "m.onnx")
    model = ir.load(path)
    assert len(found_in(path)[1]) == 1
    middle = next(node for node in model.graph if node.op_type == "Relu").outputs[0]
    middle.dtype, middle.shape = ir.DataType.FLOAT, ir.Shape(["batch", 4, 6, 6])
    model.graph.outputs.append(middle)
    ir.save(model, path)
    assert found_in(path)[1] == ()


def test_weights_that_are_used_twice_end_a_joint(tmp_path: Path) -> None:
    chain = Chain().conv(4, 3).op("Relu").conv(4, 3).op("Relu").conv(4, 3).op("GlobalAveragePool").op("Flatten")
    assert len(found_in(chain.save(tmp_path / "m.onnx"))[1]) == 2
    chain.nodes[2].input[1] = chain.nodes[0].input[1]
    assert found_in(chain.save(tmp_path / "m.onnx"))[1] == ()


def test_a_clip_tells_its_bound_and_one_from_below_zero_ends_a_joint(tmp_path: Path) -> None:
    def bounds(low: float, high: float) -> list[float]:
        chain = Chain().conv(4, 3)
        chain.op("Clip", chain.fixed(low), chain.fixed(high)).conv(3).op("GlobalAveragePool").op("Flatten")
        return [joint.bound for joint in found_in(chain.save(tmp_path / "m.onnx"))[1]]

    assert bounds(0, 6) == [6.0]
    assert bounds(-1, 6) == []
