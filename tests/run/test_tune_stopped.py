"""Limits, Ctrl-C and kill -9: the best so far is on disk and named, and the same command goes on from there."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_folders import essence, numbers, stages_begun, start

from quantsieve import api
from quantsieve.api import _run
from quantsieve.errors import QuantsieveError
from quantsieve.evaluation import Failed, Measured
from quantsieve.run.line import Line
from quantsieve.run.progress import Step
from quantsieve.run.store import Store
from quantsieve.run.trials import Deadline

OPTIONS = ("--samples", 8, "--quiet")


def begun(run: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (run / "events.jsonl").read_bytes().count(b"\n")
    return 0


def wait_for_events(process: "subprocess.Popen[str]", run: Path, count: int) -> bool:
    """True once the events number `count`, False when the process ended before."""
    limit = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < limit:
        if begun(run) >= count:
            return True
        time.sleep(0.001)
    return False


def children(pid: int) -> list[int]:
    """The processes that this one started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


# --- limits ---------------------------------------------------------------------------------------------------


def test_max_trials_ends_the_search_early_and_the_same_command_goes_on(small_model, small_data, whole_run, tmp_path):
    run = tmp_path / "run"
    options = {"samples": 8, "workers": 1}
    found = api.tune(small_model, small_data, run, max_trials=2, **options)
    assert found.summary.stopped == "max trials"
    assert len(found.candidates) == 3  # float is the reference, no trial
    assert found.recommended is not None and found.file(found.recommended.id).is_file()
    best = json.loads((run / "best.json").read_text())
    assert (run / "plans" / best["id"] / "model.onnx").is_file()
    assert json.loads((run / "report/report.json").read_text())
    done = len(stages_begun(run))
    assert api.tune(small_model, small_data, run, **options).summary.stopped == "done"
    assert essence(run) == essence(whole_run.run)
    added = stages_begun(run)[done:]
    assert "calibrate" not in added and "sensitivity" not in added and "prepare" not in added


def test_a_timeout_leaves_a_report_of_what_is_there_and_the_same_command_goes_on(
    small_model, small_data, whole_run, tmp_path
):
    run = tmp_path / "run"
    found = api.tune(small_model, small_data, run, timeout=0.001, samples=8, workers=1)
    assert found.summary.stopped == "timeout"
    assert 1 <= len(found.candidates) < len(whole_run.candidates)
    assert found.recommended is not None and (run / "best.json").is_file()
    api.tune(small_model, small_data, run, samples=8, workers=1)
    assert essence(run) == essence(whole_run.run)


def test_a_timeout_that_is_long_enough_stops_nothing(small_model, small_data, tmp_path):
    found = api.tune(small_model, small_data, tmp_path / "run", timeout=500, max_trials=50, samples=8)
    assert found.summary.stopped == "done"


@pytest.mark.parametrize("stage, found_quantized", [("calibrate", False), ("sensitivity", True)])
def test_time_that_is_over_within_a_stage_ends_it_and_the_same_command_goes_on(
    stage, found_quantized, small_model, small_data, tmp_path, monkeypatch
):
    now = [0.0]

    def progress(step):
        now[0] += 1000.0 * (step.stage == stage)

    monkeypatch.setattr(_run, "Deadline", lambda seconds: Deadline(seconds, lambda: now[0]))
    found = api.tune(small_model, small_data, tmp_path / "run", timeout=500, samples=8, workers=1, progress=progress)
    assert found.summary.stopped == "timeout"
    assert any(c.plan.quantized() for c in found.candidates) == found_quantized
    assert (tmp_path / "run" / "report" / "report.json").is_file()
    again = api.tune(small_model, small_data, tmp_path / "run", samples=8, workers=1)
    assert again.summary.stopped == "done"
    plain = api.tune(small_model, small_data, tmp_path / "plain", samples=8, workers=1)
    assert {c.id for c in again.candidates} == {c.id for c in plain.candidates}


def test_time_that_is_over_between_two_batches_of_the_scan_leaves_plans_by_the_first(
    small_model, small_data, tmp_path, monkeypatch
):
    now = [0.0]

    def progress(step):
        now[0] += 1000.0 * (step.stage == "sensitivity" and step.done > 600)

    monkeypatch.setattr(Line, "batch", 4)
    monkeypatch.setattr(_run, "Deadline", lambda seconds: Deadline(seconds, lambda: now[0]))
    found = api.tune(small_model, small_data, tmp_path / "run", timeout=500, samples=8, workers=1, progress=progress)
    assert found.summary.stopped == "timeout"
    assert any("scan was ended by the time limit after 4 samples" in note for note in found.summary.notes)
    assert found.summary.settings["scan_samples"] == 4


