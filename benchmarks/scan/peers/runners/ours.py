"""Quantsieve's own scan: each layer quantized alone, all that it switches on together, KL divergence of the outputs.

`exact` runs all samples; `raced` those first of which the float model is least sure, more of them for layers whose
place is open, until the others would leave the order as it is. The rows of the weights leave activations float. Runs in
Quantsieve's own environment.
"""

from collections.abc import Mapping
from functools import partial
from itertools import pairwise

import harness
import numpy as np
from benchmarks.scan.bench import Batch, Bench, bench_of
from harness import Clock, Job, Record

from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare
from quantsieve.model.units import find_structure
from quantsieve.sensitivity.engine import kept_weights, open_engine
from quantsieve.sensitivity.metrics import METRICS, exposures, kl_div
from quantsieve.sensitivity.origin import original_nodes
from quantsieve.sensitivity.racing import LOOKS, foretold, looks, open_rows
from quantsieve.sensitivity.suffix import Source
from quantsieve.weights import NO_CORRECTIONS

ALL, WEIGHTS = ("weight", "tensor"), ("weight",)
SCHEME = "int8-channel"


def open_job(job: Job) -> tuple[Bench, dict[str, tuple[str, ...]]]:
    """The model prepared and calibrated, and by layer its nodes of the given file."""
    given = load_model(job.model)
    calibration = [(feed, 1) for feed in harness.feeds(job.calibration, 1)]
    prepared, notes = prepare(given, [feed for feed, _ in calibration[:2]], job.model.stat().st_size)
    samples = [(feed, 1) for feed in harness.feeds(job.samples, 1)]
    bench = bench_of(job.model.parent.name, prepared, calibration, samples, LOOKS[0], SCHEME)
    layers = find_structure(bench.graph).layers
    return bench, original_nodes(Graph(given), bench.graph, layers, dict(notes.given_names))


def layer_sources(bench: Bench, kinds: tuple[str, ...]) -> dict[str, tuple[Source, ...]]:
    """By layer, the sources of these kinds; layers that have none are left out."""
    found = {layer: tuple(s for s in all_ if s.kind in kinds) for layer, all_ in bench.layer_sources().items()}
    return {layer: sources for layer, sources in found.items() if sources}


def probe_batch(
    bench: Bench, executor: Executor, batch: Batch, sources: Mapping[str, tuple[Source, ...]]
) -> np.ndarray:
    """KL divergence, float64 [layers, samples], of each layer quantized alone."""
    feeds, count = batch
    engine = open_engine(executor, feeds, count)
    reference = engine.reference()
    layers = {layer.name: layer for layer in executor.structure.quantizable}
    rows = []
    for name, switched in sources.items():
        rounded = {s.owner: bench.calibration.ranges[s.owner].affine(s.form) for s in switched if s.kind == "tensor"}
        weights = None
        if any(source.kind == "weight" for source in switched):
            weights = kept_weights(executor, layers[name], bench.scheme, bench.calibration, NO_CORRECTIONS)
        outputs = engine.together(rounded, layers[name], weights)
        rows.append(np.mean([kl_div(array, outputs[key]) for key, array in reference.items()], axis=0))
    return np.stack(rows)


def _raced(bench: Bench, executor: Executor, sources: Mapping[str, tuple[Source, ...]]) -> tuple[np.ndarray, float]:
    """(values of all samples, float64 [layers, samples], number that was probed, the mean over the layers); the others
    foretold, as in `scan`."""
    sizes = [exposures(METRICS["kl_div"], open_engine(executor, *batch).reference()) for batch in bench.batches]
    exposed = np.concatenate([part for part in sizes if part is not None])
    order = np.argsort(-exposed, kind="stable")
    singles = [
        {name: array[i : i + 1] for name, array in feeds.items()} for feeds, n in bench.batches for i in range(n)
    ]
    values = np.full((len(sources), len(order)), np.nan)
    still = list(sources)
    rows = {name: row for row, name in enumerate(sources)}
    for begin, end in pairwise((0, *looks(len(order), exposed[order]))):
        for start in range(begin, end, LOOKS[0]):
            stop = min(end, start + LOOKS[0])
            part = [singles[index] for index in order[start:stop]]
            batch = {name: np.concatenate([feeds[name] for feeds in part]) for name in part[0]}, len(part)
            probed = probe_batch(bench, executor, batch, {name: sources[name] for name in still})
            values[[rows[name] for name in still], start:stop] = probed
        is_open = open_rows(values, exposed[order])
        still = [name for name in still if is_open[rows[name]]]
        if not still:
            break
    return foretold(values, exposed[order])[0], float(np.isfinite(values).sum() / len(values))


def work(kinds: tuple[str, ...], is_race: bool, job: Job, record: Record) -> None:
    clock = Clock()
    bench, nodes = open_job(job)
    executor = bench.executor()
    sources = layer_sources(bench, kinds)
    record.setup_cpu_s, record.probes, record.timed = clock.read(), len(sources), len(sources)
    clock = Clock()
    probed: float
    if is_race:
        values, probed = _raced(bench, executor, sources)
    else:
        values = np.concatenate([probe_batch(bench, executor, batch, sources) for batch in bench.batches], axis=1)
        probed = values.shape[1]
    record.probe_cpu_s, record.samples = clock.read(), probed
    record.scores = dict(zip(sources, values.mean(axis=1).tolist(), strict=True))
    record.nodes = {layer: list(names) for layer, names in nodes.items()}


if __name__ == "__main__":
    harness.run(
        (),
        {
            "quantsieve, exact": partial(work, ALL, False),
            "quantsieve, raced": partial(work, ALL, True),
            "quantsieve, weights, exact": partial(work, WEIGHTS, False),
            "quantsieve, weights, raced": partial(work, WEIGHTS, True),
        },
    )
