"""All figures of one model, in a process of its own so that its peak memory is its own.

Processor seconds, interleaved with passes of the float model in the same process, whose median is the unit (FPE).
"""

import argparse
import json
import logging
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnxruntime
from benchmarks.quality.zoo import DEFAULT_ZOO
from benchmarks.scan.bench import Bench, float_session, open_bench
from benchmarks.scan.loops import fake_quantized, price, requantized, whole_run
from scipy.stats import spearmanr

from quantsieve.model.execute import Executor
from quantsieve.schemes._static import by_name
from quantsieve.sensitivity.engine import refusal
from quantsieve.sensitivity.suffix import Prices, Source, join, scan_batch
from quantsieve.weights import NO_CORRECTIONS

REPEATS = 3
REQUANTIZED = 3  # layers that the second loop is measured on
TOP = 10
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Row:
    """One model. *_fpe: processor seconds in passes of the float model over the same samples. Costs of the loops are
    scaled from `num_requantized` layers and `num_whole` sources to all of them."""

    model: str
    num_samples: int
    batch: int
    num_sources: int
    num_layers: int
    fpe_ms: float
    scan_s: float  # processor seconds, all sessions of the scan included
    pieces_s: float  # of making the layer-wise sessions, which calibration needs before the scan
    wall_s: tuple[float, float]  # with 1 and 2 workers
    peak_growth_mb: float
    refusal: str | None  # why the scan ran layer by layer
    whole_s: float
    num_whole: int
    requantized_s: float
    num_requantized: int
    price_gap: float  # of the scan against the first loop, relative, the worst of the TOP dearest sources
    length_gap: float  # the worst of all sources in the length of an error vector, |sqrt(p) - sqrt(p')|
    rank: float  # Spearman over the layers, scan against the first loop
    top_overlap: float  # share of the TOP noisiest layers in common

    @property
    def fpe_s(self) -> float:
        return self.fpe_ms / 1e3

    @property
    def scan_fpe(self) -> float:
        return self.scan_s / self.fpe_s

    @property
    def scan_fpe_per_source(self) -> float:
        return self.scan_fpe / self.num_sources

    @property
    def scan_fpe_per_layer(self) -> float:
        return self.scan_fpe / self.num_layers


def measure(bench: Bench, whole_sources: int | None = None) -> Row:
    """whole_sources: most sources that the first loop runs, spread evenly; None: all."""
    session = float_session(bench.proto)
    passes: list[float] = []

    def float_pass() -> None:
        _, cpu, _ = timed(lambda: [session.run(None, feeds) for feeds, _ in bench.batches])
        passes.append(cpu)

    float_pass()  # warms caches and arenas
    passes.clear()
    peak = _peak_mb()
    scans, pieces, walls = [], [], []
    for _ in range(REPEATS):
        float_pass()
        executor, cpu, _ = timed(bench.executor)
        pieces.append(cpu)
        prices, cpu, wall = timed(lambda executor=executor: scan(bench, executor))
        scans.append(cpu)
        walls.append(wall)
        float_pass()
    growth = _peak_mb() - peak
    wall_two = min(timed(lambda: scan(bench, bench.executor(), workers=2))[2] for _ in range(2))
    wanted = _spread(bench.sources, whole_sources)
    reference = whole_run(bench, bench.proto)
    whole, whole_cpu, _ = timed(lambda: [_whole_price(bench, source, reference) for source in wanted])
    float_pass()
    layers = _spread(tuple(bench.options.schemes), REQUANTIZED)
    _, again_cpu, _ = timed(lambda: [whole_run(bench, requantized(bench, layer)) for layer in layers])
    float_pass()
    mean = dict(zip(prices.sources, prices.mean(), strict=True))
    plain = dict(zip(wanted, whole, strict=True))
    scores = layer_scores(bench, mean, plain)
    return Row(
        model=bench.name,
        num_samples=bench.num_samples,
        batch=bench.batches[0][1],
        num_sources=len(bench.sources),
        num_layers=len(bench.options.schemes),
        fpe_ms=float(np.median(passes) * 1e3),
        scan_s=float(np.median(scans)),
        pieces_s=float(np.median(pieces)),
        wall_s=(float(np.median(walls)), wall_two),
        peak_growth_mb=growth,
        refusal=refusal(executor),
        whole_s=whole_cpu * len(bench.sources) / len(wanted),
        num_whole=len(wanted),
        requantized_s=again_cpu * len(bench.options.schemes) / len(layers),
        num_requantized=len(layers),
        price_gap=max(abs(mean[s] - plain[s]) / plain[s] for s in sorted(plain, key=plain.__getitem__)[-TOP:]),
        length_gap=max(abs(mean[s] ** 0.5 - p**0.5) for s, p in plain.items()),
        rank=float(spearmanr(scores[:, 0], scores[:, 1]).statistic),
        top_overlap=top_overlap(scores[:, 0], scores[:, 1]),
    )


def scan(bench: Bench, executor: Executor, workers: int = 1) -> Prices:
    """The exact scan of all batches."""
    known = by_name([bench.scheme])
    return join([
        scan_batch(executor, feeds, count, bench.sources, bench.calibration, NO_CORRECTIONS, known, workers)
        for feeds, count in bench.batches
    ])  # fmt: skip


def layer_scores(bench: Bench, scanned: dict[Source, float], plain: dict[Source, float]) -> np.ndarray:
    """float64 [layers, 2]: the sum of what quantizing the layer alone switches on, of layers that both know whole."""
    rows = [
        (sum(scanned[source] for source in sources), sum(plain[source] for source in sources))
        for sources in bench.layer_sources().values()
        if all(source in plain for source in sources)
    ]
    return np.asarray(rows, np.float64).reshape(-1, 2)


def top_overlap(first: np.ndarray, second: np.ndarray, count: int = TOP) -> float:
    """Share of the `count` largest (of all, if there are fewer) that both have among theirs."""
    count = min(count, len(first))
    tops = [set(np.argsort(-scores, kind="stable")[:count].tolist()) for scores in (first, second)]
    return len(tops[0] & tops[1]) / max(count, 1)


def timed(work: Callable[[], Found]) -> tuple[Found, float, float]:
    """(result, seconds of processor time, seconds of wall clock)."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, time.process_time() - cpu, time.perf_counter() - wall


def environment() -> dict[str, str | int | None]:
    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
        "numpy": np.__version__,
    }


def _whole_price(bench: Bench, source: Source, reference: list[dict[str, np.ndarray]]) -> float:
    return price(bench, whole_run(bench, fake_quantized(bench, source).SerializeToString()), reference)


def _spread(items: Sequence[Found], count: int | None) -> tuple[Found, ...]:
    if count is None or count >= len(items):
        return tuple(items)
    return tuple(items[i] for i in np.linspace(0, len(items) - 1, count).round().astype(int))


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _main(arguments: Sequence[str]) -> None:
    logging.getLogger().setLevel(logging.ERROR)  # onnxruntime's quantizer asks each time to preprocess the model
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--zoo", type=Path, default=DEFAULT_ZOO)
    parser.add_argument("--sources", type=int)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="quantsieve-scan-") as scratch:
        row = measure(open_bench(options.model, options.zoo, Path(scratch)), options.sources)
    document = {"schema": 1, "environment": environment(), "row": asdict(row)}
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1:])