def test_time_that_is_over_among_the_finalists_leaves_the_most_likely_one_and_the_same_command_goes_on(
    small_model, small_data, whole_run, tmp_path, monkeypatch
):
    now = [0.0]

    def progress(step):
        now[0] += 1000.0 * step.text.startswith("final samples")

    monkeypatch.setattr(_run, "Deadline", lambda seconds: Deadline(seconds, lambda: now[0]))
    options = {"samples": 8, "workers": 1, "max_drop": 0.5}
    found = api.tune(small_model, small_data, tmp_path / "run", timeout=500, progress=progress, **options)
    assert found.summary.stopped == "timeout"
    within = [c for c in found.candidates if c.plan.quantized() and c.search.loss().value <= 0.5]
    smallest = min(within, key=lambda c: c.size_bytes)
    assert len(within) > 1
    assert {c.origin for c in found.candidates if c.final is not None} == {"float", smallest.origin}
    assert api.tune(small_model, small_data, tmp_path / "run", **options).summary.stopped == "done"
    assert essence(tmp_path / "run") == essence(whole_run.run)


def test_ctrl_c_after_the_time_was_over_still_leaves_a_report(small_model, small_data, tmp_path, monkeypatch):
    now = [0.0]

    def progress(step):
        if step.stage == "final" and now[0]:
            raise KeyboardInterrupt
        now[0] += 1000.0 * (step.stage == "calibrate")

    monkeypatch.setattr(_run, "Deadline", lambda seconds: Deadline(seconds, lambda: now[0]))
    with pytest.raises(KeyboardInterrupt):
        api.tune(small_model, small_data, tmp_path / "run", timeout=500, samples=8, workers=1, progress=progress)
    assert api.report(tmp_path / "run").summary.stopped == "interrupted"
    assert (tmp_path / "run/report/report.json").is_file()


# --- Ctrl-C ---------------------------------------------------------------------------------------------------


def interrupt(arguments: tuple[object, ...], run: Path, count: int) -> tuple[int, str]:
    """Exit code and stderr of the command, interrupted as a terminal does it after so many events."""
    process = start(*arguments)
    assert wait_for_events(process, run, count), process.communicate()[1]
    os.killpg(process.pid, signal.SIGINT)
    stderr = process.communicate(timeout=60)[1]
    return process.returncode, stderr


def test_ctrl_c_writes_the_report_and_the_same_command_goes_on(small_model, small_data, whole_run, tmp_path):
    run = tmp_path / "run"
    code, stderr = interrupt(("tune", small_model, "--data", small_data, "-o", run, *OPTIONS), run, 18)
    assert code == 130
    assert "interrupted" in stderr and "same command goes on" in stderr and "Traceback" not in stderr
    found = api.report(run)
    assert found.summary.stopped == "interrupted"
    assert 1 <= len(found.candidates) <= len(whole_run.candidates)
    assert (run / "report/report.json").is_file() and (run / "best.json").is_file()
    api.tune(small_model, small_data, run, samples=8, workers=1)
    assert essence(run) == essence(whole_run.run)


def test_ctrl_c_before_anything_was_measured_says_so(small_model, small_data, tmp_path):
    run = tmp_path / "run"
    code, stderr = interrupt(("tune", small_model, "--data", small_data, "-o", run, *OPTIONS), run, 1)
    assert code == 130 and "Traceback" not in stderr
    assert "so far" in stderr and "same command goes on" in stderr


def test_an_interrupted_repetition_keeps_the_fuller_report(small_model, small_data, tmp_path):
    run = tmp_path / "run"

    def interrupted(step: object) -> None:
        raise KeyboardInterrupt

    api.tune(small_model, small_data, run, max_trials=2, samples=8)
    before = (run / "report/report.json").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        calls = iter(range(10**6))
        api.tune(
            small_model, small_data, run, max_trials=2, samples=8,
            progress=lambda step: interrupted(step) if next(calls) == 3 else None,
        )  # fmt: skip
    assert (run / "report/report.json").read_bytes() == before
    assert api.report(run).summary.stopped == "max trials"


# --- kill -9 --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_killed_at_any_moments_ends_like_an_undisturbed_one(small_model, small_data, whole_run, tmp_path, seed):
    run, draw = tmp_path / "run", random.Random(seed)
    arguments = ("tune", small_model, "--data", small_data, "-o", run, *OPTIONS)
    kills = 0
    for _ in range(5):
        process = start(*arguments)
        if wait_for_events(process, run, begun(run) + draw.randint(1, 9)):
            time.sleep(draw.uniform(0, 0.02))
            kills += process.poll() is None
            process.kill()
        process.communicate(timeout=60)
    assert kills >= 3
    process = start(*arguments)
    assert process.communicate(timeout=120) and process.returncode == 0
    assert essence(run) == essence(whole_run.run)
    assert not list(run.rglob(".quantsieve-*"))  # what was half written


