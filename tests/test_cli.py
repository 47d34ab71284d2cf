"""The command line as a user meets it: exit codes, what goes where, and that each command is a thin door."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantsieve import api, cli
from quantsieve.data import Preprocess
from quantsieve.errors import InputError, UsageError

COMMANDS = ("demo", "evaluate", "export", "inspect", "pick", "quantize", "report", "scan", "tune")


@pytest.fixture
def model(tmp_path):
    """Two layers whose names are longer than a narrow terminal, hold markup, and a softmax."""
    weights = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="[bold]" + "block/" * 30 + "conv"),
        helper.make_node("Softmax", ["c"], ["y"], name="soft\tmax"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4, 6, 6])],
        [numpy_helper.from_array(weights, "w")],
    )
    path = tmp_path / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def door(monkeypatch):
    """Replaces one function of the Python interface by one that only keeps its arguments."""

    def replace(name):
        kept = SimpleNamespace(args=(), options={})

        def record(*args, **options):
            kept.args, kept.options = args, options
            raise InputError("the door", "it", "Enough.")

        monkeypatch.setattr(api, name, record)
        return kept

    return replace


# --- help and usage --------------------------------------------------------------------------------


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from quantsieve import cli; status = cli.main(['tune', '--help']); "
        "heavy = {'numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'scipy', 'PIL', 'rich'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "--max-drop" in done.stdout


def test_help_lists_every_command_and_says_its_purpose_whole(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    lines = [line.strip() for line in text[text.index("Commands:") :].splitlines()[1:]]
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert not any(line.endswith("...") for line in lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_its_default(command, capsys):
    assert cli.main([command, "--help"]) == 0
    for parameter in cli.program.commands[command].params:
        flag = getattr(parameter, "is_flag", True) or parameter.required
        assert flag or parameter.default is not None or parameter.show_default, parameter.name
    assert "[default: " in capsys.readouterr().out or command == "inspect"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_stands_on_the_documentation_page(command):
    page = (Path(__file__).parents[1] / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert f"## {command}\n" in page
    for parameter in cli.program.commands[command].params:
        for name in (*parameter.opts, *parameter.secondary_opts):
            assert f"`{name}" in page or not name.startswith("-"), name


def test_version_is_the_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("quantsieve 0.")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["inspcet", "m.onnx"], "inspect"),
        (["inspect", "--jsn", "m.onnx"], "--json"),
        (["tune"], "MODEL"),
        (["tune", "m.onnx", "--timeout", "5x"], "1h"),
        (["tune", "m.onnx", "--timeout", "0"], "1h"),
        (["tune", "m.onnx", "--mean", "abc"], "127,127,127"),
        (["tune", "m.onnx", "--max-drop", "-1"], "max-drop"),
        (["scan", "m.onnx", "--combined-weights", "1"], "0.5,0.5"),
        (["scan", "m.onnx", "--combined-weights", "a,b"], "0.5,0.5"),
        (["scan", "m.onnx", "--drift", "0"], "a number of at least 1"),
        (["scan", "m.onnx", "--drift", "on"], "auto, off"),
        (["scan", "m.onnx", "--drift", "3", "--mode", "rescue"], "rescue"),
        (["tune", "m.onnx", "--schemes", ","], "at least one"),
        (["evaluate", "m.onnx"], "--candidate"),
        (["inspect", "a.onnx", "b.onnx"], "b.onnx"),
        (["pick", "s.json"], "either a coverage or a threshold"),
        (["pick", "s.json", "--coverage", "0.5", "--threshold", "1"], "either a coverage or a threshold"),
        (["pick", "s.json", "--coverage", "1.5"], "coverage"),
        (["pick", "s.json", "--coverage", "nan"], "coverage"),
        (["pick", "s.json", "--threshold", "nan"], "threshold"),
        (["pick", "s.json", "--coverage", "0.5", "--block-agg", "median"], "block-agg"),
    ],
)
def test_wrong_usage_exits_with_2_and_a_hint(arguments, hint, capsys):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert hint in captured.err


# --- errors --------------------------------------------------------------------------------


def test_an_error_is_one_paragraph_on_stderr_and_code_1(capsys):
    assert cli.main(["inspect", "missing.onnx", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "quantsieve: Expected an ONNX file, found no file at missing.onnx. Check the path of the model.\n"
    )


def test_a_usage_error_of_the_python_interface_exits_with_2(monkeypatch, capsys):
    def refuse(model):
        raise UsageError("this", "that", "Change it.")

    monkeypatch.setattr(api, "inspect", refuse)
    assert cli.main(["inspect", "m.onnx"]) == 2
    assert "Change it." in capsys.readouterr().err


def test_an_unexpected_error_leaves_its_traceback_in_a_file(monkeypatch, capsys, tmp_path):
    def fail(model):
        raise ZeroDivisionError("by us")

    monkeypatch.setattr(api, "inspect", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.main(["inspect", "m.onnx"]) == 1
    (written,) = tmp_path.glob("quantsieve-*-traceback.txt")
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert str(written) in message
    assert "ZeroDivisionError: by us" in written.read_text()


def test_debug_shows_the_traceback_instead(monkeypatch, capsys, tmp_path):
    def fail(model):
        raise ZeroDivisionError("by us")

    monkeypatch.setattr(api, "inspect", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.main(["inspect", "m.onnx", "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_exits_with_130_and_names_folder_and_best(monkeypatch, capsys, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "best.json").write_text('{"id": "ab", "text": "best so far: plans/ab/model.onnx"}')

    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "tune", stop)
    assert cli.main(["tune", "m.onnx", "-o", str(run), "--quiet"]) == 130
    message = capsys.readouterr().err
    assert "plans/ab/model.onnx" in message
    assert f"kept in {run}: the same command goes on" in message


def test_ctrl_c_before_the_first_model_says_so(monkeypatch, capsys, tmp_path):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "demo", stop)
    assert cli.main(["demo", "-o", str(tmp_path / "run"), "--quiet"]) == 130
    assert "no model was measured so far" in capsys.readouterr().err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_reader_that_goes_away_ends_the_command_quietly(model, form):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        command = [sys.executable, "-m", "quantsieve.cli", "inspect", str(model), *form]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["tune", "--help"]], ids=" ".join)
def test_a_reader_that_goes_away_from_help_is_the_same(arguments):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        command = [sys.executable, "-m", "quantsieve.cli", *arguments]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_shell_pipe_to_head_sees_141(model):
    command = f"{sys.executable} -m quantsieve.cli inspect {model} --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_stdout_that_is_closed_is_an_error_as_with_other_tools(model):
    command = [sys.executable, "-m", "quantsieve.cli", "inspect", str(model)]
    done = subprocess.run(["bash", "-c", '"$@" >&-', "-", *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "Bad file descriptor" in done.stderr


def test_with_stdin_and_stderr_closed_stdout_holds_the_result_alone(model):
    arguments = ["scan", str(model), "--synthetic", "40", "--samples", "2", "--json"]
    command = ["bash", "-c", '"$@" <&- 2>&-', "-", sys.executable, "-m", "quantsieve.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert json.loads(done.stdout)["kind"] == "scan"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_is_one_paragraph(model):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "quantsieve.cli", "inspect", str(model)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No space left" in done.stderr


# --- inspect --------------------------------------------------------------------------------


TALKATIVE = """
import ctypes, os, sys
from quantsieve import cli
from quantsieve.search import milp
libc, solve = ctypes.CDLL(None), milp.milp
def talking(*arguments, **options):
    os.write(1, b"a line at once\\n")
    libc.printf(b"a line in a buffer of C\\n")
    return solve(*arguments, **options)
