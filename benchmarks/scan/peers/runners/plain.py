"""The plain loops under KL, with the ranges and integers of Quantsieve's own environment and nothing of its scan.

`calibrate once`: a fake-quantized file, a session and all samples for each layer. `requantize`: today's tools:
onnxruntime's quantizer with all other nodes left out, which calibrates anew for each layer. `own files`: the layer in
the QDQ file that Quantsieve writes, in a session with default options: what saturation and fusion do to the scores.
Layers in a seeded order until the time limit.
"""

import logging
import random
from collections.abc import Callable
from functools import partial

import harness
from benchmarks.scan.bench import Bench
from benchmarks.scan.loops import GUARDS, divergence, fake_quantized, requantized, whole_run
from harness import Clock, Job, Record
from ours import ALL, WEIGHTS, layer_sources, open_job

from quantsieve.model.units import find_structure
from quantsieve.plan import Plan
from quantsieve.schemes._static import by_name
from quantsieve.sensitivity.suffix import Source
from quantsieve.weights import NO_CORRECTIONS, Ingredients
from quantsieve.writing import write_plan

SEED = 0
Make = Callable[[Bench, str, tuple[Source, ...]], bytes]  # the file in which one layer is quantized


def once(bench: Bench, layer: str, sources: tuple[Source, ...]) -> bytes:
    return fake_quantized(bench, *sources).SerializeToString()


def anew(bench: Bench, layer: str, sources: tuple[Source, ...]) -> bytes:
    return requantized(bench, layer)


def written(bench: Bench, layer: str, sources: tuple[Source, ...]) -> bytes:
    structure, known = find_structure(bench.graph), by_name([bench.scheme])
    parts = Ingredients(bench.graph, structure, bench.calibration, NO_CORRECTIONS, known)
    return write_plan(parts, Plan({layer: bench.scheme.name})).SerializeToString()


def work(make: Make, disabled: tuple[str, ...], kinds: tuple[str, ...], job: Job, record: Record) -> None:
    logging.getLogger().setLevel(logging.ERROR)  # onnxruntime's quantizer asks each time to preprocess the model
    clock = Clock()
    bench, _ = open_job(job)
    sources = layer_sources(bench, kinds)
    layers = sorted(sources)
    random.Random(SEED).shuffle(layers)
    reference = whole_run(bench, bench.proto)
    record.setup_cpu_s, record.probes = clock.read(), len(layers)
    clock = Clock()
    for layer in layers:
        record.scores[layer] = divergence(whole_run(bench, make(bench, layer, sources[layer]), disabled), reference)
        record.timed += 1
        record.probe_cpu_s = clock.read()
        if record.probe_cpu_s > job.limit_s:
            break


if __name__ == "__main__":
    harness.run(
        (),
        {
            "plain loop, calibrate once": partial(work, once, GUARDS, ALL),
            "plain loop, calibrate once, weights": partial(work, once, GUARDS, WEIGHTS),
            "plain loop, requantize": partial(work, anew, GUARDS, ALL),
            "plain loop, own files": partial(work, written, (), ALL),
        },
    )