CUT_OFF = """
import resource, signal, sys
from quantsieve import cli
from quantsieve.run import store

left, write_file = int(sys.argv[1]), store.write_file

def cut_off(path, content):
    global left
    left -= 1
    if left == 0:  # the kernel kills the process when a file would grow beyond this
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2, resource.RLIM_INFINITY))
    write_file(path, content)

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
store.write_file = cut_off
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_its_files_ends_like_an_undisturbed_one(
    small_model, small_data, whole_run, tmp_path
):
    run = tmp_path / "run"
    arguments = ("tune", small_model, "--data", small_data, "-o", run, *OPTIONS)
    for files in (2, 7, 6, 9, 13):  # of each process; what it finished before stays
        command = [sys.executable, "-c", CUT_OFF, str(files), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == -signal.SIGXFSZ, done.stderr
    api.tune(small_model, small_data, run, samples=8, workers=1)
    assert essence(run) == essence(whole_run.run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_worker_killed_at_any_moment_ends_no_run(small_model, small_data, whole_run, tmp_path, seed):
    run, draw = tmp_path / "run", random.Random(seed)
    process = start("tune", small_model, "--data", small_data, "-o", run, *OPTIONS)
    assert wait_for_events(process, run, draw.randint(6, 30))
    time.sleep(draw.uniform(0, 0.01))
    workers = children(process.pid)
    assert workers
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 0, stderr
    outcomes = [c.search for c in api.report(run).candidates]
    assert sum(isinstance(outcome, Failed) for outcome in outcomes) <= 1
    api.tune(small_model, small_data, run, samples=8, workers=1)
    assert essence(run) == essence(whole_run.run)


# --- candidates that fail -------------------------------------------------------------------------------------


def test_a_candidate_whose_file_went_away_fails_alone(small_model, small_data, whole_run, tmp_path):
    run, victim = tmp_path / "run", whole_run.front[0]

    def delete(step: Step) -> None:
        if step.stage == "final":
            (run / "plans" / victim / "model.onnx").unlink(missing_ok=True)

    found = api.tune(small_model, small_data, run, samples=8, workers=1, progress=delete)
    failed = [c for c in found.candidates if isinstance(c.final, Failed)]
    assert [c.id for c in failed] == [victim]
    assert found.summary.stopped == "done" and victim not in found.front
    assert found.recommendation.id not in (None, victim)
    assert sum(isinstance(c.final, Measured) for c in found.candidates) >= 3
    rows = json.loads((run / "report/report.json").read_text())["candidates"]
    assert failed[0].final.reason in json.dumps(next(row for row in rows if row["id"] == victim))


def replace_outcome(run: Path, outcome: Failed) -> None:
    """Puts the outcome in the place of the smallest candidate's on search samples."""
    summary = api.report(run).summary
    smallest = min(summary.candidates, key=lambda c: c.size_bytes)
    with Store.open(run, Store.read(run).spec) as store:
        for path in (run / "facts/evaluate").glob("*.json"):
            found = store.load("evaluate", path.stem, Measured | Failed)
            if numbers(found) == numbers(smallest.search):
                store.save("evaluate", path.stem, outcome)


@pytest.mark.parametrize(
    "kind, reason", [("timeout", "no answer within 1 s"), ("memory", "bad_alloc"), ("signal", "SIGKILL")]
)
def test_a_failure_that_is_no_trait_of_the_file_is_measured_again(
    small_model, small_data, whole_run, tmp_path, kind, reason
):
    shutil.copytree(whole_run.run, tmp_path / "run")
    replace_outcome(tmp_path / "run", Failed("search", kind, "run", reason, ""))
    api.tune(small_model, small_data, tmp_path / "run", samples=8, workers=1)
    assert essence(tmp_path / "run") == essence(whole_run.run)


def test_a_crash_is_kept_and_excludes_the_candidate(small_model, small_data, whole_run, tmp_path):
    shutil.copytree(whole_run.run, tmp_path / "run")
    replace_outcome(tmp_path / "run", Failed("search", "signal", "run", "SIGSEGV", ""))
    found = api.tune(small_model, small_data, tmp_path / "run", samples=8, workers=1)
    failed = [c for c in found.candidates if isinstance(c.search, Failed)]
    assert [c.search.reason for c in failed] == ["SIGSEGV"]
    assert failed[0].id not in found.front and failed[0].final is None


def test_a_float_model_over_the_time_limit_ends_the_run_with_the_reason(small_model, small_data, tmp_path):
    with pytest.raises(QuantsieveError, match="no answer within"):
        api.tune(small_model, small_data, tmp_path / "run", max_trials=1, samples=8, limit_s=0.0001)


def test_a_file_that_the_runtime_refuses_is_a_failed_candidate(small_model, small_data, tmp_path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(small_model.read_bytes().replace(b"GlobalAveragePool", b"GlobalAverageFool"))
    found = api.evaluate(small_model, [broken, small_model], small_data)
    outcome = found.outcomes[str(broken)]
    assert isinstance(outcome, Failed) and "GlobalAverageFool" in outcome.reason
    assert isinstance(found.outcomes[str(small_model)], Measured)
