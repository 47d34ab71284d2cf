"""Runs and what lies in their folders: tune, demo, report, export."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantsieve.api._files import copy
from quantsieve.api._line import open_line, open_sources, ranges_of
from quantsieve.api._scan import kept_layers
from quantsieve.data import Preprocess
from quantsieve.data.folder import FolderSamples
from quantsieve.errors import RunFolderError, UsageError
from quantsieve.example import data_path, model_path
from quantsieve.front import Candidate, Recommendation, named
from quantsieve.model.load import open_model
from quantsieve.reports.document import front_json, report_json
from quantsieve.reports.page import html_page
from quantsieve.reports.summary import Summary
from quantsieve.reports.text import report_text
from quantsieve.run._atomic import make_folder, write_file
from quantsieve.run.executor import Search
from quantsieve.run.keys import content_key
from quantsieve.run.progress import Progress
from quantsieve.run.spec import Limits, Settings
from quantsieve.run.store import Store
from quantsieve.run.trials import Deadline
from quantsieve.schemes._formats import Formats
from quantsieve.selection import Selection
from quantsieve.sensitivity.scan_document import ScanResult
from quantsieve.tasks import Score, task_name

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


def tune(
    model: str | os.PathLike[str],
    data: object = None,
    run: str | os.PathLike[str] | None = None,
    *,
    synthetic: int | None = None,
    calibration_data: object = None,
    calibration_method: str = "minmax",
    percentile: float | None = None,
    preprocess: Preprocess | None = None,
    skip_bad: bool = False,
    class_names: Sequence[str] | None = None,
    scan: str | os.PathLike[str] | ScanResult | None = None,
    nodes_to_exclude: Sequence[str] = (),
    nodes_to_quantize: Sequence[str] = (),
    op_types_to_exclude: Sequence[str] = (),
    op_types_to_quantize: Sequence[str] = (),
    schemes: Sequence[str] = ("int8", "int8-channel"),
    metric: str | Score | None = None,
    max_drop: float = 0.01,
    confident: bool = False,
    seed: int = 0,
    threads: int = 1,
    workers: int = 2,
    timeout: float | None = None,
    max_trials: int | None = None,
    weight_type: str = "auto",
    activation_type: str = "u8",
    symmetric_activations: bool = False,
    asymmetric_weights: bool = False,
    file_format: str = "qdq",
    bias_correction: bool = True,
    equalize: str = "auto",
    samples: int = 32,
    screen: str = "auto",
    max_samples: int | None = None,
    limit_s: float = 300.0,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> TuneResult:
    """The measured front of a model, and the files on it, in the run folder.

    data: samples with or without labels; `synthetic=N` makes N random ones instead. run: default
    `quantsieve-run-MODEL` in the current folder; a second call with the same settings goes on there.
    metric: the task: 'top1', 'agreement', 'fidelity', `file.py:function`, or a function of (outputs, reference, labels)
    to one score from 0 to 1 a sample, higher is better; default: by labels and outputs.
    max_drop: largest acceptable loss of the score, absolute. timeout: seconds. scan: layers that it marks `keep_float`
    are never quantized. nodes_to_exclude, nodes_to_quantize, op_types_to_exclude, op_types_to_quantize: layers chosen
    by hand, names or `re:PATTERN`, see `Selection`; notes of the summary tell what each matched. calibration_method: of
    the ranges of 8-bit activations: 'minmax', or 'percentile', 'entropy', 'mse', which clip the outermost values;
    percentile: of that method, in (0, 100], default 99.99. equalize: 'on' scales channels between layers so that
    rounding costs least, 'auto' does where simulated full plans get better. screen: as for `scan`. memory_limit: bytes
    that the run may take beside the model, its runs on the target apart; default half of what is free. Raises
    QuantsieveError.
    Ctrl-C (KeyboardInterrupt) is passed on once the report of what is there has been written.
    """
    selection = Selection.of(nodes_to_exclude, nodes_to_quantize, op_types_to_exclude, op_types_to_quantize)
    open_model(Path(model))
    kept = kept_layers(scan, Path(model))
    ranges = ranges_of(calibration_method, percentile)
    formats = Formats(weight_type, activation_type, symmetric_activations, asymmetric_weights, file_format)
    settings = Settings(
        tuple(schemes), task_name(metric), seed, threads, formats, bias_correction, samples, max_samples, kept,
        screen, *ranges, selection, equalize,
    )  # fmt: skip
    limits = Limits(max_drop, confident, timeout, max_trials, workers, limit_s, memory_limit)
    deadline = Deadline(timeout)
    path = Path(model)
    folder = Path(run) if run is not None else Path(f"quantsieve-run-{path.stem}")
    sources = open_sources(path, data, synthetic, calibration_data, preprocess, skip_bad, class_names, seed)
    with open_line(folder, path, sources, settings, limits, progress) as line:
        if isinstance(sources.samples, FolderSamples):  # as it is done, with what the model settled filled in
            line.store.save_file("preprocess.toml", sources.samples.preprocess.to_toml().encode())
        search = Search(line, limits, deadline)
        summary = search.run()
        files: tuple[Path, ...] = ()
        if not _says_less(summary, line.store):
            line.store.save("summary", _SUMMARY, summary)
            files = _write_report(line.store, summary)
    if summary.stopped == "interrupted":
        raise KeyboardInterrupt
    return TuneResult(summary, folder, files)


def demo(run: str | os.PathLike[str] | None = None, *, progress: Progress | None = None) -> TuneResult:
    """Tune the small trained model that comes along, on its real labelled data."""
    folder = run if run is not None else "quantsieve-run-demo"
    return tune(model_path(), data_path(), folder, max_drop=0.01, progress=progress)


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
    copy(found.file(id), Path(output))
    return Path(output)


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
