"""What a user can get wrong: one paragraph that names it, exit code 1 (2 for wrong usage), nothing lost."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from PIL import Image

import small_network
from quantsieve import api, cli
from quantsieve.data import split
from quantsieve.errors import QuantsieveError, UsageError
from quantsieve.run.store import Store

QUICK = ("--samples", "8", "--max-trials", "1", "--quiet")


@pytest.fixture
def refused(capsys):
    """Runs a command that must fail with one paragraph, and gives the paragraph."""

    def run(*arguments: object, code: int = 1) -> str:
        assert cli.main([str(argument) for argument in arguments]) == code
        said = capsys.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err and "Unexpected error" not in said.err
        if code == 1:
            assert said.err.startswith("quantsieve: Expected ") and said.err.count("\n") == 1
        return " ".join(said.err.split())

    return run


@pytest.fixture
def tune(refused, small_model, tmp_path):
    """The refusal of a tune of the small model, or of another, with these data."""

    def run(data: object, *options: object, model: Path = small_model, code: int = 1) -> str:
        return refused("tune", model, "--data", data, "-o", tmp_path / "run", *QUICK, *options, code=code)

    return run


# --- models ---------------------------------------------------------------------------------------------------


def test_a_missing_model_is_named(tune, small_data, tmp_path):
    assert "absent.onnx" in tune(small_data, model=tmp_path / "absent.onnx")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"# a text\n" * 20, b"\x80\x02}q\x00."], ids=["empty", "text", "pickle"])
def test_a_file_that_is_no_onnx_model_is_named(tune, small_data, tmp_path, content):
    path = tmp_path / "notes.onnx"
    path.write_bytes(content)
    said = tune(small_data, model=path)
    assert "notes.onnx" in said and "ONNX" in said


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_model_is_named(tune, small_model, small_data, tmp_path, share):
    path, content = tmp_path / "cut.onnx", small_model.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "cut.onnx" in tune(small_data, model=path)


def test_a_folder_in_the_place_of_a_model_is_named(tune, small_data, tmp_path):
    assert str(tmp_path.name) in tune(small_data, model=tmp_path)


def test_a_model_without_a_quantizable_layer_is_handed_on_with_a_note(tmp_path, capsys):
    model = small_network.unquantizable(tmp_path / "plain.onnx")
    data = small_network.save_arrays(tmp_path / "d.npz", {"x": small_network.images(40)})
    run, out = tmp_path / "run", tmp_path / "copy.onnx"
    assert cli.main(["tune", str(model), "--data", str(data), "-o", str(run), "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "no layer of this model can be quantized" in " ".join((shown.out + shown.err).split())
    found = api.report(run)
    assert [c.origin for c in found.candidates] == ["float"] and found.recommended is not None
    api.export(run, out)
    assert [node.op_type for node in onnx.load(out).graph.node] == ["ReduceMean", "Tanh"]


def test_nan_in_the_float_outputs_is_refused(tune, tmp_path, small_data):
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], "mean", axes=[2, 3], keepdims=0),
        helper.make_node("Log", ["m"], ["l"], "log"),
        helper.make_node("Gemm", ["l", "w"], ["logits"], "dense"),
    ]
    weights = np.ones((3, small_network.CLASSES), np.float32)
    model = small_network.save_model(tmp_path / "log.onnx", nodes, {"w": weights})
    said = tune(small_data, model=model)
    assert "finite" in said.lower() or "nan" in said.lower()


def test_nan_in_the_data_is_refused_with_the_sample(tune, small_model, tmp_path):
    arrays = small_network.arrays(small_model)
    arrays["x"][17, 0, 0, 0] = np.nan
    said = tune(small_network.save_arrays(tmp_path / "d.npz", arrays))
    assert "nan" in said.lower() or "finite" in said.lower()


def test_one_nan_among_the_final_outputs_is_refused_or_counted(small_model, tmp_path):
    """A float model that is finite on most samples: said, never silently averaged."""
    x = np.abs(small_network.images(60)) + 0.1
    x[33] = -x[33]
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], "mean", axes=[2, 3], keepdims=0),
        helper.make_node("Log", ["m"], ["l"], "log"),
        helper.make_node("Gemm", ["l", "w"], ["logits"], "dense"),
    ]
    weights = np.arange(12).reshape(3, small_network.CLASSES).astype(np.float32)
    model = small_network.save_model(tmp_path / "log.onnx", nodes, {"w": weights})
    with pytest.raises(QuantsieveError, match=r"(?i)finite|nan"):
        api.tune(model, {"x": x}, tmp_path / "run", samples=8, max_trials=1)


@pytest.mark.parametrize("scoring", [{}, {"mode": "rescue"}, {"metric": "mse"}, {"metric": "kl_div"}], ids=str)
def test_nan_in_the_float_outputs_of_scan_samples_is_refused(tmp_path, scoring):
    """Calibration, of its own here, does not see the sample."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], "mean", axes=[2, 3], keepdims=0),
        helper.make_node("Log", ["m"], ["l"], "log"),
        helper.make_node("Gemm", ["l", "w"], ["logits"], "dense"),
    ]
    weights = np.arange(12).reshape(3, small_network.CLASSES).astype(np.float32)
    model = small_network.save_model(tmp_path / "log.onnx", nodes, {"w": weights})
    own = np.abs(small_network.images(40)) + 0.1
    x = own.copy()
    x[split(40, 0, calibration=0).search[3]] *= -1
    with pytest.raises(QuantsieveError, match="finite float outputs 'logits'"):
        api.scan(model, {"x": x}, output=tmp_path / "scan.json", calibration_data={"x": own}, **scoring)
    assert not (tmp_path / "scan.json").exists()


