"""scan.json: a scan as a document that people edit and later commands read back.

What it holds: docs/scan-schema.md. Reading refuses what it would otherwise misunderstand: another kind, another
schema, a scan of another model, a mark that is neither true nor false.
"""

import json
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantsieve.clipping import MINMAX, Method
from quantsieve.errors import InputError, UsageError
from quantsieve.sensitivity.drift import Drift
from quantsieve.sensitivity.local import TensorRow, decibel
from quantsieve.sensitivity.metrics import HIGHER, LOWER, METRICS, Meaning
from quantsieve.sensitivity.ranking import Refused, Score

SCHEMA = 3
READ = (2, SCHEMA)  # in schema 2 every score was one of relative_mse
KIND = "scan"
DEFAULT = "relative_mse"
MODES = ("alone", "rescue")
_LARGEST = sys.float_info.max  # JSON has integers beyond it, and readers that say Infinity
_UNIT = "share of the variance of the float outputs: 1 is as large as they vary"
_EVEN = (0.5, 0.5)
PRICED = {
    "alone": Meaning(
        DEFAULT, "mean relative squared error of the float outputs when this layer alone is quantized, simulated", _UNIT
    ),
    "rescue": Meaning(
        DEFAULT,
        "mean relative squared error of the float outputs that goes when, of the fully quantized model, this layer "
        "alone is float, simulated; 0 where it grows",
        _UNIT,
    ),
}  # by mode: what a score is where it is a sum of prices, or a difference of such errors


@dataclass(frozen=True, slots=True)
class Screen:
    """What the screen found of itself. rank: Spearman's over sources that were both screened and priced exactly, None
    where none was measured; checked: how many; screened: sources that are not exact, 0 where the screen was dropped."""

    rank: float | None
    checked: int
    screened: int
    sources: int


@dataclass(frozen=True, slots=True)
class ScanResult:
    """Scores of each layer alone under each scheme, worst first: simulated. drift: what a real session
    makes of the fully quantized model, by scheme; empty where none was run."""

    model_file: str
    model_key: str  # content key of the model's bytes
    num_samples: int
    seed: int
    schemes: tuple[str, ...]
    activation: str  # formats of the tensors around quantized layers, the first scheme's first; float: not rounded
    calibration_samples: int
    layers: tuple[Score, ...]
    refused: tuple[Refused, ...]
    notes: tuple[str, ...]
    tensors: tuple[TensorRow, ...] = ()  # ranked by their combined error, worst first
    mode: str = "alone"  # or 'rescue': scores are what a layer's return to float takes away
    metric: Meaning = PRICED["alone"]  # what a score is
    combined_weights: tuple[float, float] = _EVEN  # of the local and the accumulated error in `combined`
    drift: tuple[Drift, ...] = ()
    screen: Screen | None = None  # None where all scores are exact from the start
    calibration_method: Method = MINMAX

    @property
    def keep_float(self) -> tuple[str, ...]:
        """Names of the layers that are marked on any of their rows, sorted."""
        return tuple(sorted({score.layer for score in self.layers if score.keep_float}))

    def marked(self, layers: Collection[str]) -> "ScanResult":
        """The same scan with exactly these layers marked to be kept float."""
        rows = tuple(replace(score, keep_float=score.layer in layers) for score in self.layers)
        return replace(self, layers=rows)

    def document(self) -> dict[str, object]:
        """As strict JSON can say it."""
        return {
            "schema": SCHEMA,
            "kind": KIND,
            "model": self.model_file,
            "model_key": self.model_key,
            "samples": self.num_samples,
            "seed": self.seed,
            "schemes": list(self.schemes),
            "activation": self.activation,
            "calibration": _calibration_row(self.calibration_method, self.calibration_samples),
            "mode": self.mode,
            "metric": {
                "name": self.metric.name,
                "text": self.metric.text,
                "direction": self.metric.direction,
                "unit": self.metric.unit,
            },
            "combined_weights": dict(zip(("local", "accumulated"), self.combined_weights, strict=True)),
            "screen": None if self.screen is None else _screen_row(self.screen),
            "drift": [_drift_row(drift) for drift in self.drift],
            "layers": [_row(number, score) for number, score in enumerate(self.layers, start=1)],
            "tensors": [_tensor_row(number, row) for number, row in enumerate(self.tensors, start=1)],
            "refused": [{"layer": r.layer, "op_type": r.op_type, "reason": r.reason} for r in self.refused],
            "notes": list(self.notes),
        }


