"""One model: looked at, written as a plan says, and compared with others: inspect, quantize, evaluate."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quantsieve.api._files import copy
from quantsieve.api._line import open_line, open_sources, ranges_of, scratch
from quantsieve.api._scan import kept_layers
from quantsieve.data import Preprocess
from quantsieve.errors import InputError, UsageError
from quantsieve.evaluation import Failed, Measured
from quantsieve.inspection import Inspection
from quantsieve.inspection import inspect as inspect_model
from quantsieve.model.load import open_model
from quantsieve.plan import BIAS, EQUALIZED, Options, Plan, check_plan, full_plan, nothing_to_quantize
from quantsieve.run.equalizing import settle
from quantsieve.run.progress import Progress, Silent, Step
from quantsieve.run.spec import Limits, Settings
from quantsieve.run.trials import Trials
from quantsieve.schemes import FLOAT
from quantsieve.schemes import names as scheme_names
from quantsieve.schemes._formats import Formats
from quantsieve.selection import Selection
from quantsieve.sensitivity.scan_document import ScanResult
from quantsieve.tasks import Score, task_name

SCHEMA = 1


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


def inspect(model: str | os.PathLike[str]) -> Inspection:
    """What a model is made of, and which layers can be quantized or why not."""
    return inspect_model(Path(model))


def quantize(
    model: str | os.PathLike[str],
    plan: str | os.PathLike[str] | Mapping[str, str],
    data: object = None,
    output: str | os.PathLike[str] = "quantized.onnx",
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
    seed: int = 0,
    weight_type: str = "auto",
    activation_type: str = "u8",
    symmetric_activations: bool = False,
    asymmetric_weights: bool = False,
    file_format: str = "qdq",
    bias_correction: bool = True,
    equalize: str | None = None,
    tell: Callable[[str], object] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the model as a plan says; returns the path of the new file.

    plan: path of a plan.json, a scheme's name for every layer that can have it, or schemes by layer name. scan: layers
    that it marks `keep_float` cannot have any. nodes_to_exclude, nodes_to_quantize, op_types_to_exclude,
    op_types_to_quantize: layers chosen by hand, names or `re:PATTERN`, see `Selection`. tell: called with each note on
    what they matched, on what was equalized, and on a model that is copied since no layer can be quantized, for example
    `print`. equalize: 'on' or 'off', as for `tune`; None: as the plan's file says, off where there is none.
    calibration_method, percentile: as for `tune`. Raises UsageError when the plan names unknown layers, or asks what a
    layer cannot have.
    """
    selection = Selection.of(nodes_to_exclude, nodes_to_quantize, op_types_to_exclude, op_types_to_quantize)
    path = Path(model)
    open_model(path)
    kept = kept_layers(scan, path)
    method, share = ranges_of(calibration_method, percentile)
    settings = Settings(
        scheme_names(),
        None,
        seed,
        1,
        Formats(weight_type, activation_type, symmetric_activations, asymmetric_weights, file_format),
        bias_correction,
        keep_float=kept,
        calibration_method=method,
        percentile=share,
        selection=selection,
        equalize=_equalize(plan, equalize),
    )
    sources = open_sources(path, data, synthetic, calibration_data, preprocess, skip_bad, class_names, seed)
    with scratch() as folder, open_line(folder, path, sources, settings, Limits(), progress) as line:
        if tell is not None:
            for note in (*line.selected.notes, *(() if line.options.schemes else (nothing_to_quantize(line.options),))):
                tell(note)
        repairs = (BIAS,) if bias_correction else ()
        chosen = _read_plan(plan, line.options, repairs)
        check_plan(chosen, line.options)
        trials = Trials(line)
        if chosen.quantized():
            told = len(line.notes)
            trials.line = settle(line, trials)
            for note in line.notes[told:]:
                (tell or str)(note)
            if trials.line.variant is not None:
                chosen = replace(chosen, repairs=(*chosen.repairs, EQUALIZED))
        built = trials.build(chosen)
        copy(line.store.root / built.path, Path(output))
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
    metric: str | Score | None = None,
    seed: int = 0,
    threads: int = 1,
    limit_s: float = 300.0,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Candidate files against the float model on the final share of the samples, each in a worker process."""
    settings = Settings(metric=task_name(metric), seed=seed, threads=threads)
    path = Path(model)
    open_model(path)
    files = [Path(candidate) for candidate in candidates]
    for file in files:
        open_model(file)
    sources = open_sources(path, data, synthetic, None, preprocess, skip_bad, class_names, seed)
    tell = progress or Silent()
    with (
        scratch() as folder,
        open_line(folder, path, sources, settings, Limits(limit_s=limit_s), progress) as line,
    ):
        trials = Trials(line)
        outcomes = {}
        for number, file in enumerate(files):
            tell(Step("evaluate", str(file), number, len(files)))
            outcomes[str(file)] = trials.measure_file(file, "final")
        sizes = {str(file): file.stat().st_size for file in files}
        count = len(line.split.final)
        return EvaluationResult(trials.task, count, outcomes, sizes, sources.notes())


def _read_plan(plan: str | os.PathLike[str] | Mapping[str, str], options: Options, repairs: tuple[str, ...]) -> Plan:
    if isinstance(plan, Mapping):
        return Plan(dict(plan), repairs)
    if str(plan) == FLOAT:
        return Plan({})
    if str(plan) in scheme_names():
        full, form = full_plan(options, str(plan)), options.forms[str(plan)]
        # Nobody asked for the weights of other layers: those are a plan's, or of `tune` with w8 among its schemes.
        return Plan({layer: scheme for layer, scheme in full.schemes.items() if options.forms[scheme] == form}, repairs)
    layers, named = _read_file(Path(plan))
    # As far as they are asked for.
    return Plan(layers, repairs if named is None else tuple(repair for repair in named if repair in repairs))


def _equalize(plan: str | os.PathLike[str] | Mapping[str, str], asked: str | None) -> str:
    """Whether channels are scaled: as asked, or as a plan's file says. Raises UsageError for another answer."""
    if asked is not None:
        if asked not in ("on", "off"):
            raise UsageError("equalize on or off", repr(asked), "Choose one of them.")
        return asked
    if isinstance(plan, Mapping) or str(plan) in (FLOAT, *scheme_names()):
        return "off"
    return "on" if EQUALIZED in (_read_file(Path(plan))[1] or ()) else "off"


def _read_file(path: Path) -> tuple[dict[str, str], tuple[str, ...] | None]:
    """Scheme by layer, and the repairs, None where the file says nothing of them. Raises InputError."""
    if not path.is_file():
        raise InputError(
            f"a plan file or one of {FLOAT}, {', '.join(scheme_names())}",
            f"{path}",
            "Check the path of the plan.",
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        layers = {str(name): str(scheme) for name, scheme in document["layers"].items()}
        named = document.get("repairs")
        return layers, None if named is None else tuple(str(repair) for repair in named)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            'a plan: JSON with "layers": {layer: scheme}',
            f"{path.name}, which is none ({type(error).__name__}: {error})",
            "Take a plan.json of a run folder as an example.",
        ) from error


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
