"""A candidate's measurement: intervals that hold, failures that are values, and outputs of any shape."""

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantsieve import evaluation
from quantsieve.data import InputSpec
from quantsieve.data.feeds import FeedSamples
from quantsieve.evaluation import Exam, Failed, Measured, Reference, evaluate, paired_loss, run_outputs, wilson
from quantsieve.targets.ort import OrtCpu
from quantsieve.tasks import output_variance

node = helper.make_node

# --- intervals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [(10, 100, 0.0552, 0.1744), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0), (5, 10, 0.2366, 0.7634)],
)
def test_wilsons_interval_has_its_published_values(count: int, total: int, low: float, high: float) -> None:
    found = wilson(count, total)
    assert found.value == count / total
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_wilsons_interval_covers_the_true_share_at_its_rate() -> None:
    total = 60
    intervals = [wilson(count, total) for count in range(total + 1)]
    coverage = []
    for share in np.linspace(0.005, 0.995, 199):
        chances = [math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(total + 1)]
        coverage.append(sum(c for c, x in zip(chances, intervals, strict=True) if x.low <= share <= x.high))
    assert np.mean(coverage) == pytest.approx(0.95, abs=0.01)
    assert min(coverage) > 0.83  # its known worst, near 0 and 1


def test_the_paired_interval_covers_the_true_loss_at_its_rate() -> None:
    """All outcomes of 40 samples of which each is lost, gained or kept, by their exact chances."""
    total = 40
    counts = [(lost, gained) for lost in range(total + 1) for gained in range(total + 1 - lost)]
    intervals = {pair: paired_loss(np.repeat([1.0, -1.0, 0.0], [*pair, total - sum(pair)])) for pair in counts}
    coverage = []
    for lost, gained in [(0.0, 0.0), (0.01, 0.0), (0.03, 0.01), (0.05, 0.05), (0.1, 0.02), (0.3, 0.1), (0.5, 0.4)]:
        covered = 0.0
        for (k, m), found in intervals.items():
            ways = math.comb(total, k) * math.comb(total - k, m)
            chance = ways * lost**k * gained**m * (1 - lost - gained) ** (total - k - m)
            covered += chance * (found.low <= lost - gained + 1e-12 and found.high >= lost - gained - 1e-12)
        coverage.append(covered)
    assert min(coverage) > 0.93


def test_no_flipped_sample_still_leaves_doubt() -> None:
    found = paired_loss(np.zeros(100))
    # z sqrt(1) / 102: half a sample is added to gains and to losses, two to the total.
    assert (found.value, found.low, found.high) == (
        0,
        pytest.approx(-0.019215, abs=1e-6),
        pytest.approx(0.019215, abs=1e-6),
    )


def test_flips_give_the_interval_of_agresti_and_min() -> None:
    found = paired_loss(np.repeat([1.0, -1.0, 0.0], [8, 3, 89]))
    # b, c, N = 8.5, 3.5, 102: (5 +- 1.959964 sqrt(12 - 25 / 102)) / 102
    assert found.value == pytest.approx(0.05)
    assert (found.low, found.high) == (pytest.approx(-0.016862, abs=1e-5), pytest.approx(0.114901, abs=1e-5))


def test_losses_that_are_no_flips_have_the_interval_of_their_mean() -> None:
    differences = np.array([0.1, 0.3, -0.2, 0.5, 0.0])
    found = paired_loss(differences)
    half = 1.959964 * differences.std(ddof=1) / math.sqrt(5)
    assert (found.low, found.high) == (pytest.approx(0.14 - half), pytest.approx(0.14 + half))


def test_one_sample_says_nothing_about_the_mean() -> None:
    found = paired_loss(np.array([0.25]))
    assert (found.value, found.low, found.high) == (0.25, -math.inf, math.inf)


# --- candidates -----------------------------------------------------------------------------------------------------


