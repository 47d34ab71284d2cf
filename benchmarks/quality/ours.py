"""Quantsieve through its public API, in a process of its own, so that its processor seconds can be counted whole.

The only place that knows the API's names: `tune` and what is read from its result.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.quality.accounting import StageClock, cpu_seconds, run_counted
from benchmarks.quality.records import Entry, Method, entry_from, entry_json
from benchmarks.quality.zoo import SEED, THREADS, ZooModel, open_model

from quantsieve.errors import InputError
from quantsieve.evaluation import Measured

_FLOAT = "float"
_UNCORRECTED = "uncorrected"


def tune_counted(model: ZooModel, zoo: Path, schemes: Sequence[str]) -> Method:
    """All candidates that reached the final samples, float left out, with the seconds of the whole tree of processes.

    Reading the images is not counted, for no method.
    """
    document, cpu_s = _tune_elsewhere(model, zoo, schemes, [])
    entries = tuple(entry_from(item, len(model.final)) for item in document["entries"])
    notes = (
        f"seconds of the scan, the search and both evaluations; {len(entries)} of the models reached the final samples",
        *document["notes"],
    )
    return Method(entries, cpu_s - document["uncounted_s"], document["num_measured"], notes, document["stages"])


def size_reduction_kept(model: ZooModel, zoo: Path, schemes: Sequence[str], max_drop: float) -> dict[str, Any]:
    """The recommended model for a budget on label agreement: what it keeps, its disagreement, its origin."""
    extra = ["--metric", "agreement", "--max-drop", str(max_drop)]
    return _tune_elsewhere(model, zoo, schemes, extra)[0]["recommended"]


def _tune_elsewhere(
    model: ZooModel, zoo: Path, schemes: Sequence[str], extra: Sequence[str]
) -> tuple[dict[str, Any], float]:
    with tempfile.TemporaryDirectory(prefix="quantsieve-quality-") as folder:
        out = Path(folder) / "ours.json"
        module = [sys.executable, "-m", "benchmarks.quality.ours"]
        options = [
            "--zoo",
            str(zoo),
            "--schemes",
            ",".join(schemes),
            "--run",
            str(Path(folder) / "run"),
            *extra,
        ]
        cpu_s = run_counted([*module, model.name, str(out), *options])
        return json.loads(out.read_text(encoding="utf-8")), cpu_s


def _main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--zoo", type=Path, required=True)
    parser.add_argument("--schemes", required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--metric")
    parser.add_argument("--max-drop", type=float, default=0.01)
    options = parser.parse_args(arguments)
    model = open_model(options.model, options.zoo)
    model.warm()
    uncounted_s = cpu_seconds()
    clock = StageClock("start")
    result = _tune(model, options, clock)
    clock.close()
    document = {"uncounted_s": uncounted_s, "stages": clock.seconds, **_document(result, model)}
    options.out.write_text(json.dumps(document), encoding="utf-8")


def _tune(model: ZooModel, options: argparse.Namespace, clock: StageClock) -> Any:
    import quantsieve

    return quantsieve.tune(
        model.path,
        model.evaluation,
        options.run,
        calibration_data=model.calibration,
        schemes=tuple(options.schemes.split(",")),
        metric=options.metric,
        max_drop=options.max_drop,
        seed=SEED,
        threads=THREADS,
        progress=lambda step: clock.enter(step.stage),
    )


def _document(result: Any, model: ZooModel) -> dict[str, Any]:
    finalists = [found for found in result.candidates if isinstance(found.final, Measured)]
    _check_samples(finalists, model)
    quantized = [found for found in finalists if found.origin != _FLOAT]
    measured = [
        found
        for found in result.candidates
        if found.origin != _FLOAT and (isinstance(found.search, Measured) or isinstance(found.final, Measured))
    ]
    return {
        "entries": [entry_json(_entry(found)) for found in quantized],
        "num_measured": len(measured),
        "notes": [],
        "recommended": _recommended(result),
    }


def _entry(found: Any) -> Entry:
    return Entry(
        found.origin,
        found.size_bytes,
        np.asarray(found.final.agreement) >= 0.5,
        # The price list holds the corrected layers, so it predicts nothing for the one uncorrected plan.
        predicted_mse=None if _UNCORRECTED in found.origin else found.predicted_mse,
        simulated_mse=found.simulated_mse,
        measured_mse=found.measured_mse,
        final_mse=float(found.final.mse),
    )


def _recommended(result: Any) -> dict[str, Any] | None:
    found = result.recommended
    if found is None:
        return None
    loss = found.final.disagreement()
    return {
        "origin": found.origin,
        "size_bytes": found.size_bytes,
        "size_reduction_kept": result.summary.kept(found),
        "disagreement": [loss.value, loss.low, loss.high],
    }


def _check_samples(finalists: Sequence[Any], model: ZooModel) -> None:
    """Raises InputError unless these are our final samples in our order, told from where float is right."""
    labels = model.evaluation.labels
    if not finalists or labels is None or finalists[0].final.metric != "top1":
        return
    right = model.float_labels == labels[model.final]
    reference = finalists[0].final.reference_scores
    if len(reference) != len(right) or np.mean((reference >= 0.5) == right) < 0.99:
        raise InputError(
            f"the {len(right)} final samples of the benchmark's own split",
            f"{len(reference)} others in the run",
            "Compare the call of `split` in zoo.py with the one that tune makes.",
        )


if __name__ == "__main__":
    _main(sys.argv[1:])
