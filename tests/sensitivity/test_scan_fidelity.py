"""On trained models: prices are those of plain loops, and a race names the layers that the whole scan names."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.scan.bench import NUM_SAMPLES, Bench, bench_of
from benchmarks.scan.loops import fake_quantized, price, whole_run
from benchmarks.scan.measure import scan

from quantsieve import api, example
from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare
from quantsieve.sensitivity.interval import rank_correlation
from quantsieve.sensitivity.racing import TOP
from quantsieve.sensitivity.scan_document import ScanResult

ZOO = Path(__file__).resolve().parents[3] / "shared" / "zoo"
KWS = ZOO / "kws_dscnn"
needs_zoo = pytest.mark.skipif(not KWS.is_dir(), reason="the trained models are not beside this checkout")
MODELS = [
    pytest.param((example.model_path(), example.data_path()), id="demo"),
    pytest.param((KWS / "model.onnx", KWS / "eval.npz"), id="kws_dscnn", marks=[pytest.mark.zoo, needs_zoo]),
]


def open_bench(model: Path, data: Path) -> Bench:
    given = load_model(model)
    with np.load(data) as archive:
        name = given.graph.inputs[0].name
        arrays = archive[name][: 2 * NUM_SAMPLES]
    samples = [({name: arrays[i : i + 1]}, 1) for i in range(len(arrays))]
    prepared, _ = prepare(given, [feed for feed, _ in samples[:2]], model.stat().st_size)
    return bench_of("trained", prepared, samples[:NUM_SAMPLES], samples[NUM_SAMPLES:])


@pytest.mark.parametrize("trained", MODELS)
def test_prices_are_those_of_a_file_and_a_whole_run_for_each_source(trained: tuple[Path, Path]) -> None:
    bench = open_bench(*trained)
    prices = scan(bench, bench.executor())
    reference = whole_run(bench, bench.proto)
    mean = prices.mean()
    for index in np.argsort(-mean)[:TOP]:
        proto = fake_quantized(bench, prices.sources[index]).SerializeToString()
        assert mean[index] == pytest.approx(price(bench, whole_run(bench, proto), reference), rel=1e-5)


def differ_in_more_than_ties(raced: ScanResult, whole: ScanResult, top: int) -> set[str]:
    """Layers of only one of the two tops, whose exact interval leaves out the score at which the exact top ends."""
    rows = {row.layer: row for row in whole.layers}
    end = whole.layers[top - 1].value
    apart = {row.layer for row in raced.layers[:top]} ^ {row.layer for row in whole.layers[:top]}
    return {layer for layer in apart if not rows[layer].low <= end <= rows[layer].high}


@pytest.mark.parametrize("metric", ["relative_mse", "kl_div"])
@pytest.mark.parametrize("trained", MODELS)
def test_the_top_of_a_race_is_that_of_all_samples_but_for_ties(trained: tuple[Path, Path], metric: str) -> None:
    whole = api.scan(*trained, metric=metric, schemes=["int8"], samples=64, drift="off")
    raced = api.scan(*trained, metric=metric, schemes=["int8"], drift="off")
    assert raced.num_samples < 64
    scores = ({row.layer: row.value for row in found.layers} for found in (raced, whole))
    a, b = scores
    assert rank_correlation(np.asarray([a[layer] for layer in b]), np.asarray(list(b.values()))) >= 0.95
    for top in (3, 5, TOP):
        assert not differ_in_more_than_ties(raced, whole, top)
    assert len({row.layer for row in raced.layers[:TOP]} & {row.layer for row in whole.layers[:TOP]}) >= TOP - 1
