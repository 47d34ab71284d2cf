"""Processors without VNNI: signed weights lose large sums there, and the type that the probe picks does not."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from benchmarks.saturation import emulate

import planned
from planned import Kit
from quantsieve.schemes._formats import Formats
from quantsieve.targets.saturation import EXACT, probe_input, saturation_model

emulated = pytest.mark.skipif(
    not emulate.is_available(), reason=f"{emulate.EMULATOR} is not installed: no processor without VNNI to emulate"
)


# A float32 sum of 1024 terms rounds 1023 times, each by at most 2^-24 of it; integer kernels add exactly.
SUM_ERROR = 1024 * 2.0**-24


@pytest.fixture(scope="module")
def kit() -> Kit:
    return planned.saturating()


def test_the_file_of_the_chosen_weight_type_keeps_the_largest_sums(tmp_path: Path, kit: Kit) -> None:
    path = planned.save_plan(tmp_path, kit, kit.plan(), planned.exact_weight_type())
    wanted = planned.run_file(path, kit.feeds, "off")["y"]
    assert wanted.max() == pytest.approx(10.24, rel=SUM_ERROR)
    np.testing.assert_allclose(planned.run_file(path, kit.feeds)["y"], wanted, rtol=SUM_ERROR)


@emulated
@pytest.mark.slow
def test_without_vnni_signed_weights_saturate_and_unsigned_ones_do_not(tmp_path: Path, kit: Kit) -> None:
    feeds = {"x": kit.feeds["x"], "probe-s8": probe_input("MatMul"), "probe-u8": probe_input("MatMul")}
    np.savez(tmp_path / "feeds.npz", **feeds)
    onnx.save(saturation_model("MatMul", np.int8), tmp_path / "probe-s8.onnx")
    onnx.save(saturation_model("MatMul", np.uint8), tmp_path / "probe-u8.onnx")
    for kind in ("s8", "u8"):
        path = planned.save_plan(tmp_path, kit, kit.plan(), kind, f"{kind}.onnx")
        signed = kit.under(Formats(activation_type="s8"))
        planned.save_plan(tmp_path, signed, signed.plan(), kind, f"signed-{kind}.onnx")
    for other in (Formats("s7"), Formats("s7", asymmetric_weights=True), Formats("s7", "s8")):
        half = kit.under(other)
        planned.save_plan(tmp_path, half, half.plan(), "s7", f"s7-{other.activation}-{other.weights.most}.onnx")
    wanted = planned.run_file(path, kit.feeds, "off")["y"]
    found = emulate.answers(tmp_path, emulated=True)
    # 32767 / (2 * 255 * 127) = 0.506, read in 255 steps.
    assert found["probe-s8"].min() / EXACT == pytest.approx(32767 / 64770, abs=0.5 / 255)
    assert found["probe-u8"].min() == EXACT
    for kind in ("", "signed-"):
        np.testing.assert_allclose(found[f"{kind}u8"], wanted, rtol=SUM_ERROR)
        assert found[f"{kind}s8"].max() / wanted.max() == pytest.approx(32767 / 64770, rel=1e-3)
    halves = [name for name in found if name.startswith("s7")]
    assert len(halves) == 3
    for name in halves:
        np.testing.assert_allclose(found[name], wanted, rtol=SUM_ERROR)


def test_answers_of_this_processor_are_those_of_a_session_here(tmp_path: Path, kit: Kit) -> None:
    path = planned.save_plan(tmp_path, kit, kit.plan())
    np.savez(tmp_path / "feeds.npz", x=kit.feeds["x"])
    found = emulate.answers(tmp_path, emulated=False)
    np.testing.assert_array_equal(found["plan"], planned.run_file(path, kit.feeds)["y"])
