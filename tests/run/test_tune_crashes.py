"""Candidates that really kill their worker process: they fail with the reason, and the run goes on without them."""

import functools
import json
from pathlib import Path

import pytest
from crashing_targets import Crashing, num_rounded
from run_folders import stages_begun

from quantsieve import api
from quantsieve.api import _line
from quantsieve.evaluation import Failed, Measured
from quantsieve.example import data_path, model_path


def tune(run: Path) -> api.TuneResult:
    return api.tune(model_path(), data_path(), run, max_samples=200, samples=8, max_trials=6, workers=1)


@pytest.mark.parametrize("stage", ["load", "run"])
def test_candidates_that_kill_the_worker_are_failed_results_and_the_others_are_measured(tmp_path, monkeypatch, stage):
    most = 34  # activations that full int8 of this model rounds
    monkeypatch.setattr(_line, "OrtCpu", functools.partial(Crashing, most - 1, stage))
    run = tmp_path / "run"
    found = tune(run)

    rounded = {c.id: num_rounded(found.file(c.id)) for c in found.candidates}
    doomed = {id for id, number in rounded.items() if number >= most}
    failed = {c.id: c.search for c in found.candidates if isinstance(c.search, Failed)}
    assert set(failed) == doomed and 1 <= len(doomed) < len(rounded) - 2
    assert {(f.kind, f.stage, f.reason) for f in failed.values()} == {("signal", stage, "SIGSEGV")}
    assert found.summary.stopped == "max trials" and len(found.candidates) == 7

    others = [c for c in found.candidates if c.id not in doomed]
    assert all(isinstance(c.search, Measured) for c in others)
    assert not doomed & set(found.front) and found.recommended is not None and found.recommended.id not in doomed
    assert any(c.plan.quantized() and isinstance(c.final, Measured) for c in others)

    rows = {row["id"]: row for row in json.loads((run / "report/report.json").read_text())["candidates"]}
    for id in doomed:
        wanted = {"split": "search", "kind": "signal", "stage": stage, "reason": "SIGSEGV"}
        assert next({key: f[key] for key in wanted} for f in rows[id]["failures"]) == wanted
    assert f"signal at {stage}: SIGSEGV" in (run / "report/report.html").read_text()

    assert f"{len(doomed)} candidates of 7 failed on the target" in " ".join(
        (run / "report/report.txt").read_text().split()
    )

    begun = stages_begun(run)
    assert tune(run).front == found.front and stages_begun(run) == begun  # a crash is a result: not tried again
