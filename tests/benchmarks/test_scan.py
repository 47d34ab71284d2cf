"""The plain loop prices as the scan does, and the figures of the table are what they say."""

import logging

import numpy as np
import pytest
from benchmarks.scan.bench import bench_of
from benchmarks.scan.loops import fake_quantized, price, requantized, whole_run
from benchmarks.scan.measure import Row, layer_scores, measure, scan, top_overlap
from benchmarks.scan.run import table

from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare

COUNT = 6


@pytest.fixture(scope="module")
def bench(small_model):
    draw = np.random.default_rng(0)
    samples = [({"x": draw.standard_normal((1, 3, 8, 8)).astype(np.float32)}, 1) for _ in range(2 * COUNT)]
    prepared, _ = prepare(load_model(small_model), [feeds for feeds, _ in samples[:2]], 0)
    return bench_of("small", prepared, samples[:COUNT], samples[COUNT:])


def test_samples_of_one_shape_are_stacked(bench):
    assert [count for _, count in bench.batches] == [COUNT]
    assert bench.batches[0][0]["x"].shape == (COUNT, 3, 8, 8)


def test_a_file_a_source_gives_the_prices_of_the_scan(bench):
    prices = scan(bench, bench.executor())
    reference = whole_run(bench, bench.proto)
    for source, found in zip(prices.sources, prices.mean(), strict=True):
        wanted = price(bench, whole_run(bench, fake_quantized(bench, source).SerializeToString()), reference)
        # Float noise of some 1e-6 of an output's deviation moves an error vector, which is longer than 1e-3.
        assert found == pytest.approx(wanted, rel=1e-2)
        assert wanted > 1e-6


def test_a_requantized_model_has_one_layer_in_integers(bench):
    logging.getLogger().setLevel(logging.ERROR)
    reference = whole_run(bench, bench.proto)
    got = whole_run(bench, requantized(bench, "conv2"))
    assert 1e-6 < price(bench, got, reference) < 1


def test_the_sources_of_a_layer_are_its_weight_and_what_it_reads_and_makes(bench):
    found = {(source.kind, source.owner) for source in bench.layer_sources()["conv2"]}
    assert found == {("weight", "conv2"), ("tensor", "r1"), ("tensor", "r2")}


def test_a_layer_that_one_side_does_not_know_whole_has_no_score(bench):
    ones = dict.fromkeys(bench.sources, 1.0)
    part = {source: 1.0 for source in bench.sources if source.owner != "r2"}
    assert len(layer_scores(bench, ones, part)) < len(layer_scores(bench, ones, ones)) == len(bench.options.schemes)


def test_the_overlap_counts_common_members_whatever_their_order():
    scores = np.arange(6.0)
    assert top_overlap(scores, scores[::-1], 2) == 0
    assert top_overlap(scores, scores[::-1], 4) == 0.5
    assert top_overlap(scores, np.square(scores), 3) == 1


def test_every_measured_model_has_a_line(bench):
    row = measure(bench)
    assert isinstance(row, Row)
    assert row.num_sources == len(bench.sources)
    assert row.rank > 0.99
    lines = table([row, row]).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
