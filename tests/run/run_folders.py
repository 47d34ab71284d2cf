"""What tests ask of run folders: what was computed in them, and all of a run that has to be the same every time."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from quantsieve import api
from quantsieve.evaluation import Failed, Measured


def stages_begun(run: Path) -> list[str]:
    """Names of the stages that were computed, one an entry, in order."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [x["text"].removesuffix(" began") for x in lines if x["kind"] == "stage" and "began" in x["text"]]


def file_digests(run: Path) -> dict[str, str]:
    """sha256 of each plan's model file, by plan id."""
    return {
        path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (run / "plans").glob("*/model.onnx")
    }


def numbers(outcome: Measured | Failed | None) -> object:
    """Everything measured but times."""
    if not isinstance(outcome, Measured):
        return outcome
    arrays = (outcome.scores, outcome.reference_scores, outcome.agreement, outcome.errors)
    return tuple(tuple(np.asarray(a).tolist()) for a in arrays), outcome.sqnr_db, outcome.num_bad


def essence(run: Path) -> dict[str, object]:
    """What an undisturbed run and any other with the same settings share: all but times and what hangs on them."""
    summary = api.report(run).summary
    rows = {
        c.id: (c.origin, dict(c.plan.schemes), c.size_bytes, numbers(c.search), numbers(c.final),
               c.predicted_mse, c.simulated_mse, c.measured_mse, dict(c.ran))
        for c in summary.candidates
    }  # fmt: skip
    return {"rows": rows, "files": file_digests(run), "splits": summary.splits, "prices": summary.prices}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "quantsieve.cli", *map(str, arguments)]


def start(*arguments: object) -> "subprocess.Popen[str]":
    """The command line in a process group of its own, as a terminal starts it."""
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
