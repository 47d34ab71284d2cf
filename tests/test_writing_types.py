"""Static int8 in other integers: signed and symmetric activations. What is simulated is what the file does."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import planned
from planned import Kit, gap
from quantsieve.model import prepare
from quantsieve.operators import as_operators
from quantsieve.plan import full_plan
from quantsieve.schemes._formats import Formats
from quantsieve.simulate import Simulation
from quantsieve.targets.audit import audit_graph, audit_layers
from quantsieve.writing import write_plan

FORMATS = {
    "u8": Formats(),
    "s8": Formats(activation_type="s8"),
    "s8-symmetric": Formats(activation_type="s8", symmetric_activations=True),
    "u8-symmetric": Formats(symmetric_activations=True),
    "s7": Formats(weight_type="s7"),
    "asymmetric": Formats(asymmetric_weights=True),
    "s8-asymmetric": Formats(activation_type="s8", asymmetric_weights=True),
    "s7-asymmetric": Formats(weight_type="s7", asymmetric_weights=True),
}
SYMMETRIC = [name for name in FORMATS if FORMATS[name].symmetric_activations]
every_format = pytest.mark.parametrize("formats", FORMATS)


@cache
def kit_in(name: str, formats: str) -> Kit:
    kit = planned.demo(16) if name == "demo" else planned.KITS[name]()
    return kit.under(FORMATS[formats])


@cache
def exact_type() -> str:
    return planned.exact_weight_type()


@pytest.mark.parametrize("name", planned.KITS)
@every_format
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_does_what_is_simulated_at_every_level(tmp_path: Path, name: str, formats: str, seed: int) -> None:
    kit = kit_in(name, formats)
    plan = kit.random_plan(seed) if seed else full_plan(kit.options, "int8-channel")
    path = planned.save_plan(tmp_path, kit, plan, exact_type())
    onnx.checker.check_model(path, full_check=True)
    simulated = Simulation(kit.executor, kit.parts(), plan).run(kit.feeds)
    wanted = {out.name: simulated[out.name].numpy().copy() for out in kit.graph.outputs}
    for level in planned.LEVELS:
        # An integer kernel may round half a step otherwise, which the layers behind it pass on.
        assert gap(planned.run_file(path, kit.feeds, level), wanted) <= 2, level


def ran(folder: Path, kit: Kit, is_int8_allowed: bool) -> set[str]:
    """Precisions of the layers of full int8, in a session that keeps signed pairs or turns them into unsigned ones."""
    path, made = planned.save_plan(folder, kit, kit.plan(), exact_type()), folder / "optimized.onnx"
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(made)
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdqisint8allowed", "1" if is_int8_allowed else "0")
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    audit = audit_graph(onnx.load(path).graph, onnx.load(made).graph)
    return set(audit_layers(audit, {x.name: x.nodes[:1] for x in kit.structure.quantizable}).values())


@pytest.mark.parametrize("name", planned.KITS)
@every_format
def test_all_layers_run_as_integers_where_signed_ones_are_kept(tmp_path: Path, name: str, formats: str) -> None:
    assert ran(tmp_path, kit_in(name, formats), is_int8_allowed=True) == {"int8"}


@pytest.mark.parametrize("name", planned.KITS)
@every_format
def test_where_signed_ones_are_turned_unsigned_only_graphs_with_branches_have_float_layers(
    tmp_path: Path, name: str, formats: str
) -> None:
    """The default on x86-64 (1.32): a pair is turned only where one node alone reads it."""
    is_signed = FORMATS[formats].activation_type == "s8"
    has_branches = name != "reshaped"
    found = ran(tmp_path, kit_in(name, formats), is_int8_allowed=False)
    assert found == ({"float", "int8"} if is_signed and has_branches else {"int8"})


@every_format
def test_every_rounded_tensor_has_the_type_and_the_zero_point_that_was_asked_for(tmp_path: Path, formats: str) -> None:
    kit, asked = kit_in("convolutions", formats), FORMATS[formats]
    model = onnx.load(planned.save_plan(tmp_path, kit, kit.plan()))
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    zeros = [constants[node.input[2]] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert {zero.dtype for zero in zeros} == {np.dtype("int8" if asked.activation_type == "s8" else "uint8")}
    middle = 0 if asked.activation_type == "s8" else 128
    assert ({int(zero) for zero in zeros} == {middle}) == asked.symmetric_activations


@pytest.mark.parametrize("weights", ["s8", "u8"])
def test_signed_and_unsigned_activations_hold_the_same_numbers(tmp_path: Path, weights: str) -> None:
    runs = []
    for formats in ("u8", "s8"):
        kit = kit_in("convolutions", formats)
        path = planned.save_plan(tmp_path, kit, kit.plan(), weights)
        runs.append(planned.run_file(path, kit.feeds, "off"))
    for name, array in runs[0].items():
        np.testing.assert_array_equal(runs[1][name], array)


@pytest.mark.parametrize("limit", [6.0, np.inf])
def test_a_pair_in_front_of_relu_or_clip_changes_no_number(limit: float) -> None:
    """The simulation rounds behind the activation alone; between 0 and a limit rounding changes places with it."""
    x = np.linspace(-8, 8, 20001).astype(np.float32)
    for scale in np.linspace(0.01, 0.09, 31).astype(np.float32):
        inside, alone = rounded(np.clip(rounded(x, scale), 0, np.float32(limit)), scale), np.clip(x, 0, limit)
        np.testing.assert_array_equal(inside, rounded(alone, scale))


def rounded(values: np.ndarray, scale: np.float32) -> np.ndarray:
    return np.clip(np.rint(values / scale), -128, 127).astype(np.float32) * scale


@every_format
@pytest.mark.parametrize("seed", range(3))
def test_predicted_bytes_are_those_of_the_file(formats: str, seed: int) -> None:
    kit = kit_in("demo", formats)
    predicted, found = planned.bytes_changed(kit, kit.random_plan(seed))
    assert predicted == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("opset", [10, 12])
@every_format
def test_a_model_whose_opset_cannot_be_lifted_takes_all_but_scales_per_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opset: int, formats: str
) -> None:
    monkeypatch.setattr(prepare, "MIN_OPSET", opset)
    kit = planned.at_opset(opset).under(FORMATS[formats])
    assert kit.graph.opset == opset
    refused = {scheme.name: scheme.refusal(kit.structure.layer("conv"), opset) for scheme in kit.schemes}
    assert refused["int8"] is None
    assert refused["int8-channel"] == f"int8-channel needs opset 13, the model has {opset}"
    pairs = write_plan(kit.parts(exact_type()), kit.plan())
    wanted = Simulation(kit.executor, kit.parts(), kit.plan()).run(kit.feeds)["y"].numpy().copy()
    for model in (pairs, as_operators(pairs)):
        onnx.checker.check_model(model)
        onnx.save(model, tmp_path / "old.onnx")
        for level in planned.LEVELS:
            assert gap(planned.run_file(tmp_path / "old.onnx", kit.feeds, level), {"y": wanted}) <= 1, level