def test_nan_in_the_float_outputs_of_calibration_samples_is_refused_with_the_count(small_model, small_data, tmp_path):
    own = {"x": small_network.images(20)}
    own["x"][3] = np.nan
    with pytest.raises(QuantsieveError, match="NaN or infinity in 1 of 20"):
        api.tune(small_model, small_data, tmp_path / "run", calibration_data=own, samples=8)


# --- data -----------------------------------------------------------------------------------------------------


def wrong(name: str) -> dict[str, np.ndarray]:
    x = small_network.images(60)
    return {
        "name": {"pictures": x, "labels": np.zeros(60, np.int64)},
        "shape": {"x": x[:, :1]},
        "dtype": {"x": (x * 10).astype(np.int64)},
        "lengths": {"x": x, "labels": np.zeros(59, np.int64)},
        "labels": {"x": x, "labels": np.full(60, small_network.CLASSES)},
        "negative": {"x": x, "labels": np.full(60, -1)},
        "few": {"x": x[:9]},
        "none": {"x": x[:0]},
    }[name]


@pytest.mark.parametrize(
    "name, words",
    [
        ("name", ["pictures", "x"]),
        ("shape", ["3, 8, 8", "1, 8, 8"]),
        ("dtype", ["float32", "int64"]),
        ("lengths", ["60", "59"]),
        ("labels", ["4"]),
        ("negative", ["-1"]),
        ("few", ["9", "samples"]),
        ("none", ["0"]),
    ],
)
def test_wrong_arrays_are_refused_with_what_was_expected_and_found(tune, tmp_path, name, words):
    said = tune(small_network.save_arrays(tmp_path / "d.npz", wrong(name)))
    normal = re.sub(r"[×x]", "x", said)
    assert all(word in normal for word in words), said


def test_a_wrong_label_of_a_final_sample_is_found_before_the_search(small_model, tmp_path):
    refusals = 0
    for number in range(0, 60, 10):
        arrays = small_network.arrays(small_model, count=60)
        arrays["labels"][number] = 77
        run = tmp_path / f"run{number}"
        try:
            api.tune(small_model, arrays, run, samples=8, max_trials=1)
        except QuantsieveError as error:
            assert "77" in str(error)
            assert not {"evaluate", "sensitivity"} & {stage.name for stage in (run / "facts").iterdir()}
            refusals += 1
    assert refusals >= 3  # labels of calibration samples are not used


def test_absent_data_are_named(tune, tmp_path):
    assert "absent.npz" in tune(tmp_path / "absent.npz")


