"""Times of layers and conversions as the search takes them, from profiles of known numbers and of real sessions."""

from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from planned import kit_of
from quantsieve import api, schemes
from quantsieve.evaluation import Measured
from quantsieve.plan import Options, Plan, Rounded, full_plan
from quantsieve.run.pace import Seen, alternating, timed_costs
from quantsieve.schemes._static import by_name
from quantsieve.search.prices import Costs
from quantsieve.targets.base import Profile
from quantsieve.weights import NO_CORRECTIONS, Ingredients
from quantsieve.writing import write_plan

WIDE = 64
EMPTY = Costs(0, {}, {}, {}, {})


def chain(path, widths=(WIDE, WIDE, WIDE, 4)):
    """MatMul, Tanh, MatMul, Tanh, MatMul: no integer kernel for Tanh."""
    draw = np.random.default_rng(0)
    nodes, constants, now = [], [], "x"
    for i, (read, made) in enumerate(pairwise(widths)):
        constants.append(numpy_helper.from_array((draw.normal(size=(read, made)) / 8).astype(np.float32), f"w{i}"))
        last = i == len(widths) - 2
        nodes.append(helper.make_node("MatMul", [now, f"w{i}"], ["y" if last else f"m{i}"], f"mul{i}"))
        if not last:
            nodes.append(helper.make_node("Tanh", [f"m{i}"], [f"t{i}"], f"tanh{i}"))
        now = f"t{i}"
    ends = [helper.make_tensor_value_info(n, 1, ["n", size]) for n, size in (("x", widths[0]), ("y", widths[-1]))]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return model


@pytest.fixture
def seen(tmp_path):
    """Makes a plan's file and puts known times to it."""
    feeds = {"x": np.random.default_rng(1).normal(size=(16, WIDE)).astype(np.float32)}
    kit = kit_of(chain(tmp_path / "m.onnx"), feeds)
    taken = by_name(tuple(schemes.get(name) for name in ("int8", "w8", "dynamic8")))
    parts = Ingredients(kit.graph, kit.structure, kit.calibration, NO_CORRECTIONS, taken, "s8")
    chosen = {f"mul{i}": ("int8", "w8", "dynamic8") for i in range(3)}
    options = Options(chosen, {}, {name: scheme.activation for name, scheme in taken.items()})

    def make(plan, nodes, quantize=None, dequantize=None, read=None):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.onnx"
        model = write_plan(parts, Plan(plan))
        onnx.save(model, path)
        found = Profile(nodes, quantize or {}, dequantize or {}, 9.0)
        return Seen(Plan(plan), path, found if read is None else read(model.graph, found))

    return kit, options, make


def test_a_layer_takes_what_its_kernels_take_beyond_float(seen):
    kit, options, make = seen
    names = ("mul0", "mul1", "mul2")
    plans = [
        make({}, {"mul0": 5.0, "mul1": 4.0, "mul2": 1.0, "tanh0": 7.0}),
        make(dict.fromkeys(names, "dynamic8"), {"mul0": 2.0, "mul1": 4.5, "mul2": 1.0}),
        make(dict.fromkeys(names, "w8"), {"mul0": 5.0, "mul1": 4.0, "mul2": 0.5}),
    ]
    found = timed_costs(EMPTY, kit.graph, kit.structure, options, plans).layer_ms
    assert found["mul0"] == {"int8": 0.0, "w8": 0.0, "dynamic8": -3.0}  # no plan shows it in int8
    assert found["mul1"] == {"int8": 0.0, "w8": 0.0, "dynamic8": 0.5}
    assert found["mul2"] == {"int8": 0.0, "w8": -0.5, "dynamic8": 0.0}