def _calibration_row(method: Method, num_samples: int) -> dict[str, object]:
    percentile = {"percentile": method.percentile} if method.name == "percentile" else {}
    return {"method": method.name, **percentile, "samples": num_samples}


def _screen_row(screen: Screen) -> dict[str, object]:
    return {
        "rank_correlation": screen.rank,
        "checked": screen.checked,
        "screened": screen.screened,
        "sources": screen.sources,
    }


def _drift_row(drift: Drift) -> dict[str, object]:
    values = {"simulated": drift.simulated, "measured": drift.measured, "ratio": drift.ratio}
    return {
        "scheme": drift.scheme,
        **{name: None if value is None else _finite(value) for name, value in values.items()},
        "samples": drift.num_samples,
        "reason": drift.reason,
    }


def _row(number: int, score: Score) -> dict[str, object]:
    return {
        "rank": number,
        "keep_float": score.keep_float,
        "layer": score.layer,
        "scheme": score.scheme,
        "score": _finite(score.value),
        "low": _finite(score.low),
        "high": _finite(score.high),  # null beside a score: of one sample alone
        "tie": score.tie,
        "exact": score.is_exact,
        "op_type": score.op_type,
        "params": score.params,
        "bytes": score.bytes,
        "macs": score.macs,
        "parts": {
            "weights": score.weights,
            "weights_corrected": score.weights_corrected,
            "tensors": dict(score.tensors),
        },
        "stage": score.stage,
        "block": score.block,
        "half": score.half,
        "nodes": list(score.nodes),
        **({"outputs": {name: _finite(value) for name, value in score.outputs.items()}} if score.outputs else {}),
        **({"channels": {name: [*map(_finite, found)] for name, found in score.channels.items()}}
           if score.channels else {}),
        **({"drift": _finite(score.drift)} if score.drift is not None else {}),
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _tensor_row(number: int, row: TensorRow) -> dict[str, object]:
    return {
        "rank": number,
        "tensor": row.root,
        "producer": row.producer,
        "readers": list(row.readers),
        "combined": row.combined,
        "local": _both(row.local),
        "accumulated": _both(row.accumulated),
    }


def _both(relative: float) -> dict[str, float | None]:
    values = {"relative_error": relative, "sqnr_db": decibel(relative)}
    return {name: _finite(value) for name, value in values.items()}


def scan_text(scan: ScanResult) -> str:
    """The text of scan.json."""
    return json.dumps(scan.document(), indent=1, allow_nan=False) + "\n"


# --- reading --------------------------------------------------------------------------------------------------------


def parse_scan(text: str | bytes, name: str, model_key: str | None = None) -> ScanResult:
    """The scan in the text of a scan.json; rows keep their order, worst first by score.

    name: of the file, for errors. model_key: of the model that it has to be a scan of; None: any.
    Raises InputError for another kind or schema, for values that are none, and for a scan of another model.
    """
    document = _document(text, name)
    try:
        found = _scan(document)
    except _Wrong as wrong:
        raise InputError(
            f"a scan.json of schema {SCHEMA}",
            f"{wrong.text} in {name}",
            "Correct it, or write it anew with `quantsieve scan MODEL -o scan.json`.",
        ) from wrong
    return found if model_key is None else check_model(found, name, model_key)


def check_model(scan: ScanResult, name: str, model_key: str) -> ScanResult:
    """The scan, which is one of the model with that key. Raises InputError when it is of another."""
    if scan.model_key != model_key:
        raise InputError(
            "a scan of the same model",
            f"{name}, which is one of {scan.model_file} with other bytes",
            "Give the model that was scanned, or scan this one with `quantsieve scan MODEL -o scan.json`.",
        )
    return scan


class _Wrong(Exception):
    """What does not belong into a scan.json, in words."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text


def _document(text: str | bytes, name: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            "a scan.json", f"{name}, which is no JSON ({error})", "Write it with `quantsieve scan MODEL -o scan.json`."
        ) from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        kind = repr(document.get("kind")) if isinstance(document, dict) else "no object"
        raise InputError(
            f"a document of kind {KIND!r}",
            f"kind {kind} in {name}" if isinstance(document, dict) else f"{kind} in {name}",
            "Write it with `quantsieve scan MODEL -o scan.json`.",
        )
    if document.get("schema") not in READ or isinstance(document.get("schema"), bool):
        raise InputError(
            f"a scan.json of schema {' or '.join(map(str, READ))}",
            f"schema {json.dumps(document.get('schema'))} in {name}",
            "Write it anew with `quantsieve scan MODEL -o scan.json`, or use the version that wrote it.",
        )
    return document


def _scan(document: Mapping[str, Any]) -> ScanResult:
    mode = document.get("mode", "alone")
    if mode not in MODES:
        raise _wrong(document, "mode", "", f"one of {', '.join(MODES)}")
    metric = _meaning(_object(document.get("metric"), "metric"), mode) if document["schema"] != 2 else PRICED[mode]
    layers = tuple(_score(row, f"layers[{i}]", metric) for i, row in enumerate(_list(document, "layers", "")))
    seen = set()
    for score in layers:
        if (score.layer, score.scheme) in seen:
            raise _Wrong(f"two rows for {score.layer!r} under {score.scheme!r}")
        seen.add((score.layer, score.scheme))
    refused = []
    for i, row in enumerate(_list(document, "refused", "")):
        where = f"refused[{i}]"
        _object(row, where)
        refused.append(Refused(*(_text(row, name, where) for name in ("layer", "op_type", "reason"))))
    calibration = _object(document.get("calibration"), "calibration")
    return ScanResult(
        mode=mode,
        metric=metric,
        combined_weights=_weights(document),
        model_file=_text(document, "model", ""),
        model_key=_text(document, "model_key", ""),
        num_samples=_count(document, "samples", ""),
        seed=_count(document, "seed", ""),
        schemes=_texts(document, "schemes", ""),
        activation=_text(document, "activation", ""),
        calibration_samples=_count(calibration, "samples", "calibration"),
        calibration_method=_method(calibration),
        layers=tuple(sorted(layers, key=lambda score: -metric.worse(score.value))),
        refused=tuple(refused),
        notes=_texts(document, "notes", ""),
        screen=None if document.get("screen") is None else _screen(_object(document["screen"], "screen")),
        drift=tuple(_drift(row, f"drift[{i}]") for i, row in enumerate(_list({"drift": [], **document}, "drift", ""))),
        tensors=tuple(
            _tensor(row, f"tensors[{i}]") for i, row in enumerate(_list({"tensors": [], **document}, "tensors", ""))
        ),
    )


def _meaning(row: Mapping[str, Any], mode: str) -> Meaning:
    name = _text(row, "name", "metric")
    if name == DEFAULT:
        return PRICED[mode]
    if row.get("direction") not in (HIGHER, LOWER):
        raise _wrong(row, "direction", "metric", f"{HIGHER!r} or {LOWER!r}")
    is_error = name in METRICS and METRICS[name].meaning.is_error
    return Meaning(name, _text(row, "text", "metric"), _text(row, "unit", "metric"), row["direction"], is_error)


def _method(row: Mapping[str, Any]) -> Method:
    name = _text({"method": "minmax", **row}, "method", "calibration")
    percentile = row.get("percentile", MINMAX.percentile)
    if not isinstance(percentile, int | float) or isinstance(percentile, bool):
        raise _wrong(row, "percentile", "calibration", "a number")
    try:
        return Method(name, float(percentile))
    except UsageError as error:
        raise _wrong(row, "method", "calibration", "a known method, percentile of that one alone,") from error


def _weights(document: Mapping[str, Any]) -> tuple[float, float]:
    if "combined_weights" not in document:  # as in scans from before they could be chosen
        return _EVEN
    row = _object(document["combined_weights"], "combined_weights")
    return _error(row, "local", "combined_weights"), _error(row, "accumulated", "combined_weights")


def _screen(row: Mapping[str, Any]) -> Screen:
    rank = row.get("rank_correlation")
    if not (rank is None or (isinstance(rank, int | float) and not isinstance(rank, bool) and -1 <= rank <= 1)):
        raise _wrong(row, "rank_correlation", "screen", "a number of -1 to 1 or null")
    counts = (_count(row, name, "screen") for name in ("checked", "screened", "sources"))
    return Screen(None if rank is None else float(rank), *counts)


def _drift(row: object, where: str) -> Drift:
    row = _object(row, where)
    reason = None if row.get("reason") is None else _text(row, "reason", where)
    unknown = math.inf if reason is None else None  # what null stands for
    simulated, measured = (
        unknown if row.get(name, 0) is None else _error(row, name, where) for name in ("simulated", "measured")
    )
    if reason is not None and measured is not None:
        raise _wrong(row, "measured", where, "null, as there is a reason,")
    return Drift(_text(row, "scheme", where), simulated, measured, reason, _count(row, "samples", where))


def _tensor(row: object, where: str) -> TensorRow:
    row = _object(row, where)
    errors = {}
    for name in ("local", "accumulated"):
        both = _object(row.get(name), f"{name} of {where}")
        is_lost = both.get("relative_error", 0) is None
        errors[name] = math.inf if is_lost else _error(both, "relative_error", f"{name} of {where}")
    producer = row.get("producer")
    return TensorRow(
        root=_text(row, "tensor", where),
        producer=None if producer is None else _text(row, "producer", where),
        readers=_texts(row, "readers", where),
        local=errors["local"],
        accumulated=errors["accumulated"],
        combined=_error(row, "combined", where),
    )


def _score(row: object, where: str, metric: Meaning) -> Score:
    row = _object(row, where)
    where = f"{where} ({row['layer']})" if isinstance(row.get("layer"), str) else where
    parts = _object(row.get("parts"), f"parts of {where}")
    tensors = _object(parts.get("tensors"), f"tensors of {where}")
    outputs, channels = (_object(row.get(name, {}), f"{name} of {where}") for name in ("outputs", "channels"))
    groups = {name: row.get(name) for name in ("stage", "block", "half")}
    for name, found in groups.items():
        if not (found is None or isinstance(found, str)):
            raise _wrong(row, name, where, "a text or null")
    tie = row.get("tie")
    if not (tie is None or isinstance(tie, bool)):
        raise _wrong(row, "tie", where, "true, false or null")
    is_exact = row.get("exact", True)  # absent from documents older than the screen
    if not isinstance(is_exact, bool):
        raise _wrong(row, "exact", where, "true or false")
    if not isinstance(row.get("keep_float"), bool):
        raise _wrong(row, "keep_float", where, "true or false")
    return Score(
        layer=_text(row, "layer", where),
        scheme=_text(row, "scheme", where),
        op_type=_text(row, "op_type", where),
        nodes=_texts(row, "nodes", where),
        **groups,
        params=_count(row, "params", where),
        bytes=_count(row, "bytes", where),
        macs=_count(row, "macs", where),
        value=_value(row, "score", where, metric),
        low=-math.inf if _is_open(row, metric) else _value(row, "low", where, metric),
        high=math.inf if row.get("high", 0) is None else _value(row, "high", where, metric),
        tie=tie,
        weights=_error(parts, "weights", where),
        weights_corrected=_error(parts, "weights_corrected", where),
        tensors={str(root): _error(tensors, root, where) for root in tensors},
        keep_float=row["keep_float"],
        outputs={str(name): _value(outputs, name, where, metric) for name in outputs},
        channels={
            str(name): tuple(
                _value({name: value}, name, where, metric) for value in _list(channels, name, f"channels of {where}")
            )
            for name in channels
        },
        is_exact=is_exact,
        drift=_row_drift(row, where),
    )


def _row_drift(row: Mapping[str, Any], where: str) -> float | None:
    if "drift" not in row:  # not measured
        return None
    return math.inf if row["drift"] is None else _error(row, "drift", where)


def _wrong(row: Mapping[str, Any], name: str, where: str, wanted: str) -> _Wrong:
    found = json.dumps(row[name])[:80] if name in row else "nothing"
    return _Wrong(f"{found} instead of {wanted} as {name}" + (f" of {where}" if where else ""))


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{json.dumps(value)[:80]} instead of an object as {where}")
    return value


def _list(row: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = row.get(name)
    if not isinstance(value, list):
        raise _wrong(row, name, where, "a list")
    return value


def _texts(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    values = _list(row, name, where)
    if not all(isinstance(value, str) for value in values):
        raise _wrong(row, name, where, "a list of texts")
    return tuple(values)


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise _wrong(row, name, where, "a text")
    return value


def _count(row: Mapping[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(row, name, where, "a whole number of 0 or more")
    return value


def _is_open(row: Mapping[str, Any], metric: Meaning) -> bool:
    """Whether the interval has no lower end: of one sample alone, where scores may lie below 0."""
    return not metric.is_error and row.get("low", 0) is None and row.get("score") is not None


def _value(row: Mapping[str, Any], name: str, where: str, metric: Meaning) -> float:
    """A number of the metric; null is infinite, which a squared error relative to a variance never is."""
    value = row.get(name)
    if metric.name != DEFAULT and name in row and value is None:
        return math.inf
    if metric.is_error:
        return _error(row, name, where)
    if not isinstance(value, int | float) or isinstance(value, bool) or not -_LARGEST <= value <= _LARGEST:
        raise _wrong(row, name, where, "a number")
    return float(value)


def _error(row: Mapping[str, Any], name: str, where: str) -> float:
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise _wrong(row, name, where, "a number of 0 or more")
    return float(value)
