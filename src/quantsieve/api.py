"""The Python door: each command of the same name is a thin call of one of these functions.

Data may be a path (folder of images, .npz, .npy), arrays by input name, an onnxruntime CalibrationDataReader, or an
iterable of feeds. Models are paths; the file is never changed.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from quantsieve.data import Preprocess, Samples, SyntheticSamples, open_samples
from quantsieve.errors import InputError, RunFolderError, UsageError
from quantsieve.evaluation import Failed, Measured
from quantsieve.example import data_path, model_path
from quantsieve.front import Candidate, Recommendation, named
from quantsieve.inspection import Inspection
from quantsieve.inspection import inspect as inspect_model
from quantsieve.model.load import load_model
from quantsieve.plan import BIAS, Options, Plan, check_layers, check_plan, full_plan
from quantsieve.reports.document import front_json, report_json
from quantsieve.reports.page import html_page
from quantsieve.reports.summary import Summary
from quantsieve.reports.text import report_text
from quantsieve.run._atomic import make_folder, write_file
from quantsieve.run.executor import Search
from quantsieve.run.keys import content_key, model_key
from quantsieve.run.line import Line, Sources, input_specs
from quantsieve.run.progress import Progress, Silent, Step
from quantsieve.run.scan_file import load_blocks, load_scan
from quantsieve.run.scanning import scan_line
from quantsieve.run.spec import Limits, Settings, run_spec
from quantsieve.run.store import Store
from quantsieve.run.trials import Deadline, Trials
from quantsieve.schemes import FLOAT
from quantsieve.schemes import names as scheme_names
from quantsieve.sensitivity.blocks import match
from quantsieve.sensitivity.pick import NEAR, PickResult, Rule, pick_layers
from quantsieve.sensitivity.racing import LOOKS
from quantsieve.sensitivity.scan_document import ScanResult, check_model, scan_text
from quantsieve.targets.isolation import Isolated
from quantsieve.targets.ort import OrtCpu

__all__ = [
    "EvaluationResult", "PickResult", "ScanResult", "TuneResult", "demo", "evaluate", "export", "inspect", "pick",
    "quantize", "read_scan", "report", "scan", "tune",
]  # fmt: skip

SCHEMA = 1
_SUMMARY = content_key("summary", 1, {}, [])  # one a run: the last one


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a run found. report_files: text, two JSON documents and page, in the run folder."""

    summary: Summary
    run: Path
    report_files: tuple[Path, ...]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.summary.candidates

    @property
    def front(self) -> tuple[str, ...]:
        """Ids of the measured, undominated candidates, smallest file first."""
        return self.summary.front

    @property
    def recommendation(self) -> Recommendation:
        return self.summary.recommendation

    @property
    def recommended(self) -> Candidate | None:
        return self.summary.recommended

    def file(self, id: str) -> Path:
        """The model file of a candidate."""
        return self.run / self.summary.files[id]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Candidate files against the float model, on all samples given."""

    metric: str
    num_samples: int
    outcomes: Mapping[str, Measured | Failed]  # by path
    sizes: Mapping[str, int]
    notes: tuple[str, ...]

    def document(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            "kind": "evaluation",
            "metric": self.metric,
            "num_samples": self.num_samples,
            "candidates": [_outcome(path, found, self.sizes[path]) for path, found in self.outcomes.items()],
            "notes": list(self.notes),
        }


def tune(
    model: str | os.PathLike[str],
    data: object = None,
    run: str | os.PathLike[str] | None = None,
    *,
    synthetic: int | None = None,
    calibration_data: object = None,
    preprocess: Preprocess | None = None,
    skip_bad: bool = False,
    class_names: Sequence[str] | None = None,
    scan: str | os.PathLike[str] | ScanResult | None = None,
    schemes: Sequence[str] = ("int8", "int8-channel"),
    metric: str | None = None,
    max_drop: float = 0.01,
    confident: bool = False,
    seed: int = 0,
    threads: int = 1,
    workers: int = 2,
    timeout: float | None = None,
    max_trials: int | None = None,
    weight_type: str = "auto",
    bias_correction: bool = True,
    samples: int = 32,
    screen: str = "auto",
    max_samples: int | None = None,
    limit_s: float = 300.0,
    progress: Progress | None = None,
) -> TuneResult:
    """The measured front of a model, and the files on it, in the run folder.

    data: samples with or without labels; `synthetic=N` makes N random ones instead. run: default
    `quantsieve-run-MODEL` in the current folder; a second call with the same settings goes on there.
    max_drop: largest acceptable loss of the score, absolute. timeout: seconds. scan: layers that it marks `keep_float`
    are never quantized. screen: as for `scan`. Raises QuantsieveError.
    Ctrl-C (KeyboardInterrupt) is passed on once the report of what is there has been written.
    """
    load_model(Path(model))
    kept = _kept(scan, Path(model))
    settings = Settings(
        tuple(schemes), metric, seed, threads, weight_type, bias_correction, samples, max_samples, kept, screen
    )
    limits = Limits(max_drop, confident, timeout, max_trials, workers, limit_s)
    deadline = Deadline(timeout)
    path = Path(model)
    folder = Path(run) if run is not None else Path(f"quantsieve-run-{path.stem}")
    sources = _open(path, data, synthetic, calibration_data, preprocess, skip_bad, class_names, seed)
    with _line(folder, path, sources, settings, limits, progress) as line:
        search = Search(line, limits, deadline)
        summary = search.run()
        if isinstance(preprocess, Preprocess):
            line.store.save_file("preprocess.toml", preprocess.to_toml().encode())
        files: tuple[Path, ...] = ()
        if not _says_less(summary, line.store):
            line.store.save("summary", _SUMMARY, summary)
            files = _write_report(line.store, summary)
    if summary.stopped == "interrupted":
        raise KeyboardInterrupt
    return TuneResult(summary, folder, files)


def inspect(model: str | os.PathLike[str]) -> Inspection:
    """What a model is made of, and which layers can be quantized or why not."""
    return inspect_model(Path(model))


def scan(
    model: str | os.PathLike[str],
    data: object = None,
    *,
    synthetic: int | None = None,
    calibration_data: object = None,
    preprocess: Preprocess | None = None,
    skip_bad: bool = False,
    class_names: Sequence[str] | None = None,
    schemes: Sequence[str] = ("int8", "int8-channel"),
    seed: int = 0,
    workers: int = 2,
    weight_type: str = "auto",
    bias_correction: bool = True,
    mode: str = "alone",
    samples: int | None = None,
    screen: str = "auto",
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ScanResult:
    """The score of every layer under every scheme; written as scan.json to `output` where one is given.

    mode: 'alone' scores each layer quantized alone; 'rescue' what its return to float takes away from the error of the
    fully quantized model. samples: how many the scores are means over; None races: samples are added, 64 at most,
    while the order of the ten worst layers or one of their scores is open ('rescue' takes 32). screen: 'auto' estimates
    most scores from gradients where a graph has some hundred sources of noise, 'on' wherever it can, 'off' never.
    """
    count = samples
    if count is None:
        count = 32 if mode == "rescue" else LOOKS[-1]
    settings = Settings(tuple(schemes), None, seed, 1, weight_type, bias_correction, count, screen=screen)
    path = Path(model)
    load_model(path)
    sources = _open(path, data, synthetic, calibration_data, preprocess, skip_bad, class_names, seed)
    with (
        _scratch() as folder,
        _line(folder, path, sources, settings, Limits(workers=workers), progress) as line,
    ):
        result = scan_line(line, samples is None, mode)
    if output is not None:
        _write_text(Path(output), scan_text(result))
    return result


def read_scan(path: str | os.PathLike[str]) -> ScanResult:
    """The scan in a scan.json. Raises InputError when the file is none."""
    return load_scan(path)


def pick(
    scan: str | os.PathLike[str] | ScanResult,
    *,
    coverage: float | None = None,
    threshold: float | None = None,
    scheme: str | None = None,
    blocks: str | os.PathLike[str] | Mapping[str, str] | None = None,
    block_agg: str = "sum",
    max_layers: int | None = None,
    near: float = NEAR,
    output: str | os.PathLike[str] | None = None,
) -> PickResult:
    """Layers to keep float, from the scores of a scan without a search; needs neither model nor data.

    coverage: share of all scores that the fewest layers must hold, 0..1. threshold: scores above it are kept float.
    scheme: whose scores count; default the first scanned. blocks: `auto` as the scan found them, `op_type`, or a map
    name -> regular expression or a TOML or JSON file of it, first match wins. block_agg: sum, max or mean. near: ratio
    of scores from which a cut is warned of. output: gets the scan with the picked layers, and no others, marked.
    """
    rule = Rule(coverage, threshold, block_agg, max_layers, near)
    given = scan if isinstance(scan, ScanResult) else load_scan(scan)
    found = pick_layers(given, rule, scheme, _blocks(given, blocks))
    if output is not None:
        _write_text(Path(output), scan_text(found.scan))
    return found


def quantize(
    model: str | os.PathLike[str],
    plan: str | os.PathLike[str] | Mapping[str, str],
    data: object = None,
    output: str | os.PathLike[str] = "quantized.onnx",
    *,
    synthetic: int | None = None,
    calibration_data: object = None,
    preprocess: Preprocess | None = None,
    skip_bad: bool = False,
    class_names: Sequence[str] | None = None,
    scan: str | os.PathLike[str] | ScanResult | None = None,
    seed: int = 0,
    weight_type: str = "auto",
    bias_correction: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Write the model as a plan says; returns the path of the new file.

    plan: path of a plan.json, a scheme's name for every layer that can have it, or schemes by layer name. scan: layers
    that it marks `keep_float` cannot have any. Raises UsageError when the plan names unknown layers, or asks what a
    layer cannot have.
    """
    path = Path(model)
    load_model(path)
    kept = _kept(scan, path)
    settings = Settings(scheme_names(), None, seed, 1, weight_type, bias_correction, keep_float=kept)
    sources = _open(path, data, synthetic, calibration_data, preprocess, skip_bad, class_names, seed)
    with _scratch() as folder, _line(folder, path, sources, settings, Limits(), progress) as line:
        chosen = _read_plan(plan, line.options, (BIAS,) if bias_correction else ())
        check_plan(chosen, line.options)
        built = Trials(line).build(chosen)
        _copy(line.store.root / built.path, Path(output))
    return Path(output)