def test_a_truncated_npz_is_named(tune, small_data, tmp_path):
    path = tmp_path / "cut.npz"
    path.write_bytes(small_data.read_bytes()[:1000])
    assert "cut.npz" in tune(path)


def test_an_empty_data_folder_is_named(tune, tmp_path):
    (tmp_path / "pictures").mkdir()
    assert "pictures" in tune(tmp_path / "pictures")


@pytest.fixture
def pictures(tmp_path):
    """A folder of class folders, 15 images each, one of them unreadable."""
    draw = np.random.default_rng(0)
    for label in range(4):
        folder = tmp_path / "pictures" / f"class{label}"
        folder.mkdir(parents=True)
        for i in range(15):
            Image.fromarray(draw.integers(0, 255, (8, 8, 3), np.uint8)).save(folder / f"{i}.png")
    (tmp_path / "pictures/class2/7.png").write_bytes(b"no image")
    return tmp_path / "pictures"


def test_an_unreadable_image_is_named(tune, pictures):
    said = tune(pictures)
    assert "7.png (not an image that can be decoded)" in said


def test_skip_bad_leaves_unreadable_images_out_and_counts_them(small_model, pictures, tmp_path):
    found = api.tune(small_model, pictures, tmp_path / "run", skip_bad=True, samples=8, max_trials=1)
    splits = found.summary.splits
    assert splits.calibration + splits.search + splits.final == 59
    assert any("1" in note and "7.png" in note for note in found.summary.notes), found.summary.notes


def test_too_few_calibration_samples_of_their_own_are_refused(small_model, small_data, tmp_path):
    few = {"x": small_network.images(3)}
    with pytest.raises(QuantsieveError, match="4 calibration samples, found 3"):
        api.tune(small_model, small_data, tmp_path / "run", calibration_data=few)


# --- where results go -----------------------------------------------------------------------------------------


def test_an_output_folder_below_a_file_is_refused(refused, small_model, small_data, tmp_path):
    (tmp_path / "file").write_text("here")
    said = refused("tune", small_model, "--data", small_data, "-o", tmp_path / "file/run", *QUICK)
    assert "file" in said
    assert (tmp_path / "file").read_text() == "here"


def test_a_model_below_a_file_is_refused_with_the_place(refused, small_model, small_data, tmp_path):
    (tmp_path / "file").write_text("here")
    out = tmp_path / "file/q.onnx"
    assert "q.onnx" in refused("quantize", small_model, "--data", small_data, "-o", out, "--quiet")
    scan = ("scan", small_model, "--data", small_data, "-o", tmp_path / "file/s.json", "--samples", 4, "--quiet")
    assert "s.json" in refused(*scan)


def test_a_run_folder_of_another_spec_is_refused_and_stays(refused, small_model, small_data, whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run.run, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    said = refused("tune", small_model, "--data", small_data, "-o", run, "--samples", 9, "--quiet")
    assert "samples: 8 -> 9" in said and str(run) in said
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "lock"} == before


def test_a_run_folder_in_use_is_refused(refused, small_model, small_data, tmp_path):
    with Store.open(tmp_path / "run", {}):
        said = refused("tune", small_model, "--data", small_data, "-o", tmp_path / "run", *QUICK)
    assert "process" in said


def test_a_folder_without_results_has_no_report(refused, small_model, tmp_path):
    assert "run" in refused("report", tmp_path / "absent")
    with Store.open(tmp_path / "run", {}):
        pass
    assert "results" in refused("report", tmp_path / "run")
    assert "results" in refused("export", tmp_path / "run", "-o", tmp_path / "m.onnx")


@pytest.fixture
def small_disk(tmp_path):
    """Mounts file systems of some kilobytes; skips where that is not allowed."""
    mounted = []

    def mount(kilobytes: int) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode != 0:
            pytest.skip("a full disk needs a small file system, and mounting is not allowed here")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("kilobytes", [16, 40, 80, 140])
