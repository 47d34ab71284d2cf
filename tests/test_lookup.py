"""Embeddings: rows of a constant table, whose weights alone can be quantized."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import planned
from planned import node
from quantsieve import api, schemes
from quantsieve.calibrate import calibrate
from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.prepare import prepare
from quantsieve.model.units import find_structure
from quantsieve.plan import Plan, find_options, full_plan
from quantsieve.schemes._static import by_name
from quantsieve.sensitivity.engine import refusal
from quantsieve.sensitivity.suffix import find_sources, scan_batch
from quantsieve.simulate import Simulation
from quantsieve.weights import NO_CORRECTIONS, Ingredients
from quantsieve.writing import count_bytes, write_plan

ROWS, WIDTH, COUNT = 200, 16, 12


def embedding(**attributes: int) -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    table = draw.normal(size=(ROWS, WIDTH)) * np.geomspace(0.01, 3, ROWS)[:, None]
    nodes = [
        node("Gather", ["ids", "table"][::-1], ["words"], "words", **attributes),
        node("MatMul", ["words", "w"], ["m"], "product"),
        node("Relu", ["m"], ["r"], "relu"),
        node("MatMul", ["r", "v"], ["scores"], "last"),
    ]
    constants = {"table": table, "w": draw.normal(size=(WIDTH, 8)) / 4, "v": draw.normal(size=(8, 3)) / 3}
    graph = helper.make_graph(
        nodes,
        "embedding",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", 5])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 5, 3])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class Made:
    def __init__(self) -> None:
        draw = np.random.default_rng(1)
        self.feeds = {"ids": draw.integers(0, ROWS, (COUNT, 5), np.int64)}
        model = embedding()
        prepared, _ = prepare(ir.from_proto(model), [{"ids": self.feeds["ids"][:1]}], model.ByteSize())
        self.graph = Graph(prepared)
        self.structure = find_structure(self.graph)
        self.executor = Executor(self.graph, self.structure)
        self.calibration = calibrate(self.executor, [(self.feeds, COUNT)])
        known = schemes.discover()
        self.options = find_options(self.graph, self.structure, self.calibration, known)
        self.parts = Ingredients(self.graph, self.structure, self.calibration, NO_CORRECTIONS, by_name(known))


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


def test_a_lookup_takes_weights_alone_and_has_one_scale_a_row(made: Made) -> None:
    layer = made.structure.layer("words")
    assert made.options.schemes["words"] == ("w8",)
    assert "looks rows up" in str(schemes.get("int8").refusal(layer, 17))
    assert (layer.inputs, layer.weight, layer.num_params) == ((), "table", ROWS * WIDTH)
    weight = made.parts.integers(layer, "w8").weight
    assert weight.scale.shape == (ROWS,)
    table = made.graph.constant("table")
    assert table is not None
    assert (np.abs(weight.dequantized() - table) <= weight.scale[:, None] / 2 * 1.001).all()


@pytest.mark.parametrize("chosen", [{"words": "w8"}, {"words": "w8", "product": "int8"}, {"product": "int8"}])
def test_the_file_does_what_is_simulated_at_every_level(made: Made, tmp_path: Path, chosen: dict[str, str]) -> None:
    plan = Plan(chosen)
    path = tmp_path / "plan.onnx"
    onnx.save(write_plan(made.parts, plan), path)
    onnx.checker.check_model(path, full_check=True)
    wanted = Simulation(made.executor, made.parts, plan).run(made.feeds)["scores"].numpy().copy()
    for level in planned.LEVELS:
        found = planned.run_file(path, made.feeds, level)["scores"]
        assert np.abs(found - wanted).max() <= np.ptp(wanted) / 255, level


def test_the_float_table_is_gone_and_the_bytes_are_those_predicted(made: Made) -> None:
    empty = write_plan(made.parts, Plan({})).ByteSize()
    model = write_plan(made.parts, Plan({"words": "w8"}))
    assert "table" not in {tensor.name for tensor in model.graph.initializer}
    costs = count_bytes(made.parts, made.options, empty)
    saved = model.ByteSize() - empty
    assert saved < -2 * ROWS * WIDTH
    assert costs.layer_bytes["words"]["w8"] == pytest.approx(saved, rel=0.03)


def test_its_price_is_that_of_its_plan_and_the_scan_runs_suffixes(made: Made) -> None:
    sources = find_sources(made.executor, made.options, schemes.discover())
    assert ("weight", "words", "w8") in {(s.kind, s.owner, s.form) for s in sources}
    assert ("tensor", "words", "uint8") in {(s.kind, s.owner, s.form) for s in sources}  # `product` reads it
    prices = scan_batch(made.executor, made.feeds, COUNT, sources, made.calibration, NO_CORRECTIONS, made.parts.schemes)
    assert refusal(made.executor) is None
    plain = made.executor.forward(made.feeds)["scores"].numpy().copy()
    moved = Simulation(made.executor, made.parts, Plan({"words": "w8"})).run(made.feeds)["scores"].numpy().copy()
    wanted = np.square(moved - plain).mean() / made.calibration.output_variance["scores"]
    row = prices.rows()["weight", "words", "w8"]
    assert prices.mean()[row] == pytest.approx(wanted, rel=1e-3)


def test_a_full_plan_takes_lookups_along_with_weights_alone(made: Made) -> None:
    assert full_plan(made.options, "w8").schemes == {"words": "w8", "product": "w8", "last": "w8"}
    assert full_plan(made.options, "int8").schemes == {"words": "w8", "product": "int8", "last": "int8"}
    static = find_options(made.graph, made.structure, made.calibration, [schemes.get("int8")])
    assert set(full_plan(static, "int8").schemes) == {"product", "last"}


def test_a_table_looked_up_along_columns_stays_float() -> None:
    model = embedding()
    next(n for n in model.graph.node if n.name == "words").attribute.append(helper.make_attribute("axis", 1))
    layer = find_structure(Graph(ir.from_proto(model))).layers[0]
    assert layer.refusal == "no int8 scheme for Gather"


def test_a_full_plan_of_weights_alone_may_be_the_smallest_and_is_what_others_are_held_against(tmp_path: Path) -> None:
    path = tmp_path / "embedding.onnx"
    onnx.save(embedding(), path)
    draw = np.random.default_rng(2)
    feeds = [{"ids": draw.integers(0, ROWS, (1, 5), np.int64)} for _ in range(80)]
    found = api.tune(path, feeds, tmp_path / "run", schemes=("int8", "w8"), samples=8, max_trials=3, workers=1)
    summary = found.summary
    smallest = min(c.size_bytes for c in summary.candidates if c.origin in ("full int8", "full w8"))
    assert summary.full_bytes == smallest
    assert summary.full_name in ("full int8", "full w8")
    assert all((kept := summary.kept(c)) is None or kept <= 1.01 for c in summary.candidates)
    text = (tmp_path / "run" / "report" / "report.txt").read_text(encoding="utf-8")
    assert "otherwise than planned" not in text


def test_quantize_by_the_name_of_a_scheme_touches_only_layers_that_can_have_it(tmp_path: Path) -> None:
    path = tmp_path / "embedding.onnx"
    onnx.save(embedding(), path)
    feeds = [{"ids": np.full((1, 5), number, np.int64)} for number in range(40)]
    for scheme, is_float in (("int8", True), ("dynamic8", True), ("w8", False)):
        written = api.quantize(path, scheme, feeds, tmp_path / f"{scheme}.onnx")
        held = {tensor.name: tensor.data_type for tensor in onnx.load(written).graph.initializer}
        assert ("table" in held) == is_float, scheme


def test_quantize_says_that_a_model_without_layers_to_quantize_is_copied(tmp_path: Path) -> None:
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3])] for name in "xy"]
    graph = helper.make_graph([node("Tanh", ["x"], ["y"], "tanh")], "plain", *ends)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    told: list[str] = []
    written = api.quantize(tmp_path / "m.onnx", "int8", None, tmp_path / "q.onnx", synthetic=40, tell=told.append)
    assert [n.op_type for n in onnx.load(written).graph.node] == ["Tanh"]
    assert told == [
        "no layer of this model can be quantized (no int8 scheme for Tanh): the model is handed on as it is"
    ]
