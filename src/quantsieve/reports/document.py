"""`report.json` and `front.json`: the summary as strict JSON, field by field as docs/report-schema.md
describes it.

A number that JSON lacks is null (nan) or the string 'inf' or '-inf'. Keys that begin with `predicted` or
`simulated` are models; all other figures of candidates were measured.
"""

import json
import math
from collections.abc import Mapping

from quantsieve.evaluation import Estimate, Failed, Measured
from quantsieve.front import Candidate, is_float
from quantsieve.reports.cautions import cautions
from quantsieve.reports.decisions import Decision, Ranked, decide, rank_prices
from quantsieve.reports.summary import (
    Summary,
    disagreement_of,
    failures,
    is_baseline,
    loss_of,
    mse_ratio,
    precision,
)

SCHEMA = 1

Json = dict[str, object]


def report_json(summary: Summary) -> str:
    """The text of report.json."""
    return _text(report_document(summary))


def front_json(summary: Summary) -> str:
    """The text of front.json."""
    return _text(front_document(summary))


def report_document(summary: Summary) -> Json:
    """Everything; only values that strict JSON has."""
    document: Json = {
        "schema": SCHEMA,
        "model": {
            "file": summary.model_file,
            "key": summary.model_key,
            "float_bytes": summary.float_bytes,
            "full_bytes": summary.full_bytes,
        },
        "task": {
            "metric": summary.metric,
            "description": summary.metric_text,
            "direction": "higher is better",
        },
        "data": _data(summary),
        "run": _run(summary),
        "environment": {**summary.environment, "saturation": summary.saturation},
        "warnings": [{"loud": caution.loud, "text": caution.text} for caution in cautions(summary)],
        "budget": {"max_drop": summary.max_drop, "confident": summary.confident},
        "recommended": _recommended(summary),
        "named": {name: id for id, names in summary.names.items() for name in names},
        "front": list(summary.front),
        "candidates": [_candidate(summary, candidate) for candidate in summary.candidates],
        "layers": _layers(summary),
        "prediction": _prediction(summary),
    }
    return strict(document)  # type: ignore[return-value]


def front_document(summary: Summary) -> Json:
    """The front alone, smallest file first."""
    rows = [_front_row(summary, summary.candidate(id)) for id in summary.front]
    document: Json = {
        "schema": SCHEMA,
        "model": summary.model_file,
        "metric": summary.metric,
        "synthetic": summary.synthetic,
        "samples": summary.splits.final,
        "recommended": summary.recommendation.id,
        "front": rows,
    }
    return strict(document)  # type: ignore[return-value]


