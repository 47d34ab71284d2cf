import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from run_facts import make_hard_summary, make_summary

from quantsieve.evaluation import Measured
from quantsieve.front import Recommendation
from quantsieve.reports.document import front_json, report_json, strict
from quantsieve.reports.summary import Summary
from quantsieve.run.codec import decode, encode

SCHEMA_PAGE = Path(__file__).parents[2] / "docs" / "report-schema.md"


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


def read(text: str) -> dict:
    return json.loads(text, parse_constant=refuse)


def keys_of(document: object) -> set[str]:
    if isinstance(document, dict):
        return set(document) | {key for value in document.values() for key in keys_of(value)}
    return {key for item in document for key in keys_of(item)} if isinstance(document, list) else set()


def test_the_report_is_strict_json_with_a_schema_number():
    for summary in (make_summary(), make_hard_summary()):
        assert read(report_json(summary))["schema"] == 1
        assert read(front_json(summary))["schema"] == 1


def test_numbers_that_json_lacks_become_null_or_a_string():
    values = (math.nan, math.inf, -math.inf, np.float32(0.5), np.int64(3), True, None)
    assert strict(values) == [None, "inf", "-inf", 0.5, 3, True, None]
    with pytest.raises(TypeError, match="object"):
        strict(object())


def test_the_recommended_model_says_what_it_keeps_of_full_int8s_size_reduction():
    summary = make_summary()
    found = read(report_json(summary))["recommended"]
    assert found["id"] == summary.recommendation.id and found["meets_budget"]
    expected = (summary.float_bytes - found["size_bytes"]) / (summary.float_bytes - summary.full_bytes)
    assert found["size_reduction_kept"] == pytest.approx(expected)
    assert found["file"] == f"plans/{found['id']}/model.onnx"


def test_every_layer_is_quantized_or_float_by_plan_or_refused_with_a_reason():
    summary = make_summary()
    layers = read(report_json(summary))["recommended"]["layers"]
    assert [layer["name"] for layer in layers] == [layer.name for layer in summary.layers]
    assert all(layer["reason"] for layer in layers)
    by_decision = {layer["decision"]: layer for layer in layers}
    assert set(by_decision) == {"quantized", "float by plan", "refused"}
    assert by_decision["quantized"]["scheme"] == "int8" and by_decision["quantized"]["rank"] >= 1
    assert "price" in by_decision["float by plan"]["reason"]
    assert "no int8 scheme for Softmax" in by_decision["refused"]["reason"]


def test_rank_one_is_the_highest_price_of_its_scheme():
    layers = read(report_json(make_summary()))["layers"]
    prices = [price for layer in layers for price in layer["prices"] if price["scheme"] == "int8"]
    worst = max(prices, key=lambda price: price["price"]["value"])
    assert worst["rank"] == 1
    assert sorted(price["rank"] for price in prices) == list(range(1, len(prices) + 1))


def test_a_candidate_shows_measurement_beside_simulation_and_prediction():
    summary = make_hard_summary()
    full = next(c for c in read(report_json(summary))["candidates"] if c["origin"] == "full int8")
    assert full["mse"]["measured_over_simulated"] == pytest.approx(4.2)
    assert full["mse"]["predicted"] is not None
    assert full["precision"] == {
        "text": "asked int8 on 67 layers, ran int8 on 65, 1 fused away",
        "asked_int8": 67,
        "ran_int8": 65,
        "gone": 1,
        "differing": {"classifier": "float"},
    }
    assert full["final"]["loss"]["low"] < full["final"]["loss"]["value"] < full["final"]["loss"]["high"]


def test_a_failed_candidate_is_there_with_its_reason_and_without_figures():
    found = [c for c in read(report_json(make_summary()))["candidates"] if c["failures"]]
    assert [c["failures"][0]["reason"] for c in found] == ["SIGSEGV in the worker"]
    assert found[0]["final"] is None and found[0]["latency"] is None and not found[0]["on_front"]


def test_the_float_models_loss_is_exactly_zero_with_an_interval_of_zero():
    for candidate in read(report_json(make_summary()))["candidates"]:
        if candidate["origin"] == "float":
            assert candidate["final"]["loss"] == {"value": 0.0, "low": 0.0, "high": 0.0}
            assert candidate["final"]["sqnr_db"] == "inf"


def test_without_a_recommendation_the_report_says_why():
    summary = replace(make_summary(), recommendation=Recommendation(None, "No measured model has it."))
    found = read(report_json(summary))["recommended"]
    assert found["id"] is None and found["meets_budget"] is False
    assert found["reason"] == "No measured model has it." and found["size_reduction_kept"] is None


def test_front_json_holds_the_front_only_smallest_first():
    summary = make_summary()
    rows = read(front_json(summary))["front"]
    assert tuple(row["id"] for row in rows) == summary.front
    assert [row["size_bytes"] for row in rows] == sorted(row["size_bytes"] for row in rows)
    assert {"id", "file", "loss", "size_bytes", "latency_ms"} <= set(rows[0])


def test_every_field_of_the_documents_is_described_in_the_schema_page():
    page = SCHEMA_PAGE.read_text("utf-8")
    summary = make_summary(environment={}, settings={})
    report = read(report_json(summary))
    for candidate in report["candidates"]:
        candidate["plan"], candidate["precision"] = {}, {**(candidate["precision"] or {}), "differing": {}}
    report["named"] = {}
    keys = keys_of(report) | keys_of(read(front_json(summary)))
    assert not {key for key in keys if f"`{key}" not in page and f".{key}`" not in page and f'"{key}"' not in page}


def test_a_summary_survives_the_run_folder():
    summary = make_summary()
    found = decode(*encode(summary), Summary)
    assert report_json(found) == report_json(summary)
    assert all(type(getattr(found, f.name)) is type(getattr(summary, f.name)) for f in fields(Summary))


def test_outputs_that_are_not_finite_do_not_break_the_report():
    summary = make_summary()
    last = summary.candidates[-2]
    assert isinstance(last.final, Measured)
    errors = np.full(last.final.num_samples, np.inf)
    broken = replace(last, final=replace(last.final, errors=errors, sqnr_db=math.nan, num_bad=9))
    changed = replace(summary, candidates=(*summary.candidates[:-2], broken, summary.candidates[-1]))
    found = next(c for c in read(report_json(changed))["candidates"] if c["id"] == broken.id)
    assert (found["final"]["mse"], found["final"]["sqnr_db"], found["final"]["bad_samples"]) == (
        "inf",
        None,
        9,
    )
