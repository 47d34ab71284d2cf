"""scan.json: what is written is read back, and what is not a scan of this model is refused."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scan_facts import scan, scan_of, score

from quantsieve import api
from quantsieve.clipping import Method
from quantsieve.errors import InputError
from quantsieve.sensitivity.drift import Drift
from quantsieve.sensitivity.local import TensorRow
from quantsieve.sensitivity.metrics import Meaning, get
from quantsieve.sensitivity.scan_document import PRICED, SCHEMA, parse_scan, scan_text

names = st.text(max_size=8)
errors = st.floats(0, 1e300)
counts = st.integers(0, 2**53)
rows = st.lists(
    st.builds(
        score,
        names,
        errors,
        scheme=st.sampled_from(["int8", "int8-channel"]),
        op_type=names,
        nodes=st.lists(names, max_size=3).map(tuple),
        stage=st.none() | names,
        block=st.none() | names,
        half=st.none() | names,
        params=counts,
        bytes=counts,
        macs=counts,
        low=errors,
        high=errors | st.just(math.inf),
        tie=st.none() | st.booleans(),
        weights=errors,
        weights_corrected=errors,
        tensors=st.dictionaries(names, errors, max_size=3),
        keep_float=st.booleans(),
        drift=st.none() | errors | st.just(math.inf),
    ),
    max_size=6,
    unique_by=lambda row: (row.layer, row.scheme),
)

drifts = st.lists(
    st.builds(Drift, names, errors, errors | st.just(math.inf), num_samples=counts)
    | st.builds(Drift, names, st.none() | errors, st.none(), names),
    max_size=2,
).map(tuple)


@given(rows, names, counts, st.lists(names, max_size=2).map(tuple), drifts)
def test_a_written_scan_is_read_back_equal(found, name, seed, notes, drift):
    made = scan(found, ("int8", "int8-channel"), model_file=name, seed=seed, notes=notes, drift=drift)
    assert parse_scan(scan_text(made), "scan.json") == made


@given(rows)
def test_the_text_is_strict_json_ranked_from_1(found):
    text = scan_text(scan(found))
    document = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert [row["rank"] for row in document["layers"]] == list(range(1, len(found) + 1))
    values = [row["score"] for row in document["layers"]]
    assert values == sorted(values, reverse=True)


any_score = st.floats(-1e300, 1e300) | st.just(math.inf)
metric_rows = st.lists(
    st.builds(
        score,
        names,
        any_score,
        low=st.floats(-1e300, 1e300),
        high=st.floats(-1e300, 1e300) | st.just(math.inf),
        weights=st.just(0.0),
        weights_corrected=st.just(0.0),
        tensors=st.just({}),
        outputs=st.dictionaries(names, any_score, max_size=2),
        channels=st.dictionaries(names, st.lists(any_score, min_size=1, max_size=3).map(tuple), max_size=2),
    ),
    max_size=4,
    unique_by=lambda row: (row.layer, row.scheme),
)
measures = st.sampled_from(
    [get("sqnr").meaning, get("accuracy").meaning, Meaning("own.py:f", "text", "unit", is_error=False)]
)


@given(metric_rows, measures, st.tuples(st.floats(0, 9), st.floats(0, 9)))
def test_a_scan_by_another_metric_is_read_back_equal(found, metric, weights):
    ordered = sorted(found, key=lambda row: -metric.worse(row.value))
    made = replace(scan([]), layers=tuple(ordered), metric=metric, combined_weights=weights)
    assert parse_scan(scan_text(made), "scan.json") == made


def bare(layer, value, low, high):
    return score(layer, value, low=low, high=high, weights=0.0, weights_corrected=0.0, tensors={})


def test_scores_without_end_are_null_and_of_one_sample_have_no_interval():
    metric = get("accuracy").meaning
    rows = (bare("a", math.inf, math.inf, math.inf), bare("b", -0.5, -math.inf, math.inf))
    made = replace(scan([]), layers=rows, metric=metric)
    written = [[row[name] for name in ("score", "low", "high")] for row in json.loads(scan_text(made))["layers"]]
    assert written == [[None, None, None], [-0.5, None, None]]
    assert parse_scan(scan_text(made), "scan.json") == made


def test_an_error_below_0_is_refused_and_an_sqnr_below_0_is_not():
    for name, is_fine in (("mse", False), ("sqnr", True)):
        made = replace(scan([bare("a", -3.0, -4.0, -2.0)]), metric=get(name).meaning)
        if is_fine:
            assert parse_scan(scan_text(made), "scan.json") == made
        else:
            with pytest.raises(InputError, match=r"-3\.0 instead of a number of 0 or more"):
                parse_scan(scan_text(made), "scan.json")


@pytest.mark.parametrize("mode", ["alone", "rescue"])
def test_a_scan_of_schema_2_is_read(mode):
    made = scan_of([3.0, 2.0], mode=mode, metric=PRICED[mode])
    document = json.loads(scan_text(made))
    del document["combined_weights"], document["drift"]
    document |= {"schema": 2, "metric": {"name": "relative squared error", "text": "x", "direction": "y", "unit": "z"}}
    assert parse_scan(json.dumps(document), "scan.json") == made
    del document["mode"], document["tensors"]  # as the first files of that schema
    assert parse_scan(json.dumps(document), "scan.json").mode == "alone"


def drift_row(**changes):
    row = {"scheme": "int8", "simulated": 0.25, "measured": 0.5, "ratio": 2.0, "samples": 8, "reason": None}
    return {**row, **changes}


def test_the_drift_of_a_scheme_is_written_with_its_ratio():
    made = scan_of([1.0], drift=(Drift("int8", 0.25, 0.5, num_samples=8), Drift("int8-channel", 0.25, None, "why")))
    first, second = json.loads(scan_text(made))["drift"]
    assert first == drift_row()
    assert second == drift_row(scheme="int8-channel", measured=None, ratio=None, samples=0, reason="why")


@pytest.mark.parametrize(
    ("simulated", "measured", "ratio", "is_outside"),
    [
        (0.5, 0.5, 1.0, False),
        (0.5, 0.6, 1.2, True),
        (0.5, 0.25, 0.5, True),
        (0.5, math.inf, math.inf, True),
        (0.0, 0.5, math.inf, True),
        (0.0, 1e-14, math.inf, False),  # float rounding
        (0.0, 0.0, None, False),
        (math.inf, math.inf, None, False),
        (0.5, None, None, False),
    ],
)
def test_drift_is_the_measured_over_the_simulated_error(simulated, measured, ratio, is_outside):
    found = Drift("int8", simulated, measured)
    assert (found.ratio, found.is_outside) == (ratio, is_outside)


def changed(change):
    document = json.loads(scan_text(scan_of([3.0, 2.0])))
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(kind="evaluation"), "kind 'scan', found kind 'evaluation'"),
        (lambda d: d.pop("kind"), "kind None"),
        (lambda d: d.update(schema=1), "schema 2 or 3, found schema 1"),
        (lambda d: d.update(schema=4), "found schema 4"),
        (lambda d: d.update(schema=True), "found schema true"),
        (lambda d: d.pop("metric"), "null instead of an object as metric"),
        (lambda d: d["metric"].update(name="own", direction="up"), "'lower is worse' as direction of metric"),
        (lambda d: d["layers"][0].update(low=None), "null instead of a number"),
        (lambda d: d["layers"][0].update(outputs=[]), "an object as outputs"),
        (lambda d: d["layers"][0].update(outputs={"y": "1"}), "as y of"),
        (lambda d: d["layers"][0].update(channels={"y": 1}), "a list as y of channels"),
        (lambda d: d["layers"][0].update(channels={"y": [None]}), "null instead of a number"),
        (lambda d: d.update(combined_weights={"local": -1, "accumulated": 1}), "-1 instead of a number"),
        (lambda d: d["layers"][1].update(keep_float="true"), r'"true" instead of true or false as keep_float .*\(l1\)'),
        (lambda d: d["layers"][0].pop("keep_float"), "nothing instead of true or false"),
        (lambda d: d["layers"][0].update(score=-1), "-1 instead of a number"),
        (lambda d: d["layers"][0].update(score=10**400), "10000"),
        (lambda d: d["layers"][0].update(score=None), "null instead of a number"),
        (lambda d: d["layers"][0].update(score=True), "true instead of a number"),
        (lambda d: d["layers"][0].update(drift="1"), '"1" instead of a number of 0 or more as drift'),
        (lambda d: d.update(drift={}), "a list as drift"),
        (lambda d: d.update(drift=[1]), r"1 instead of an object as drift\[0\]"),
        (lambda d: d.update(drift=[drift_row(measured=-1)]), "-1 instead of a number of 0 or more as measured"),
        (lambda d: d.update(drift=[drift_row(reason="none")]), "0.5 instead of null, as there is a reason"),
        (lambda d: d.update(drift=[drift_row(samples=None)]), "null instead of a whole number"),
        (lambda d: d["layers"][0].update(nodes=[1]), "a list of texts as nodes"),
        (lambda d: d["layers"][0].update(half=1), "1 instead of a text or null as half"),
        (lambda d: d["layers"][0].update(tie=0), "0 instead of true, false or null"),
        (lambda d: d["layers"][0]["parts"].update(tensors=[]), "an object"),
        (lambda d: d["layers"].append(dict(d["layers"][0])), "two rows for 'l0'"),
        (lambda d: d["layers"].append(3), r"layers\[2\]"),
        (lambda d: d.update(layers={}), "a list as layers"),
        (lambda d: d["refused"][0].pop("reason"), "reason"),
        (lambda d: d.update(samples=1.5), "1.5 instead of a whole number"),
        (lambda d: d.pop("calibration"), "calibration"),
        (lambda d: d["calibration"].update(method="most"), '"most" instead of a known method'),
        (lambda d: d["calibration"].update(percentile=99), '"minmax" instead of a known method, percentile of that'),
        (lambda d: d["calibration"].update(percentile="99"), '"99" instead of a number as percentile'),
    ],
)  # fmt: skip
def test_what_is_no_scan_is_refused_with_the_place_in_one_paragraph(change, words):
    with pytest.raises(InputError, match=words) as caught:
        parse_scan(changed(change), "scan.json")
    assert "scan.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("method", [Method("mse"), Method("percentile", 99.5), Method("percentile"), Method()])
def test_a_scan_keeps_the_calibration_method(method):
    scan = scan_of([3.0, 2.0], calibration_method=method)
    assert parse_scan(scan_text(scan), "scan.json") == scan
    row = scan.document()["calibration"]
    assert (row["method"], row.get("percentile")) == (
        method.name,
        method.percentile if method.name == "percentile" else None,
    )


def test_a_scan_written_before_there_were_stages_and_halves_has_none():
    def older(document):
        for row in document["layers"]:
            del row["stage"], row["half"]

    assert parse_scan(changed(older), "scan.json") == scan_of([3.0, 2.0])


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"kind": "scan"}', b"\xff\xfe", "[" * 100_000])
def test_what_is_no_document_is_refused(text):
    with pytest.raises(InputError, match=r"scan\.json"):
        parse_scan(text, "scan.json")


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(InputError, match="NaN"):
        parse_scan(scan_text(scan_of([1.0])).replace('"score": 1.0', '"score": NaN'), "scan.json")


def test_a_scan_of_another_model_is_refused():
    text = scan_text(scan_of([1.0]))
    assert parse_scan(text, "scan.json", "ab" * 32).model_key == "ab" * 32
    with pytest.raises(InputError, match=r"same model.*m\.onnx with other bytes"):
        parse_scan(text, "scan.json", "cd" * 32)


def test_a_mark_on_any_row_of_a_layer_counts():
    rows = [score("a", 3), score("a", 1, "int8-channel", keep_float=True), score("b", 2)]
    assert scan(rows).keep_float == ("a",)


def test_rows_that_were_moved_are_ranked_again_by_score():
    text = changed(lambda d: d["layers"].reverse())
    assert [row.layer for row in parse_scan(text, "scan.json").layers] == ["l0", "l1"]
    assert SCHEMA == 3


def test_tensors_come_back_with_errors_that_have_no_end():
    rows = (
        TensorRow("x", None, ("a", "b"), 0.25, math.inf, 1.0),
        TensorRow("y", "a", (), 0.0, 1e-4, 0.0),
    )
    given = replace(scan_of([1.0]), tensors=rows)
    text = scan_text(given)
    assert parse_scan(text, "s").tensors == rows
    shown = json.loads(text)["tensors"]
    assert shown[0]["local"] == {"relative_error": 0.25, "sqnr_db": pytest.approx(6.0206)}
    assert shown[0]["accumulated"] == {"relative_error": None, "sqnr_db": None}
    assert shown[1]["local"] == {"relative_error": 0.0, "sqnr_db": None}


def test_the_scan_of_a_model_tells_both_errors_of_its_tensors(small_model, small_data):
    found = api.scan(small_model, small_data, samples=8, schemes=["int8"], drift="off")
    assert [row.combined for row in found.tensors] == sorted((row.combined for row in found.tensors), reverse=True)
    assert {row.root for row in found.tensors} >= {"x"}
    for row in found.tensors:
        assert 0 < row.local < 1 and 0 < row.accumulated < 1
        if row.producer is None:
            assert row.local == pytest.approx(row.accumulated)  # nothing happened before an input