def save(path: Path, nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], outputs: list[str]) -> Path:
    """`path`, where a model of x [batch, length] now lies; outputs declare no shape."""
    graph = helper.make_graph(
        nodes,
        "candidate",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def exam(rows: list[list[float]], batch: int = 1, task: str = "agreement") -> Exam:
    feeds = [{"x": np.array([row], np.float32)} for row in rows]
    samples = FeedSamples(feeds, [InputSpec("x", "float32", ("batch", "length"))])
    return Exam("search", samples, np.arange(len(rows)), task, batch)


ROWS = [[1.0, 2.0, 0.0], [3.0, -1.0, 0.5], [0.1, 0.2, 0.9], [2.0, 2.5, -3.0]]


def scaled(path: Path, factor: float | list[float]) -> Path:
    return save(path, [node("Mul", ["x", "k"], ["y"], "scale")], {"k": np.array(factor, np.float32)}, ["y"])


def judged(candidate: Path, reference: Path, given: Exam) -> Measured | Failed:
    outputs = run_outputs(OrtCpu(), reference, given)
    return evaluate(OrtCpu(), candidate, given, Reference(outputs, output_variance(outputs)))


def test_the_float_model_itself_loses_nothing(tmp_path: Path) -> None:
    model = scaled(tmp_path / "float.onnx", 1.0)
    found = judged(model, model, exam(ROWS))
    assert isinstance(found, Measured)
    assert (found.mse, found.sqnr_db, found.num_bad, found.num_samples) == (0, math.inf, 0, 4)
    assert found.disagreement().value == found.loss().value == 0
    assert found.score == found.reference_score == 1


def test_a_changed_label_and_a_changed_number_are_counted_by_sample(tmp_path: Path) -> None:
    found = judged(scaled(tmp_path / "c.onnx", [4.0, 1.0, 1.0]), scaled(tmp_path / "f.onnx", 1.0), exam(ROWS))
    assert isinstance(found, Measured)
    np.testing.assert_array_equal(found.agreement, [0, 1, 1, 0])  # 4 > 2, and 8 > 2.5
    assert found.disagreement().value == 0.5
    wanted = np.square(3 * np.array(ROWS)[:, 0]) / 3 / np.array(ROWS, np.float32).astype(np.float64).var()
    np.testing.assert_allclose(found.errors, wanted, rtol=1e-6)


@pytest.mark.parametrize("axes", [[1], [0, 1]])
def test_an_output_of_another_shape_is_a_failure_that_shows_both(tmp_path: Path, axes: list[int]) -> None:
    nodes = [node("ReduceMax", ["x"], ["y"], "reduce", axes=axes, keepdims=1)]
    candidate = save(tmp_path / "c.onnx", nodes, {}, ["y"])
    found = judged(candidate, scaled(tmp_path / "f.onnx", 1.0), exam(ROWS))
    assert isinstance(found, Failed)
    assert (found.kind, found.stage, found.split) == ("shape", "run", "search")
    assert "[4, 3]" in found.reason and "[4, 1]" in found.reason


def test_a_missing_output_is_a_failure(tmp_path: Path) -> None:
    candidate = save(tmp_path / "c.onnx", [node("Neg", ["x"], ["z"], "n")], {}, ["z"])
    found = judged(candidate, scaled(tmp_path / "f.onnx", 1.0), exam(ROWS))
    assert isinstance(found, Failed) and found.reason.endswith("the candidate nothing")


def test_a_file_that_does_not_load_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "c.onnx").write_bytes(b"no model")
    found = judged(tmp_path / "c.onnx", scaled(tmp_path / "f.onnx", 1.0), exam(ROWS))
    assert isinstance(found, Failed) and (found.kind, found.stage) == ("error", "load")


@pytest.mark.parametrize("batch", [1, 3])
def test_samples_with_nan_are_counted_and_lost(tmp_path: Path, batch: int) -> None:
    candidate = save(tmp_path / "c.onnx", [node("Sqrt", ["x"], ["y"], "root")], {}, ["y"])
    found = judged(candidate, scaled(tmp_path / "f.onnx", 1.0), exam(ROWS, batch))
    assert isinstance(found, Measured)
    assert found.num_bad == 2  # samples with a negative number
    np.testing.assert_array_equal(np.isinf(found.errors), [False, True, False, True])
    np.testing.assert_array_equal(found.agreement, [1, 0, 1, 0])
    assert found.sqnr_db == -math.inf