def test_a_full_disk_is_one_paragraph_and_loses_nothing(
    refused, small_disk, small_model, small_data, whole_run, kilobytes
):
    """Then the same command, with more room, ends like a run that never met a full disk."""
    disk = small_disk(kilobytes)
    arguments = ("tune", small_model, "--data", small_data, "-o", disk / "run", "--samples", 8, "--quiet")
    said = refused(*arguments)
    assert "space" in said.lower() or "disk" in said.lower()
    done = set((disk / "run").glob("facts/*/*.json"))
    subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
    found = api.tune(small_model, small_data, disk / "run", samples=8)
    assert done <= set((disk / "run").glob("facts/*/*.json"))
    assert {c.id for c in found.candidates} == {c.id for c in whole_run.candidates}


def test_a_full_disk_leaves_the_older_file_as_it_was(refused, small_disk, small_model, small_data, whole_run):
    """A page of memory is the whole disk here, and the older file lies in it."""
    disk = small_disk(4)
    for command in (("quantize", small_model, "--data", small_data, "--quiet"), ("export", whole_run.run)):
        (disk / "q.onnx").write_bytes(b"older")
        assert "No space left" in refused(*command, "-o", disk / "q.onnx")
        assert [path.name for path in disk.iterdir()] == ["q.onnx"]
        assert (disk / "q.onnx").read_bytes() == b"older"


def test_a_read_only_output_folder_is_refused(refused, small_disk, small_model, small_data):
    disk = small_disk(1000)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    said = refused("tune", small_model, "--data", small_data, "-o", disk / "run", *QUICK)
    assert "read-only" in said.lower()


# --- wrong usage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--data", "DATA", "--synthetic", "20"),
        ("--data", "DATA", "--scheme", "int9"),
        ("--data", "DATA", "--metric", "top9"),
        ("--data", "DATA", "--max-trials", "0"),
        ("--data", "DATA", "--max-drop", "-1"),
        ("--data", "DATA", "--threads", "0"),
        ("--data", "DATA", "--samples", "0"),
        ("--data", "DATA", "--max-samples", "0"),
        ("--data", "DATA", "--workers", "0"),
        ("--data", "DATA", "--timeout", "-3"),
        ("--data", "DATA", "--limit", "0"),
        ("--data", "DATA", "--seed", "-1"),
        ("--synthetic", "0"),
        ("--nonsense",),
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2(refused, small_model, small_data, tmp_path, options):
    given = [str(small_data) if option == "DATA" else option for option in options]
    refused("tune", small_model, "-o", tmp_path / "run", "--quiet", *given, code=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data": True, "synthetic": 20},
        {"synthetic": 0},
        {"synthetic": -5},
        {"synthetic": 40, "seed": -1},
        {"data": True, "schemes": ()},
        {"data": True, "schemes": ("int9",)},
        {"data": True, "metric": "top9"},
        {"data": True, "max_trials": 0},
        {"data": True, "max_drop": -0.1},
        {"data": True, "max_drop": float("nan")},
        {"data": True, "threads": 0},
        {"data": True, "samples": 0},
        {"data": True, "max_samples": 0},
        {"data": True, "workers": 0},
        {"data": True, "timeout": -1.0},
        {"data": True, "limit_s": 0.0},
        {"data": True, "seed": -1},
        {"data": True, "weight_type": "s9"},
        {"data": True, "activation_type": "s7"},
        {"data": True, "file_format": "onnx"},
    ],
    ids=str,
)
def test_wrong_arguments_of_the_python_function_are_usage_errors(small_model, small_data, tmp_path, options):
    given = {**options, "data": small_data} if options.get("data") else options
    with pytest.raises(UsageError):
        api.tune(small_model, run=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_inputs_of_text_are_refused_with_what_to_do(refused, tmp_path):
    nodes = [
        helper.make_node("LabelEncoder", ["words"], ["n"], "lookup", domain="ai.onnx.ml", keys_strings=["red", "blue"],
                         values_floats=[0.0, 1.0]),
        helper.make_node("Mul", ["n", "n"], ["y"], "square"),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "text",
        [helper.make_tensor_value_info("words", onnx.TensorProto.STRING, ["n", 2])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 2])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 2)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "text.onnx")
    np.savez(tmp_path / "text.npz", words=np.asarray([["red", "blue"]] * 40))
    said = refused("scan", tmp_path / "text.onnx", "--data", tmp_path / "text.npz", *QUICK[:2], "--quiet")
    assert "found text in the input words" in said
