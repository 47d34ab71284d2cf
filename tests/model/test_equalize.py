"""Scales of channels: what was unbalanced on purpose comes back, bounds of Clips are kept, the rest stays as it is."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from chains import Chain, feeds_of, found_in, mobile, outputs
from planned import Kit, kit_of
from quantsieve.model import equalize
from quantsieve.model.joints import Joint, find_joints
from quantsieve.simulate import Simulation


def kit(model: ir.Model) -> Kit:
    feeds = {"x": np.concatenate([feed["x"] for feed in feeds_of(16)])}
    return kit_of(ir.to_proto(model), feeds)


def joints_of(found: Kit) -> tuple[Joint, ...]:
    return find_joints(found.graph, found.structure)


def moments_of(found: Kit) -> equalize.Moments:
    return equalize.measure(found.executor, joints_of(found), [(found.feeds, 16)])


def scales_of(found: Kit) -> dict[str, np.ndarray]:
    return equalize.find_scales(found.graph, found.structure, joints_of(found), moments_of(found))


def full_error(found: Kit, scheme: str = "int8") -> float:
    """Relative squared error of the model with every layer quantized."""
    simulated = Simulation(found.executor, found.parts(), found.plan(scheme=scheme)).run(found.feeds)
    exact = found.executor.forward(found.feeds)
    made, wanted = simulated["logits"].numpy(), exact["logits"].numpy()  # as long as their values live
    return float(np.square(made - wanted).mean() / wanted.var())


def spoiled(model: ir.Model, joints: tuple[Joint, ...], seed: int = 3) -> ir.Model:
    """A quarter of the channels of each joint made 1/8 to 1/64 as large, which changes nothing that is computed."""
    draw = np.random.default_rng(seed)
    scales = {}
    for joint in joints:
        small = 2.0 ** draw.integers(-6, -2, joint.num_channels)
        scales[joint.maker.layer] = np.where(draw.random(joint.num_channels) < 0.25, small, 1.0).astype(np.float32)
    return equalize.equalized(model, joints, scales)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_channels_that_were_made_small_on_purpose_come_back(tmp_path: Path, seed: int) -> None:
    model, joints = found_in(mobile(tmp_path / "m.onnx", seed))
    bad = spoiled(model, joints)
    good = equalize.equalized(bad, joints, scales_of(kit(bad)))
    before, made_bad, made_good = (full_error(kit(candidate)) for candidate in (model, bad, good))
    assert made_bad > 20 * before  # else nothing was spoiled
    assert made_good < 4 * before
    for wanted, found in zip(outputs(model, feeds_of()), outputs(good, feeds_of()), strict=True):
        np.testing.assert_array_equal(wanted, found)


def test_scales_are_powers_of_two(tmp_path: Path) -> None:
    model, joints = found_in(mobile(tmp_path / "m.onnx"))
    scales = scales_of(kit(spoiled(model, joints)))
    assert scales
    for found in scales.values():
        np.testing.assert_array_equal(np.exp2(np.rint(np.log2(found))), found)


def test_channels_stay_away_from_the_bound_of_their_clip(tmp_path: Path) -> None:
    model, joints = found_in(mobile(tmp_path / "m.onnx", bound=6.0))
    bad = kit(spoiled(model, joints))
    scales, peaks = scales_of(bad), moments_of(bad).peaks
    bounded = [joint for joint in joints_of(bad) if joint.bound == 6.0 and joint.maker.layer in scales]
    assert bounded
    for joint in bounded:
        own, peak = scales[joint.maker.layer], peaks[joint.value]
        is_near = peak * equalize.HEADROOM > joint.bound
        assert (own[is_near] == 1).all()
        assert (own * peak * equalize.HEADROOM)[~is_near].max() <= joint.bound
    good = equalize.equalized(bad.graph.model, joints, scales)
    for wanted, found in zip(outputs(bad.graph.model, feeds_of()), outputs(good, feeds_of()), strict=True):
        np.testing.assert_array_equal(wanted, found)


def test_a_model_that_is_balanced_already_is_left_alone(tmp_path: Path) -> None:
    chain = Chain()
    for _ in range(3):
        chain.conv(8, 3).op("Relu")
        weight = list(chain.constants.values())[-2]
        weight[...] = np.sign(weight)  # equal ranges of all weights
        list(chain.constants.values())[-1][...] = 0
    model, _ = found_in(chain.op("GlobalAveragePool").op("Flatten").save(tmp_path / "m.onnx"))
    assert scales_of(kit(model)) == {}


def test_moments_do_not_depend_on_batches(tmp_path: Path) -> None:
    model, joints = found_in(mobile(tmp_path / "m.onnx"))
    found = kit(model)
    whole = moments_of(found)
    parts = [({"x": found.feeds["x"][part]}, 0) for part in (slice(0, 3), slice(3, 16))]
    apart = equalize.measure(found.executor, joints, parts)
    # The kernels of two batch sizes may add in another order; float32 sums of at most 144 products.
    for name, peaks in whole.peaks.items():
        np.testing.assert_allclose(apart.peaks[name], peaks, rtol=1e-5)
        np.testing.assert_allclose(apart.squares[name], whole.squares[name], rtol=1e-5)


def test_channels_that_calibration_never_saw_are_not_blown_up(tmp_path: Path) -> None:
    chain = Chain().conv(8, 3).op("Relu").conv(8, 3).op("GlobalAveragePool").op("Flatten")
    first = list(chain.constants.values())
    first[0][3], first[1][3] = 1e-12, -1.0  # always below zero
    model, joints = found_in(chain.save(tmp_path / "m.onnx"))
    found = kit(model)
    own = scales_of(found).get(joints[0].maker.layer, np.ones(8))
    peaks = moments_of(found).peaks[joints[0].value]
    assert peaks[3] == 0
    assert own[3] * equalize.LEAST * peaks.max() <= (own * peaks).max()