def test_new_nodes_of_a_layer_are_its_own(seen):
    """MatMulInteger has Cast and Mul behind it, which no fusion takes in below the extended level."""
    kit, options, make = seen

    def read(graph, found):
        new = [node.name for node in graph.node if node.op_type in ("Cast", "Mul")]
        assert len(new) == 3
        return Profile({**found.nodes, **dict.fromkeys(new, 0.5)}, {}, {}, 9.0)

    plans = [make({}, {"mul0": 5.0}), make({"mul0": "dynamic8"}, {"mul0": 2.0}, read=read)]
    found = timed_costs(EMPTY, kit.graph, kit.structure, options, plans).layer_ms
    # Of the three the product of both scales hangs on no layer's node, but on the rounding of the input.
    assert found["mul0"]["dynamic8"] == pytest.approx(2.0 + 2 * 0.5 - 5.0)


def test_conversions_belong_to_the_layers_that_would_spare_them(seen):
    """x and t0 are made by nothing that could be in integers; m0 is read by Tanh, which is float always."""
    kit, options, make = seen
    plans = [
        make({}, {"mul0": 5.0}),
        make({"mul0": "int8", "mul1": "int8"}, {}, {"x": 0.3, "t0": 0.2}, {"x": 0.05, "t0": 0.07}),
    ]
    found = timed_costs(EMPTY, kit.graph, kit.structure, options, plans)
    assert found.tensor_ms[Rounded("x", "uint8")] == pytest.approx(0.3)
    assert found.tensor_ms[Rounded("t0", "uint8")] == pytest.approx(0.2)
    assert found.crossing_ms[Rounded("x", "uint8"), "mul0"] == pytest.approx(0.05)
    assert found.crossing_ms[Rounded("t0", "uint8"), "mul1"] == pytest.approx(0.07)
    assert found.tensor_ms[Rounded("t1", "uint8")] == pytest.approx(0.25)  # the middle of what is known


def test_rounding_in_its_own_range_is_paid_once_a_tensor(seen):
    kit, options, make = seen
    plans = [make({}, {}), make({"mul0": "dynamic8"}, {}, {"x": 0.4})]
    found = timed_costs(EMPTY, kit.graph, kit.structure, options, plans)
    dynamic = options.forms["dynamic8"]
    assert found.tensor_ms[Rounded("x", dynamic)] == pytest.approx(0.4)
    assert found.tensor_ms[Rounded("t0", dynamic)] == 0.0
    assert not [key for key in found.crossing_ms if key[0].form == dynamic]
    assert found.tensor_ms[Rounded("x", "uint8")] == 0.0  # no pair of a static range was seen


def test_alternating_plans_share_the_layers_of_a_format():
    forms = {"int8": "uint8", "w8": None}
    options = Options(dict.fromkeys("abcde", ("int8", "w8")), {}, forms)
    mixed = Plan({**full_plan(options, "int8").schemes, "c": "w8"})
    first, second = alternating(options, mixed, "int8")
    assert first.schemes == {"a": "int8", "d": "int8"}
    assert second.schemes == {"b": "int8", "e": "int8"}


def test_a_tune_with_schemes_of_several_formats_knows_times_and_goes_on_with_the_same(tmp_path):
    chain(tmp_path / "m.onnx", (256, 512, 512, 8))
    data = {"x": np.random.default_rng(1).normal(size=(120, 256)).astype(np.float32)}
    options = {"schemes": ["w8", "dynamic8"], "samples": 8}
    first = api.tune(tmp_path / "m.onnx", data, tmp_path / "run", **options)
    assert not any("times of layers" in note for note in first.summary.notes)
    assert len(list((tmp_path / "run" / "facts" / "profile").glob("*.json"))) == 3
    again = api.tune(tmp_path / "m.onnx", data, tmp_path / "run", **options)
    assert [c.id for c in again.candidates] == [c.id for c in first.candidates]
    fast = [c for c in first.candidates if c.origin == "programme, fast"]
    finalists = [c for c in first.candidates if isinstance(c.final, Measured) and c.origin != "float"]
    assert all(any(good.search.mse <= c.search.mse for good in finalists) for c in fast)