def evaluate(
    model: str | os.PathLike[str],
    candidates: Sequence[str | os.PathLike[str]],
    data: object = None,
    *,
    synthetic: int | None = None,
    preprocess: Preprocess | None = None,
    skip_bad: bool = False,
    class_names: Sequence[str] | None = None,
    metric: str | None = None,
    seed: int = 0,
    threads: int = 1,
    limit_s: float = 300.0,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Candidate files against the float model on the final share of the samples, each in a worker process."""
    settings = Settings(metric=metric, seed=seed, threads=threads)
    path = Path(model)
    load_model(path)
    files = [Path(candidate) for candidate in candidates]
    for file in files:
        load_model(file)
    sources = _open(path, data, synthetic, None, preprocess, skip_bad, class_names, seed)
    tell = progress or Silent()
    with (
        _scratch() as folder,
        _line(folder, path, sources, settings, Limits(limit_s=limit_s), progress) as line,
    ):
        trials = Trials(line)
        outcomes = {}
        for number, file in enumerate(files):
            tell(Step("evaluate", str(file), number, len(files)))
            outcomes[str(file)] = trials.measure_file(file, "final")
        sizes = {str(file): file.stat().st_size for file in files}
        count = len(line.split.final)
        return EvaluationResult(trials.task, count, outcomes, sizes, sources.notes())


def report(run: str | os.PathLike[str], *, top_k: int | None = None) -> TuneResult:
    """The results in a run folder, read and written again. top_k: how many a caller will show, at least 1."""
    if top_k is not None and top_k < 1:
        raise UsageError("a top-k of at least 1", str(top_k), "Give a larger one.")
    folder = Path(run)
    summary = Store.read(folder).load("summary", _SUMMARY, Summary)
    if summary is None:
        raise RunFolderError(
            "a run folder with results", f"none in {folder}", "Run `quantsieve tune` with this folder first."
        )
    files = []
    for name, text in _report_texts(summary).items():
        path = folder / "report" / name
        if not path.is_file() or path.read_bytes() != text.encode():  # a folder only to be read stays untouched
            make_folder(path.parent)
            write_file(path, text.encode())
        files.append(path)
    return TuneResult(summary, folder, tuple(files))


def export(run: str | os.PathLike[str], output: str | os.PathLike[str], *, candidate: str = "recommended") -> Path:
    """Copy a model out of a run folder. candidate: an id, or recommended, smallest, fastest, 'best quality'."""
    found = report(run)
    names = named(found.candidates, found.recommendation.id)
    id = names.get(candidate, candidate)
    if id not in found.summary.files:
        known = ", ".join([*names, *found.summary.files])
        raise UsageError(f"a candidate out of {known}", repr(candidate), "Choose one of them.")
    _copy(found.file(id), Path(output))
    return Path(output)


def demo(run: str | os.PathLike[str] | None = None, *, progress: Progress | None = None) -> TuneResult:
    """Tune the small trained model that comes along, on its real labelled data."""
    folder = run if run is not None else "quantsieve-run-demo"
    return tune(model_path(), data_path(), folder, max_drop=0.01, progress=progress)


# --- opening ----------------------------------------------------------------------------------------------------


def _open(
    path: Path,
    data: object,
    synthetic: int | None,
    calibration_data: object,
    preprocess: Preprocess | None,
    skip_bad: bool,
    class_names: Sequence[str] | None,
    seed: int,
) -> Sources:
    inputs = input_specs(load_model(path))
    if (data is None) == (synthetic is None):
        found = "both" if data is not None else "neither"
        raise UsageError("either data or a number of synthetic samples", found, "Give --data, or --synthetic N.")
    if synthetic is not None:
        return Sources(SyntheticSamples(inputs, synthetic, seed), None, True)

    def opened(source: object) -> Samples:
        return open_samples(source, inputs, preprocess=preprocess, skip_bad=skip_bad, class_names=class_names)

    return Sources(opened(data), None if calibration_data is None else opened(calibration_data))


@contextmanager
def _line(
    folder: Path, path: Path, sources: Sources, settings: Settings, limits: Limits, progress: Progress | None
) -> Iterator[Line]:
    keys = {
        "model": model_key(path),
        "data": sources.samples.fingerprint(),
        "calibration_data": None if sources.calibration is None else sources.calibration.fingerprint(),
    }
    with (
        # Absolute: the store tells its own paths from relative ones by the folder that they begin with.
        Store.open(folder.absolute(), run_spec(settings, keys)) as store,
        Isolated(OrtCpu(threads=settings.threads), timeout_s=limits.limit_s) as target,
    ):
        line = Line(store, path, sources, settings, target, limits.workers, progress or Silent())
        if settings.keep_float:
            check_layers(settings.keep_float, line.structure)  # wrong names are told before anything is measured
        yield line


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quantsieve-") as folder:
        yield Path(folder) / "run"


def _read_plan(plan: str | os.PathLike[str] | Mapping[str, str], options: Options, repairs: tuple[str, ...]) -> Plan:
    if isinstance(plan, Mapping):
        return Plan(dict(plan), repairs)
    if str(plan) == FLOAT:
        return Plan({})
    if str(plan) in scheme_names():
        full = full_plan(options, str(plan))
        return Plan(full.schemes, repairs)
    path = Path(plan)
    if not path.is_file():
        raise InputError(
            f"a plan file or one of {FLOAT}, {', '.join(scheme_names())}",
            f"{plan}",
            "Check the path of the plan.",
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        layers = {str(name): str(scheme) for name, scheme in document["layers"].items()}
        named = tuple(str(repair) for repair in document.get("repairs", repairs))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            'a plan: JSON with "layers": {layer: scheme}',
            f"{path.name}, which is none ({type(error).__name__}: {error})",
            "Take a plan.json of a run folder as an example.",
        ) from error
    return Plan(layers, tuple(repair for repair in named if repair in repairs))  # as far as they are asked for


# --- scans ------------------------------------------------------------------------------------------------------


def _kept(scan: str | os.PathLike[str] | ScanResult | None, model: Path) -> tuple[str, ...]:
    """Names of the layers that the scan marks. Raises InputError when it is a scan of another model."""
    if scan is None:
        return ()
    key = model_key(model)
    if isinstance(scan, ScanResult):
        return check_model(scan, "the scan", key).keep_float
    return load_scan(scan, key).keep_float


def _blocks(scan: ScanResult, blocks: str | os.PathLike[str] | Mapping[str, str] | None) -> Mapping[str, str | None]:
    """The block of each layer, as far as it has one."""
    if blocks is None:
        return {}
    if blocks == "auto":
        return {score.layer: score.block for score in scan.layers}
    if blocks == "op_type":
        return {score.layer: score.op_type for score in scan.layers}
    patterns = blocks if isinstance(blocks, Mapping) else load_blocks(blocks)
    return match([score.layer for score in scan.layers], patterns)


# --- writing ----------------------------------------------------------------------------------------------------


def _says_less(summary: Summary, store: Store) -> bool:
    """Whether an interrupted run came less far than the report in its folder, which then stays."""
    if summary.stopped != "interrupted":
        return False
    old = store.load("summary", _SUMMARY, Summary)
    return old is not None and _finished(old) > _finished(summary)


def _finished(summary: Summary) -> int:
    return sum(candidate.final is not None for candidate in summary.candidates)


def _report_texts(summary: Summary) -> dict[str, str]:
    """The files of the report by name."""
    return {
        "report.txt": report_text(summary),
        "report.json": report_json(summary),
        "front.json": front_json(summary),
        "report.html": html_page(summary),
    }


def _write_report(store: Store, summary: Summary) -> tuple[Path, ...]:
    texts = _report_texts(summary)
    return tuple(store.save_file(f"report/{name}", text.encode()) for name, text in texts.items())


def _copy(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as error:
        raise InputError("a place to write the model", f"{target}: {error}", "Choose another output.") from error


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError("a place to write the result", f"{path}: {error}", "Choose another output.") from error


def _outcome(path: str, found: Measured | Failed, size: int) -> dict[str, object]:
    if isinstance(found, Failed):
        return {
            "path": path,
            "size_bytes": size,
            "failed": found.reason,
            "kind": found.kind,
            "stage": found.stage,
        }
    return {
        "path": path,
        "size_bytes": size,
        "score": found.score,
        "float_score": found.reference_score,
        "loss": asdict(found.loss()),
        "disagreement": asdict(found.disagreement()),
        "mse": found.mse if found.num_bad == 0 else None,
        "sqnr_db": found.sqnr_db if abs(found.sqnr_db) < 1e6 else str(found.sqnr_db),
        "samples_not_finite": found.num_bad,
    }
