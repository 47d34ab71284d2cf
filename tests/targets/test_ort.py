"""onnxruntime as a target: its outputs, its refusals and what a measurement depends on."""

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import tiny_models

from quantsieve.errors import UsageError
from quantsieve.targets.base import TargetFailure, Timing
from quantsieve.targets.ort import OrtCpu, processor_and_features

X = {"x": np.array([1, 2], np.float32)}


def test_all_outputs_come_back_by_name_with_their_types(tmp_path: Path) -> None:
    predict = OrtCpu().load(tiny_models.strings(tmp_path / "s.onnx"))
    outputs = predict({"words": np.array(["naïve", ""], object), "x": np.array([1, 2], np.float32)})
    assert list(outputs) == ["same_words", "best"]
    assert outputs["same_words"].tolist() == ["naïve", ""]
    assert outputs["best"].dtype == np.int64


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (tiny_models.not_onnx, "Protobuf"),
        (tiny_models.unknown_op, "Frobnicate"),
        (tiny_models.double_conv, "NOT_IMPLEMENTED"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_in_the_runtimes_words(
    tmp_path: Path, broken: object, words: str
) -> None:
    path = broken(tmp_path / "broken.onnx")  # type: ignore[operator]
    with pytest.raises(TargetFailure, match=words) as caught:
        OrtCpu().load(path)
    assert (caught.value.kind, caught.value.stage) == ("error", "load")


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetFailure, match=r"absent\.onnx"):
        OrtCpu().load(tmp_path / "absent.onnx")


@pytest.mark.parametrize(
    "feeds", [{}, {"z": X["x"]}, {"x": np.array([1, 2])}, {"x": np.zeros((1, 1), np.float32)}, {"x": None}]
)
def test_feeds_that_do_not_fit_are_refused(tmp_path: Path, feeds: dict[str, np.ndarray]) -> None:
    predict = OrtCpu().load(tiny_models.scaled(tmp_path / "m.onnx"))
    with pytest.raises(TargetFailure) as caught:
        predict(feeds)
    assert caught.value.stage == "run"


def test_an_error_of_a_kernel_names_its_node(tmp_path: Path) -> None:
    predict = OrtCpu().load(tiny_models.gather(tmp_path / "g.onnx"))
    with pytest.raises(TargetFailure, match="gather") as caught:
        predict({"index": np.array([7])})
    assert (caught.value.kind, caught.value.stage) == ("error", "run")


def test_a_session_has_the_users_defaults_but_for_threads() -> None:
    options = OrtCpu(threads=2)._options()
    default = onnxruntime.SessionOptions()
    assert options.intra_op_num_threads == 2
    for name in ("graph_optimization_level", "execution_mode", "enable_cpu_mem_arena", "enable_mem_pattern"):
        assert getattr(options, name) == getattr(default, name)


def test_runs_side_by_side_keep_their_order_and_their_bits(tmp_path: Path) -> None:
    path = tiny_models.float_layer_between_integers(tmp_path / "m.onnx", guard="Sum")
    shape = onnxruntime.InferenceSession(str(path)).get_inputs()[0].shape
    draw = np.random.default_rng(0)
    inputs = [{"x": draw.standard_normal(shape, np.float32)} for _ in range(20)]
    one, many = (OrtCpu(threads=threads).load(path).each(inputs) for threads in (1, 4))
    assert [list(map(np.ndarray.tobytes, found.values())) for found in one] == [
        list(map(np.ndarray.tobytes, found.values())) for found in many
    ]


def test_session_options_reach_the_session(tmp_path: Path) -> None:
    # The trap of RUNTIME: with this option no Q/DQ pair is fused, so the trapped layer stays float.
    path = tiny_models.float_layer_between_integers(tmp_path / "m.onnx", guard=None)
    audit = OrtCpu(session_options=(("session.disable_quant_qdq", "1"),)).audit(path)
    assert dict(audit.ran)["conv2"] == "float"


@pytest.mark.parametrize("level", ["off", "basic", "extended", "all"])
def test_every_level_computes_the_same_float_network(tmp_path: Path, level: str) -> None:
    path = tiny_models.float_network(tmp_path / "m.onnx")
    x = {"x": np.random.default_rng(0).normal(size=tiny_models.IMAGE).astype(np.float32)}
    reference = OrtCpu(optimization="off").load(path)(x)["y"]
    # Sums of at most 16 * 9 float32 products in another order, in two layers.
    tolerance = 2 * 144 * np.finfo(np.float32).eps * np.abs(reference).max()
    np.testing.assert_allclose(OrtCpu(optimization=level).load(path)(x)["y"], reference, atol=tolerance)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"optimization": "most"}])
def test_options_out_of_range_are_wrong_usage(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        OrtCpu(**wrong)  # type: ignore[arg-type]


def test_the_environment_tells_apart_what_changes_a_measurement() -> None:
    base = OrtCpu().environment()
    assert base["version"] == onnxruntime.__version__
    others = [OrtCpu(threads=2), OrtCpu(optimization="off"), OrtCpu(session_options=(("a", "b"),))]
    assert all(other.environment() != base for other in others)


X86 = "processor : 0\nmodel name : A Processor\nflags : fpu avx2 sse2 avx512_vnni\n\nmodel name : Another\n"
ARM = "processor : 0\nFeatures : fp asimd i8mm asimddp\nCPU implementer : 0x41\nCPU part : 0xd0c\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [(X86, ("A Processor", "avx2 avx512_vnni")), (ARM, ("0x41 0xd0c", "asimd asimddp i8mm"))],
)
def test_processor_and_features_are_read_from_cpuinfo(tmp_path: Path, text: str, expected: tuple[str, str]) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert processor_and_features(cpuinfo) == expected


def test_a_system_without_cpuinfo_still_has_a_processor(tmp_path: Path) -> None:
    name, features = processor_and_features(tmp_path / "absent")
    assert name and features == ""


def test_latency_gives_every_model_one_time_a_round(tmp_path: Path) -> None:
    paths = [tiny_models.scaled(tmp_path / f"{i}.onnx", i) for i in range(3)]
    times = OrtCpu().latency(paths, [X], Timing(rounds=7, warmup_s=0.01))
    assert [len(ms) for ms in times] == [7, 7, 7]
    assert min(map(min, times)) > 0


def test_an_audit_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models.float_network(tmp_path / "m.onnx")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    OrtCpu().audit(path)
    assert os.listdir(tmp_path / "temporary") == []
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "temporary"]


def test_weights_beside_the_file_are_found_and_audited(tmp_path: Path) -> None:
    path = tiny_models.external_weights(tmp_path / "external.onnx")
    assert OrtCpu().load(path)({"x": np.zeros(4096, np.float32)})["y"].max() == 1
    assert OrtCpu().audit(path).ran == (("add", "float"),)


def test_the_optimized_graph_is_read_without_its_weights(tmp_path: Path) -> None:
    # A protobuf holds 2 GB at most, so a large model could not be audited with its weights inside.
    path = tiny_models.float_network(tmp_path / "m.onnx")
    weights = {tensor.name: tensor for tensor in OrtCpu()._optimized(path, "extended").initializer}
    assert weights["w2"].data_location == onnx.TensorProto.EXTERNAL
