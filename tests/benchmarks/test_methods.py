"""The methods of the quality benchmark on a small network: baselines, forerunner, records and table."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.quality import baselines, forerunner
from benchmarks.quality.records import Entry, Method, Row, load_row, save_row
from benchmarks.quality.table import agreement, fractions, markdown, verdicts
from benchmarks.quality.zoo import Chosen, ZooModel, labels_of, ort_run

import small_network
from quantsieve.data import InputSpec, open_samples

SPEC = InputSpec("x", "float32", ("batch", *small_network.IMAGE))


@pytest.fixture(scope="module")
def model(small_model):
    arrays = small_network.arrays(small_model, count=140)
    samples = open_samples(arrays, [SPEC])
    numbers = np.arange(140)
    calibration = Chosen(samples, range(40))
    return ZooModel("small", small_model, "x", calibration, samples, numbers[40:70], numbers[70:])


@pytest.fixture(scope="module")
def workshop(model):
    return baselines.open_workshop(model)


@pytest.fixture(scope="module")
def first_k(workshop, tmp_path_factory):
    return baselines.keep_float(workshop, "first", "int8", tmp_path_factory.mktemp("first"), 24)


@pytest.fixture(scope="module")
def ranked(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("forerunner")
    return forerunner.rank(model, False, folder), folder


@pytest.fixture(scope="module")
def row(model, workshop, first_k, tmp_path_factory):
    full = baselines.measure(workshop, workshop.first(0, "int8"), "full int8", tmp_path_factory.mktemp("full"))
    full = replace(full, agreement=np.arange(70) >= 7)  # so that there is something to gain
    return Row("small", "per-tensor", 70, model.float_bytes, full, {"target": "ort-cpu"}, {"first k": first_k})


@pytest.mark.parametrize(
    ("side", "k", "quantized"),
    [
        ("first", 0, ("conv1", "conv2", "dense", "pool")),
        ("first", 1, ("conv2", "dense", "pool")),
        ("first", 2, ("dense",)),
        ("first", 3, ()),
        ("last", 0, ("conv1", "conv2", "dense", "pool")),
        ("last", 1, ("conv1", "conv2", "pool")),
        ("last", 2, ("conv1",)),
        ("last", 3, ()),
    ],
)
def test_k_counts_layers_with_weights_and_the_pool_goes_with_what_is_before_it(workshop, side, k, quantized):
    make = workshop.first if side == "first" else workshop.last
    assert make(k, "int8").quantized() == quantized


def test_baselines_reach_from_full_int8_to_float(first_k, model):
    assert [entry.origin for entry in first_k.entries] == [f"first {k} float" for k in range(4)]
    assert first_k.entries[0].size_bytes == min(entry.size_bytes for entry in first_k.entries)
    assert first_k.entries[-1].agreement.all()


@pytest.mark.parametrize(("largest", "most"), [(5, 24), (24, 24), (80, 24), (81, 7)])
def test_the_values_of_k_start_at_one_and_end_at_all(largest, most):
    found = baselines.spread(largest, most)
    assert (found[0], found[-1]) == (1, largest)
    assert len(found) <= most
    assert list(found) == sorted(set(found))


def test_the_forerunner_ranks_every_node_that_its_quantizer_takes(ranked):
    assert set(ranked[0].scores) >= {"conv1", "conv2"}
    assert all(0 <= score <= 1 for score in ranked[0].scores.values())


def test_the_forerunner_keeps_one_more_node_float_each_time_until_its_seconds_are_used_up(model, ranked):
    ranking, folder = ranked
    found = forerunner.measure(model, ranking, "repaired", False, folder)
    assert found.num_measured == len(found.entries) > 1
    assert [entry.origin for entry in found.entries[:2]] == ["0 nodes float", "1 nodes float"]
    assert found.entries[0].size_bytes < found.entries[-1].size_bytes
    late = forerunner.measure(model, ranking, "repaired", False, folder, limit_s=ranking.cpu_s)
    assert late.num_measured == 1


def test_labels_are_those_of_the_chosen_samples_in_their_order(model):
    chosen = np.arange(140)[::-3]
    wanted = small_network.arrays(model.path, count=140)["x"][chosen]
    run = ort_run(model.path)
    assert labels_of(run, model.evaluation, chosen).tolist() == run({"x": wanted}).argmax(axis=1).tolist()


def test_chosen_samples_have_a_fingerprint_of_their_own(model):
    prints = {Chosen(model.evaluation, indices).fingerprint() for indices in ((0, 1), (1, 0), (0, 1, 2))}
    assert len(prints) == 3
    assert all(len(text) == 64 for text in prints)


def test_a_row_is_read_back_as_it_was_written(row, tmp_path):
    save_row(row, tmp_path)
    again = load_row(tmp_path, "small", "per-tensor")
    assert again.full_int8.agreement.tolist() == row.full_int8.agreement.tolist()
    assert fractions(again) == fractions(row)
    assert again.methods["first k"].entries[1].size_bytes == row.methods["first k"].entries[1].size_bytes
    assert load_row(tmp_path, "small", "all-int8") is None


def test_the_table_names_every_method_and_demand(row):
    best = Entry("programme", row.full_int8.size_bytes, np.ones(70, bool))
    whole = replace(row, methods={**row.methods, "ours": Method((best,), 1.0, 1)})
    text = markdown([whole])
    assert "| small | per-tensor | 10.0 % | 70 | 1.000 [1.000, 1.000] |" in text
    found = {verdict.demand: verdict.is_met for verdict in verdicts([whole])}
    assert found["small, per-tensor: at least the best baseline, within the interval"]


def test_the_worst_ratio_is_the_furthest_from_one_as_a_factor():
    bits = np.ones(3, bool)
    entries = [
        Entry("full int8", 1, bits, predicted_mse=0.2, simulated_mse=1.0, measured_mse=0.4, final_mse=0.4),
        Entry("programme", 2, bits, predicted_mse=0.1, simulated_mse=1.0, measured_mse=2.0, final_mse=0.1),
        Entry("programme", 3, bits, predicted_mse=0.05, simulated_mse=1.0, measured_mse=1.0, final_mse=0.05),
    ]
    found = agreement(entries)
    assert (found.worst_measured_to_simulated, found.full_predicted_to_measured) == (0.4, 0.5)
    assert (found.median_predicted_to_measured, found.rank) == (1.0, pytest.approx(1.0))
