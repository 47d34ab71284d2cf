"""One model after the other: tune, onnxruntime's own files on the same final samples, all timed side by side."""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.models import own
from benchmarks.quality.models.table import markdown
from benchmarks.quality.models.zoo import MODELS, Goal, Model, open_model
from benchmarks.quality.zoo import DEFAULT_ZOO, SEED

from quantsieve import api
from quantsieve.api._line import open_line
from quantsieve.errors import QuantsieveError
from quantsieve.evaluation import Failed, Measured, Outcome
from quantsieve.front import Candidate, is_float, named
from quantsieve.run.line import Line, Sources
from quantsieve.run.spec import Limits, Settings
from quantsieve.run.trials import Trials
from quantsieve.targets.base import TargetFailure, Timing
from quantsieve.targets.timing import ratio
from quantsieve.tasks import task_name

RESULTS = Path(__file__).resolve().parents[1] / "results" / "models"
TIMING = Timing(rounds=200, min_rounds=20, warmup_s=2.0, max_seconds=40.0, precision=0.01)
TIMED_SAMPLES = 4


@dataclass(frozen=True)
class Named:
    """A file that the table shows. ms: of interleaved rounds, empty where it was not timed."""

    name: str
    origin: str
    path: Path
    final: Outcome
    ms: tuple[float, ...] = ()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.models", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--zoo", type=Path, default=DEFAULT_ZOO, help="folder of the trained models")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--schemes", help="comma-separated, in place of the model's own")
    parser.add_argument("--work", type=Path, help="folder to keep the runs and files in; default: thrown away")
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)  # onnxruntime's quantizer advises on every call
    for name in () if options.table else options.models:
        with tempfile.TemporaryDirectory(prefix="quantsieve-models-") as scratch:
            work = Path(options.work or scratch).absolute()
            work.mkdir(parents=True, exist_ok=True)
            try:
                model = open_model(name, options.zoo, work)
            except QuantsieveError as error:
                print(error, file=sys.stderr)
                continue
            found = measure(model, work / f"{name}-files", options.schemes)
        (options.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    files = [options.out / f"{name}.json" for name in MODELS]
    text = markdown([json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()])
    (options.out / "table.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def measure(model: Model, work: Path, asked: str | None) -> dict[str, Any]:
    """Everything that the table shows of a model, as plain values."""
    work.mkdir(parents=True, exist_ok=True)
    schemes = tuple(asked.split(",")) if asked else model.schemes
    start = time.process_time(), time.perf_counter()
    options: dict[str, Any] = {"calibration_data": model.calibration, "schemes": schemes, "seed": SEED}
    result = api.tune(model.path, model.evaluation, work / "run", metric=model.metric, **options)
    seconds = time.process_time() - start[0], time.perf_counter() - start[1]
    settings = Settings(schemes=schemes, metric=task_name(model.metric), seed=SEED)
    sources = Sources(model.evaluation, model.calibration)
    with open_line(work / "run", model.path, sources, settings, Limits(), None) as line:
        trials = Trials(line)
        rows = [*_ours(result, model.goal), *_theirs(model, trials, work)]
        rows = _timed(rows, line)
    base = min(row.path.stat().st_size for row in rows if row.name in ("full int8", own.VARIANTS[0].name))
    float_row = rows[0]
    return {
        "model": model.name,
        "metric": result.summary.metric_text,
        "goal": asdict(model.goal),
        "schemes": list(schemes),
        "environment": dict(result.summary.environment),
        "samples": asdict(result.summary.splits),
        "seconds": {"processor, this process": seconds[0], "wall": seconds[1]},
        "candidates": len(result.candidates),
        "rows": [_row(row, float_row, base) for row in rows],
    }


def _ours(result: api.TuneResult, goal: Goal) -> list[Named]:
    """Float, full int8 and the named candidates, and the one that fits the goal best."""
    measured = {c.id: c for c in result.candidates if isinstance(c.final, Measured)}
    summary = result.summary
    chosen = {"float": next(c for c in measured.values() if is_float(c))}
    for scheme in summary.schemes:
        found = next((c for c in measured.values() if c.origin == f"full {scheme}"), None)
        if found is not None:
            chosen[f"full {scheme}"] = found
    for name, id in named(result.candidates, summary.recommendation.id).items():
        chosen[name] = measured[id]
    size = {c.id: c.size_bytes for c in measured.values()}
    full = next(c for c in result.candidates if c.origin == "full int8")
    least = summary.float_bytes - goal.share * (summary.float_bytes - full.size_bytes)
    within = [c for c in measured.values() if size[c.id] <= least]
    if goal.no_slower and (rival := chosen.get(goal.no_slower)) is not None:
        within = [c for c in within if _is_no_slower(c, rival)]
    if within:  # by the squared error: the lowest loss of many files is luck
        chosen["for the goal"] = min(within, key=lambda c: c.final.mse)  # type: ignore[union-attr]
    return [Named(name, c.origin, result.file(c.id), c.final) for name, c in chosen.items()]  # type: ignore[arg-type]


def _is_no_slower(candidate: Candidate, rival: Candidate) -> bool:
    """As tune timed them side by side."""
    if not candidate.latency_ms or not rival.latency_ms:
        return False
    return ratio(candidate.latency_ms, rival.latency_ms).low <= 1


def _theirs(model: Model, trials: Trials, work: Path) -> list[Named]:
    """onnxruntime's own files; what it cannot make or run is a failure with its reason."""
    rows = []
    for variant in own.VARIANTS:
        try:
            path = own.make(model.path, variant, model.calibration, work)
        except Exception as error:  # whatever its quantizer raises is its answer
            print(f"{model.name}: {variant.name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        rows.append(Named(variant.name, variant.name, path, trials.measure_file(path, "final")))
    return rows


def _timed(rows: Sequence[Named], line: Line) -> list[Named]:
    """With milliseconds, all files side by side; a file that stands in two rows is timed once."""
    paths = list(dict.fromkeys(row.path for row in rows if isinstance(row.final, Measured)))
    feeds = [line.samples.feed(int(i)) for i in line.split.search[:TIMED_SAMPLES]]
    try:
        ms = dict(zip(paths, line.target.latency(paths, feeds, TIMING), strict=True))
    except TargetFailure as failure:
        print(f"not timed: {failure}", file=sys.stderr)
        ms = {}
    return [Named(row.name, row.origin, row.path, row.final, ms.get(row.path, ())) for row in rows]


def _row(row: Named, reference: Named, base: int) -> dict[str, Any]:
    size, whole = row.path.stat().st_size, reference.path.stat().st_size
    found: dict[str, Any] = {
        "name": row.name,
        "origin": row.origin,
        "bytes": size,
        "kept": (whole - size) / (whole - base) if whole > base else None,
    }
    if isinstance(row.final, Failed):
        return {**found, "failed": row.final.reason}
    found["score"] = row.final.score
    for name in ("loss", "disagreement"):
        estimate = getattr(row.final, name)()
        # The float model is its own reference.
        found[name] = [0.0] * 3 if row.origin == "float" else [estimate.value, estimate.low, estimate.high]
    if row.ms and reference.ms:
        found["ms"] = sorted(row.ms)[len(row.ms) // 2]
        found["ratio"] = list(ratio(row.ms, reference.ms))
    return found