milp.milp = talking
code = cli.main(sys.argv[1:])
print("the caller's own words")
sys.exit(code)
"""


def test_what_c_code_prints_to_stdout_stays_out_of_the_result(small_model, small_data, tmp_path):
    options = ["-o", str(tmp_path / "run"), "--data", str(small_data), "--samples", "4", "--max-trials", "3", "--json"]
    command = [sys.executable, "-c", TALKATIVE, "tune", str(small_model), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document, _, rest = done.stdout.partition("\n}\n")
    assert json.loads(document + "}")["schema"] == 1
    assert rest == "the caller's own words\n"  # stdout is the caller's again
    assert done.stderr.count("a line at once") == done.stderr.count("a line in a buffer of C") > 0


def test_inspect_prints_one_json_document_and_nothing_else(model, capfd):
    assert cli.main(["inspect", str(model), "--json"]) == 0
    captured = capfd.readouterr()
    document = json.loads(captured.out)
    assert (captured.err, document["schema"]) == ("", 1)
    assert document["layers"][0]["name"] == "[bold]" + "block/" * 30 + "conv"


@pytest.mark.parametrize("columns", [80, 120])
def test_inspect_fits_the_terminal_and_escapes_names(model, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["inspect", str(model)]) == 0
    text = capsys.readouterr().out
    table = text[text.index("layer ") :]
    assert max(map(len, table.splitlines())) <= columns
    assert "…" in table
    assert "[bold]" in table
    assert "soft\\tmax" in table
    assert "no int8 scheme for Softmax" in table
    assert "1 of 2 layers can be quantized." in table
    assert "\x1b" not in text


def test_inspect_shows_what_an_ascii_stdout_cannot(model):
    done = subprocess.run(
        [sys.executable, "-m", "quantsieve.cli", "inspect", str(model)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"},
    )
    assert done.returncode == 0
    assert "\\u2026" in done.stdout


# --- the doors --------------------------------------------------------------------------------


def test_tune_hands_every_option_on(door, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("cat\n\ndog \n")
    (tmp_path / "p.toml").write_text("mean = [1, 2, 3]\nstd = 4\n")
    called = door("tune")
    assert cli.main(
        ["tune", "m.onnx", "-o", "out", "--data", "d", "--calibration-data", "c",
         "--calibration-method", "percentile", "--percentile", "99.5",
         "--preprocess", str(tmp_path / "p.toml"), "--std", "5", "--resize", "32x100", "--skip-bad",
         "--class-names", str(names), "--scan", "s.json", "--schemes", "int8, int8-channel,int8", "--metric", "top1",
         "--nodes-to-exclude", "a, b c", "--nodes-to-exclude", "re:x{1,2}", "--nodes-to-quantize", "/d:0",
         "--op-types-to-exclude", "Add", "--op-types-to-quantize", "Conv,Add",
         "--max-drop", "0.02", "--confident", "--seed", "7", "--threads", "2", "--workers", "3",
         "--timeout", "5m", "--max-trials", "9", "--limit", "90s", "--memory-limit", "1.5G",
         "--weight-type", "u8", "--activation-type", "s8", "--symmetric-activations",
             "--asymmetric-weights", "--format", "qoperator",
             "--asymmetric-weights", "--format", "qoperator",
             "--no-bias-correction", "--equalize", "off", "--samples", "16", "--max-samples", "500",
         "--quiet"]
    ) == 1  # fmt: skip
    assert called.args == ("m.onnx", "d", Path("out"))
    del called.options["progress"]
    assert called.options == {
        "synthetic": None,
        "calibration_data": "c",
        "calibration_method": "percentile",
        "percentile": 99.5,
        "preprocess": Preprocess(mean=(1.0, 2.0, 3.0), std=(5.0,), resize=(32, 100)),
        "skip_bad": True,
        "class_names": ("cat", "dog"),
        "scan": "s.json",
        "nodes_to_exclude": ("a", "b c", "re:x{1,2}"),
        "nodes_to_quantize": ("/d:0",),
        "op_types_to_exclude": ("Add",),
        "op_types_to_quantize": ("Conv", "Add"),
        "schemes": ("int8", "int8-channel"),
        "metric": "top1",
        "max_drop": 0.02,
        "confident": True,
        "seed": 7,
        "threads": 2,
        "workers": 3,
        "timeout": 300.0,
        "max_trials": 9,
        "limit_s": 90.0,
        "memory_limit": 3 << 29,
        "weight_type": "u8",
        "activation_type": "s8",
        "symmetric_activations": True,
        "asymmetric_weights": True,
        "file_format": "qoperator",
        "bias_correction": False,
        "equalize": "off",
        "samples": 16,
        "screen": "auto",
        "max_samples": 500,
    }


def test_tune_takes_its_run_folder_from_the_models_name(door):
    called = door("tune")
    cli.main(["tune", "some/net.onnx", "--synthetic", "40", "--quiet"])
    assert called.args == ("some/net.onnx", None, Path("quantsieve-run-net"))
    assert (called.options["synthetic"], called.options["preprocess"]) == (40, None)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400)])
def test_a_timeout_is_a_number_with_a_unit(door, text, seconds):
    called = door("tune")
    cli.main(["tune", "m.onnx", "--timeout", text, "--quiet"])
    assert called.options["timeout"] == seconds


def test_the_other_commands_call_the_function_of_their_name(door):
    scan, quantize, pick = door("scan"), door("quantize"), door("pick")
    evaluate, report, export = door("evaluate"), door("report"), door("export")
    cli.main(
        ["scan", "m.onnx", "--data", "d", "-o", "s.json", "--metric", "own.py:f", "--per-output", "--per-channel",
         "--combined-weights", "1,0.25", "--samples", "9", "--drift", "12", "--calibration-method", "mse",
         "--quiet"]
    )  # fmt: skip
    cli.main(["quantize", "a/m.onnx", "--data", "d", "--plan", "plan.json", "--scan", "s.json", "--quiet",
              "--calibration-method", "percentile", "--percentile", "99"])  # fmt: skip
    cli.main(
        [
            "pick",
            "s.json",
            "--coverage",
            "0.9",
            "--scheme",
            "int8",
            "--blocks",
            "b.toml",
            "--block-agg",
            "max",
            "--max-layers",
            "3",
            "--near",
            "0.9",
            "-o",
            "out.json",
        ]
    )
    cli.main(["evaluate", "m.onnx", "--candidate", "a", "--candidate", "b", "--data", "d", "--quiet"])
    cli.main(["report", "run", "--top-k", "4"])
    cli.main(["export", "run", "--candidate", "best quality"])
    assert (scan.args, scan.options["output"]) == (("m.onnx", "d"), "s.json")
    scoring = {"metric": "own.py:f", "per_output": True, "per_channel": True, "combined_weights": (1.0, 0.25),
               "mode": "alone", "samples": 9, "drift": 12}  # fmt: skip
    assert scan.options.items() >= scoring.items()
    assert quantize.args == ("a/m.onnx", "plan.json", "d", "m-quantized.onnx")
    assert (scan.options["calibration_method"], scan.options["percentile"]) == ("mse", None)
    assert quantize.options["scan"] == "s.json"
    assert (quantize.options["calibration_method"], quantize.options["percentile"]) == ("percentile", 99.0)
    assert (pick.args, pick.options) == (
        ("s.json",),
        {"coverage": 0.9, "threshold": None, "scheme": "int8", "blocks": "b.toml", "block_agg": "max",
         "max_layers": 3, "near": 0.9, "output": "out.json"},
    )  # fmt: skip
    assert evaluate.args == ("m.onnx", ("a", "b"), "d")
    assert (report.args, report.options) == (("run",), {"top_k": 4})
    assert (export.args, export.options) == (("run", "best-quality.onnx"), {"candidate": "best quality"})


def test_options_of_the_doors_are_those_of_the_python_functions():
    """Every keyword that a command passes exists in the function it calls."""
    import ast
    import inspect

    tree = ast.parse(Path(cli.__file__).read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name) and node.func.value.id == "api"
    ]  # fmt: skip
    assert {call.func.attr for call in calls} == set(COMMANDS)
    for call in calls:
        known = inspect.signature(getattr(api, call.func.attr)).parameters
        assert {keyword.arg for keyword in call.keywords} <= set(known), call.func.attr


def test_the_choices_of_the_calibration_method_are_the_methods():
    from quantsieve.clipping import METHODS, MINMAX, PERCENTILE

    for command in ("tune", "scan", "quantize"):
        options = {option.name: option for option in cli.program.commands[command].params}
        assert tuple(options["calibration_method"].type.choices) == METHODS
        assert options["calibration_method"].default == MINMAX.name
        assert options["percentile"].show_default == f"{PERCENTILE}"


@pytest.mark.parametrize(("method", "shown"), [("mse", {"method": "mse"}), ("percentile", None)])
def test_scan_and_quantize_calibrate_by_the_method_asked_for(method, shown, small_model, small_data, tmp_path, capsys):
    options = ["--data", str(small_data), "--quiet", "--calibration-method", method]
    options += ["--percentile", "95"] if method == "percentile" else []
    shown = shown or {"method": "percentile", "percentile": 95.0}
    scan = ["scan", str(small_model), "--samples", "4", "--drift", "off", "--json", *options]
    assert cli.main([*scan, "-o", str(tmp_path / "s.json")]) == 0
    found = json.loads(capsys.readouterr().out)["calibration"]
    assert found == json.loads((tmp_path / "s.json").read_text())["calibration"] == {**shown, "samples": 24}
    scales = {}
    for name, more in (("minmax", options[:3]), (method, options)):
        path = tmp_path / f"{name}.onnx"
        assert cli.main(["quantize", str(small_model), "-o", str(path), *more]) == 0
        graph = onnx.load(path).graph
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        first = next(node for node in graph.node if node.op_type == "QuantizeLinear")
        scales[name] = float(constants[first.input[1]])
    assert scales[method] < scales["minmax"]


def test_a_percentile_of_another_method_is_wrong_usage(small_model, small_data, capsys):
    assert cli.main(["quantize", str(small_model), "--data", str(small_data), "--percentile", "99.99", "--quiet"]) == 2
    assert "99.99 with minmax" in capsys.readouterr().err


def test_a_missing_class_names_file_is_named(capsys):
    assert cli.main(["tune", "m.onnx", "--class-names", "nowhere.txt", "--quiet"]) == 1
    assert "nowhere.txt" in capsys.readouterr().err


# --- what the commands print -------------------------------------------------------------------


def test_scan_quantize_and_evaluate_print_their_results(model, tmp_path, capsys):
    data = ["--synthetic", "40", "--quiet"]
    assert cli.main(["scan", str(model), *data, "--samples", "4"]) == 0
    table = capsys.readouterr().out
    assert "int8-channel" in table
    assert "no int8 scheme for Softmax" in table
    assert "only point a direction" in " ".join(table.split())
    assert "times that, on 4 samples" in " ".join(table.split("in a real session:")[1].split())

    small = tmp_path / "q.onnx"
    assert cli.main(["quantize", str(model), *data, "-o", str(small), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "kind": "quantize", "path": str(small)}

    broken = tmp_path / "broken.onnx"
    wrong = onnx.load(model)
    wrong.graph.output[0].name = "c"
    del wrong.graph.output[0].type.tensor_type.shape.dim[:]
    onnx.save(wrong, broken)
    both = ["--candidate", str(small), "--candidate", str(broken)]
    assert cli.main(["evaluate", str(model), *both, *data]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["file", "bytes"]
    assert "failed" not in lines[1]
    assert "failed" in lines[2]
    assert "broken.onnxfailed(" in "".join("".join(lines).split())  # wherever a long path wraps


def test_a_scan_tells_its_metric_with_the_direction(small_model, small_data, tmp_path, capsys):
    scan, options = str(tmp_path / "scan.json"), ["--data", str(small_data), "--samples", "4", "--quiet"]
    arguments = ["scan", str(small_model), *options, "--metric", "sqnr", "--per-output", "--per-channel", "-o", scan]
    assert cli.main(arguments) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "score dB" in table and "logits" in table and "lower is worse" in table and "of each output or chan" in table
    assert cli.main(["pick", scan, "--coverage", "0.5"]) == 0
    assert "10^(-dB / 10)" in capsys.readouterr().err
    assert cli.main(["scan", str(small_model), *options, "--metric", "nonsense"]) == 2
    assert "kl_div" in capsys.readouterr().err


def test_pick_prints_names_to_paste_and_warns_on_stderr(small_model, small_data, tmp_path, capsys):
    scan = str(tmp_path / "scan.json")
    options = ["--data", str(small_data), "--samples", "4", "--quiet"]
    assert cli.main(["scan", str(small_model), *options, "-o", scan]) == 0
    assert "with next" in capsys.readouterr().out
    assert cli.main(["pick", scan, "--coverage", "1", "--max-layers", "2"]) == 0
    captured = capsys.readouterr()
    names = captured.out.split("Nodes to exclude:\n")[1].split("\n\n")[0].splitlines()
    assert f"nodes_to_exclude={names!r}" in captured.out
    assert len(names) == len(set(names)) > 0
    summary = captured.out.split("\n\n")[0]
    for name in ("Kept float  2 layers", "Quantized   2 layers", "Coverage", "Mass"):
        assert f"\n{name}" in summary
    assert "Float anyway" not in summary  # every layer of this model can be quantized
    assert captured.err.startswith("quantsieve: warning: at most 2 layers")
    assert cli.main(["pick", scan, "--coverage", "1", "--max-layers", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["kind"], document["nodes_to_exclude"]) == (1, "pick", names)


def test_a_scan_that_is_none_is_one_paragraph_and_code_1(tmp_path, capsys):
    assert cli.main(["pick", str(tmp_path / "none.json"), "--coverage", "0.9"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_tune_and_report_print_one_document_each(model, tmp_path, capsys):
    run = str(tmp_path / "run")
    arguments = ["tune", str(model), "-o", run, "--synthetic", "40", "--samples", "4", "--max-trials", "1"]
    assert cli.main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    tuned = json.loads(captured.out)
    assert tuned["schema"] == 1
    assert "quantsieve: warning: " in captured.err
    assert "calibrate" in captured.err
    assert cli.main(["report", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == tuned
    assert cli.main(["report", run, "--top-k", "1"]) == 0
    assert "Top 1" in capsys.readouterr().out