def test_nan_in_any_output_makes_a_sample_bad(tmp_path: Path) -> None:
    nodes = [node("Identity", ["x"], ["y"], "same"), node("Sqrt", ["x"], ["z"], "root")]
    candidate = save(tmp_path / "c.onnx", nodes, {}, ["y", "z"])
    reference = save(tmp_path / "f.onnx", [nodes[0], node("Abs", ["x"], ["z"], "abs")], {}, ["y", "z"])
    found = judged(candidate, reference, exam(ROWS))
    assert isinstance(found, Measured) and found.num_bad == 2


def test_batches_change_no_number(tmp_path: Path) -> None:
    candidate, reference = scaled(tmp_path / "c.onnx", [4.0, 1.0, 1.0]), scaled(tmp_path / "f.onnx", 1.0)
    one, three = (judged(candidate, reference, exam(ROWS, batch)) for batch in (1, 3))
    assert isinstance(one, Measured) and isinstance(three, Measured)
    np.testing.assert_array_equal(one.errors, three.errors)
    np.testing.assert_array_equal(one.agreement, three.agreement)


def test_classes_before_axes_of_size_one_have_labels_too(tmp_path: Path) -> None:
    widen = node("Unsqueeze", ["s", "last"], ["y"], "widen")
    constants = {"last": np.array([2, 3], np.int64)}
    files = [
        save(tmp_path / f"{i}.onnx", [node("Mul", ["x", "k"], ["s"], "scale"), widen],
             {**constants, "k": np.array(k, np.float32)}, ["y"])
        for i, k in enumerate(([4.0, 1.0, 1.0], [1.0, 1.0, 1.0]))
    ]  # fmt: skip
    found = judged(*files, exam(ROWS))
    assert isinstance(found, Measured)
    np.testing.assert_array_equal(found.agreement, [0, 1, 1, 0])


@pytest.mark.parametrize("axes", [[1], [1, 2]])
def test_a_map_of_one_channel_has_no_labels_and_ends_nothing(tmp_path: Path, axes: list[int]) -> None:
    """[n, 1, 3] has labels on its last axis; [n, 1, 1, 3] -> [n, 1, 3, 3] has none."""
    nodes = [node("Unsqueeze", ["x", "a"], ["u"], "u"), node("Expand", ["u", "shape"], ["y"], "e")]
    shape = [1, 2, 3] if axes == [1] else [1, 1, 3, 3]
    constants = {"a": np.array(axes, np.int64), "shape": np.array(shape, np.int64)}
    model = save(tmp_path / "f.onnx", nodes, constants, ["y"])
    found = judged(model, model, exam(ROWS, task="fidelity"))
    assert isinstance(found, Measured)
    np.testing.assert_array_equal(found.agreement, np.ones(4))


def test_outputs_whose_shapes_vary_between_samples_are_padded_with_zeros(tmp_path: Path) -> None:
    given = exam([[1.0, 2.0], [3.0, 4.0, 5.0, 6.0], [7.0]])
    found = run_outputs(OrtCpu(), scaled(tmp_path / "f.onnx", 2.0), given)["y"]
    np.testing.assert_array_equal(found, [[2, 4, 0, 0], [6, 8, 10, 12], [14, 0, 0, 0]])


def test_scalar_outputs_are_stacked_one_a_sample(tmp_path: Path) -> None:
    model = save(tmp_path / "f.onnx", [node("ReduceSum", ["x"], ["y"], "sum", keepdims=0)], {}, ["y"])
    found = run_outputs(OrtCpu(), model, exam([[1.0, 2.0], [3.0, 4.0]]))["y"]
    np.testing.assert_array_equal(found, [3, 7])


@pytest.mark.parametrize("num_bytes", [1, 100, 1 << 20])
def test_samples_keep_their_order_however_many_go_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(evaluation, "REQUEST_BYTES", num_bytes)
    graph = helper.make_graph(
        [node("Neg", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    inputs = np.arange(60, dtype=np.float32).reshape(20, 1, 3)
    samples = FeedSamples([{"x": x} for x in inputs], [InputSpec("x", "float32", ("n", 3))])
    exam = Exam("search", samples, np.arange(19, -1, -1), "fidelity", 3)
    found = run_outputs(OrtCpu(threads=2), tmp_path / "m.onnx", exam)
    assert np.array_equal(found["y"], -inputs[::-1, 0])