def strict(value: object) -> object:
    """The value with what JSON has: tuples as lists, nan as null, infinities as 'inf' and '-inf', numpy
    scalars as Python's. Raises TypeError for anything else."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if hasattr(value, "item"):
        return strict(value.item())
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else (None if math.isnan(value) else repr(value))
    raise TypeError(f"a report cannot hold {type(value).__name__}")


def _text(document: Json) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _data(summary: Summary) -> Json:
    return {
        "source": summary.data,
        "synthetic": summary.synthetic,
        "calibration_samples": summary.splits.calibration,
        "search_samples": summary.splits.search,
        "final_samples": summary.splits.final,
        "seed": summary.seed,
    }


def _run(summary: Summary) -> Json:
    return {
        "stopped": summary.stopped,
        "finished": summary.stopped == "done",
        "elapsed_s": summary.elapsed_s,
        "schemes": summary.schemes,
        "settings": summary.settings,
    }


def _recommended(summary: Summary) -> Json:
    """The chosen model, or nulls with the reason why there is none."""
    chosen = summary.recommended
    document: Json = {"id": summary.recommendation.id, "reason": summary.recommendation.reason}
    if chosen is None:
        return {**document, "meets_budget": False, "size_reduction_kept": None, "layers": []}
    loss = loss_of(chosen)
    assert loss is not None  # only measured models are recommended
    return {
        **document,
        "meets_budget": (loss.high if summary.confident else loss.value) <= summary.max_drop,
        "is_float": is_float(chosen),
        "file": summary.files.get(chosen.id),
        "size_bytes": chosen.size_bytes,
        "size_reduction_kept": summary.kept(chosen),
        "loss": _estimate(loss),
        "layers": [_decision(decision) for decision in decide(summary, chosen)],
    }


def _decision(decision: Decision) -> Json:
    return {
        "name": decision.layer.name,
        "decision": decision.kind,
        "scheme": decision.scheme,
        **_price(decision.ranked),
        "reason": decision.reason,
    }


def _price(ranked: Ranked | None) -> Json:
    if ranked is None:
        return {"price": None, "rank": None}
    price = ranked.price
    return {"price": _interval(price.value, price.low, price.high), "rank": ranked.rank}


def _candidate(summary: Summary, candidate: Candidate) -> Json:
    return {
        "id": candidate.id,
        "origin": candidate.origin,
        "is_baseline": is_baseline(candidate),
        "on_front": candidate.id in summary.front,
        "names": summary.names.get(candidate.id, ()),
        "file": summary.files.get(candidate.id),
        "size_bytes": candidate.size_bytes,
        "size_ratio": candidate.size_bytes / summary.float_bytes if summary.float_bytes else None,
        "size_reduction_kept": summary.kept(candidate),
        "final": _measured(candidate, candidate.final),
        "search": _measured(candidate, candidate.search),
        "failures": [_failure(found) for found in failures(candidate)],
        "latency": _latency(summary, candidate),
        "mse": {
            "measured": candidate.measured_mse,
            "simulated": candidate.simulated_mse,
            "predicted": candidate.predicted_mse,
            "measured_over_simulated": mse_ratio(candidate),
        },
        "precision": _precision(summary, candidate),
        "plan": dict(sorted(candidate.plan.schemes.items())),
        "notes": candidate.notes,
    }


def _measured(candidate: Candidate, found: Measured | Failed | None) -> Json | None:
    if not isinstance(found, Measured):
        return None
    zero = Estimate(0.0, 0.0, 0.0)
    return {
        "split": found.split,
        "samples": found.num_samples,
        "score": found.score,
        "float_score": found.reference_score,
        "loss": _estimate(zero if is_float(candidate) else found.loss()),
        "disagreement": _estimate(zero if is_float(candidate) else found.disagreement()),
        "mse": found.mse,
        "sqnr_db": found.sqnr_db,
        "bad_samples": found.num_bad,
    }


def _failure(found: Failed) -> Json:
    return {"split": found.split, "kind": found.kind, "stage": found.stage, "reason": found.reason}


def _latency(summary: Summary, candidate: Candidate) -> Json | None:
    found = candidate.latency
    if found is None:
        return None
    against = summary.of_float_time(candidate)
    return {
        "median_ms": found.median_ms,
        "low_ms": found.low_ms,
        "high_ms": found.high_ms,
        "runs": found.runs,
        "over_float": None if against is None else _interval(against.median, against.low, against.high),
    }


def _precision(summary: Summary, candidate: Candidate) -> Json | None:
    found = precision(summary, candidate)
    if found is None:
        return None
    return {
        "text": found.text(),
        "asked_int8": found.asked_int8,
        "ran_int8": found.ran_int8,
        "gone": found.gone,
        "differing": found.differing,
    }


def _front_row(summary: Summary, candidate: Candidate) -> Json:
    loss, disagreement = loss_of(candidate), disagreement_of(candidate)
    latency = candidate.latency
    return {
        "id": candidate.id,
        "origin": candidate.origin,
        "names": summary.names.get(candidate.id, ()),
        "file": summary.files.get(candidate.id),
        "size_bytes": candidate.size_bytes,
        "size_reduction_kept": summary.kept(candidate),
        "loss": None if loss is None else _estimate(loss),
        "disagreement": None if disagreement is None else _estimate(disagreement),
        "latency_ms": None if latency is None else _interval(latency.median_ms, latency.low_ms, latency.high_ms),
    }


def _layers(summary: Summary) -> list[Json]:
    prices: dict[str, list[Ranked]] = {}
    for ranked in rank_prices(summary.prices):
        prices.setdefault(ranked.price.layer, []).append(ranked)
    return [
        {
            "name": layer.name,
            "op_type": layer.op_type,
            "params": layer.num_params,
            "weight_bytes": layer.weight_bytes,
            "macs": layer.macs,
            "refusal": layer.refusal,
            "prices": [{"scheme": r.price.scheme, **_price(r)} for r in prices.get(layer.name, [])],
        }
        for layer in summary.layers
    ]


def _prediction(summary: Summary) -> Json | None:
    found = summary.prediction
    if found is None:
        return None
    return {
        "finalists": found.num_finalists,
        "median_predicted_over_measured": found.ratio_median,
        "rank_correlation": found.rank_correlation,
    }


def _estimate(found: Estimate) -> Json:
    return _interval(found.value, found.low, found.high)


def _interval(value: float, low: float, high: float) -> Json:
    return {"value": value, "low": low, "high": high}
