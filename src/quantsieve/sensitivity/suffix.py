"""Prices by suffix execution: each noise source is switched on alone, and only what it reaches is run again.

For a sample, e_i is the change of the float outputs by source i, each output divided by its standard deviation and the
root of its size, so that |e_i|^2 is the relative squared error (mean over outputs). The price of i is the mean of
|e_i|^2 over the samples: with independent sources the squared error of a plan is the sum of its prices. The part
|mean of e_i|^2 of a price is common to all samples; bias correction along the plan removes it, so it is kept beside
the price (long outputs on a seeded sign sketch, which keeps squared lengths on average).
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from quantsieve.calibrate import Calibration
from quantsieve.model.execute import Executor
from quantsieve.plan import Options
from quantsieve.schemes import Scheme
from quantsieve.sensitivity.engine import float_outputs as float_outputs
from quantsieve.sensitivity.engine import kept_integers, open_engine
from quantsieve.sensitivity.interval import half_width
from quantsieve.weights import Corrections, constants

VERSION = 2
SKETCH = 1024  # longest mean error vector kept


@dataclass(frozen=True, slots=True)
class Source:
    """A place where rounding adds noise. kind 'weight': owner a layer, form a scheme;
    kind 'tensor': owner a root, form an activation format."""

    kind: str
    owner: str
    form: str


@dataclass(frozen=True, slots=True)
class Prices:
    """errors: float64 [sources, samples], relative squared error of the outputs, higher is worse.
    mean_vectors: float32 [sources, at most SKETCH], mean over the samples of the error vectors."""

    sources: tuple[Source, ...]
    errors: np.ndarray
    mean_vectors: np.ndarray

    @property
    def num_samples(self) -> int:
        return int(self.errors.shape[1])

    def mean(self) -> np.ndarray:
        """float64 [sources]: the prices."""
        return self.errors.mean(axis=1)

    def common(self) -> np.ndarray:
        """float64 [sources]: the part of each price that all samples share, |E e|^2, without its sampling bias."""
        n = self.num_samples
        if n < 2:
            return np.zeros(len(self.sources))
        squared = np.square(self.mean_vectors.astype(np.float64)).sum(axis=1)
        return np.clip((n * squared - self.mean()) / (n - 1), 0.0, self.mean())

    def corrected(self) -> np.ndarray:
        """float64 [sources]: the prices once bias correction along the plan has taken the common part away."""
        return self.mean() - self.common()

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper end of the 95 % normal interval of each price, float64 [sources] each."""
        mean, half = self.mean(), half_width(self.errors)
        return np.maximum(mean - half, 0.0), mean + half

    def rows(self) -> dict[tuple[str, str, str], int]:
        """Number of the row of each source by (kind, owner, form)."""
        return {(source.kind, source.owner, source.form): row for row, source in enumerate(self.sources)}

    def sums(self, layer: str, scheme: str, roots: Sequence[str], form: str) -> np.ndarray:
        """float64 [samples]: what one layer costs alone, that is the sum of the sources that it switches on: its
        weights under the scheme, where it has some, and the tensors `roots` in the activation format."""
        row = self.rows()
        found = [row["tensor", root, form] for root in roots]
        found += [row["weight", layer, scheme]] if ("weight", layer, scheme) in row else []
        return np.asarray(self.errors[found].sum(axis=0)) if found else np.zeros(self.num_samples)


def find_sources(executor: Executor, options: Options, schemes: Sequence[Scheme]) -> tuple[Source, ...]:
    """Every source that some plan over the options can switch on."""
    structure = executor.structure
    found = []
    for layer in structure.quantizable:
        if layer.weight is not None:
            found += [Source("weight", layer.name, name) for name in options.schemes.get(layer.name, ())]
    formats = tuple(dict.fromkeys(scheme.activation for scheme in schemes))
    for tensor in structure.tensors:
        users = [*tensor.readers, *([tensor.producer] if tensor.producer else [])]
        if any(user in options.schemes for user in users):
            found += [Source("tensor", tensor.root, form) for form in formats]
    return tuple(found)


def scan_batch(
    executor: Executor,
    feeds: Mapping[str, np.ndarray],
    num_samples: int,
    sources: Sequence[Source],
    calibration: Calibration,
    corrections: Corrections,
    schemes: Mapping[str, Scheme],
    workers: int = 1,
    tell: Callable[[int], None] = lambda done: None,
) -> Prices:
    """Exact prices of all sources on one batch; peak memory: a float pass of the batch and one probe a worker.

    tell: is called with the number of sources priced so far.
    """
    engine = open_engine(executor, feeds, num_samples)
    reference = engine.reference()
    layers = {layer.name: layer for layer in executor.structure.quantizable}

    def probe(source: Source) -> tuple[np.ndarray, np.ndarray]:
        if source.kind == "tensor":
            outputs = engine.rounded(source.owner, calibration.ranges[source.owner].affine(source.form))
        else:
            layer = layers[source.owner]
            made = kept_integers(executor, layer, schemes[source.form], calibration, corrections)
            bias = made.bias.dequantized() if made.bias is not None else constants(executor.graph, layer)[1]
            outputs = engine.reweighted(layer, made.weight.dequantized(), bias)
        error, vectors = error_vectors(outputs, reference, calibration.output_variance, num_samples)
        return error, vectors.mean(axis=0)

    results = []
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for result in pool.map(probe, sources) if workers > 1 else map(probe, sources):
            results.append(result)
            tell(len(results))
    errors = np.stack([error for error, _ in results])
    return Prices(tuple(sources), errors, np.stack([mean for _, mean in results]))


def join(parts: Sequence[Prices]) -> Prices:
    """One fact from the batches of a scan, in their order."""
    counts = np.asarray([part.num_samples for part in parts], np.float64)
    means = sum(part.mean_vectors * count for part, count in zip(parts, counts, strict=True)) / counts.sum()
    errors = np.concatenate([part.errors for part in parts], axis=1)
    return Prices(parts[0].sources, errors, np.asarray(means, np.float32))


def error_vectors(
    outputs: Mapping[str, np.ndarray],
    reference: Mapping[str, np.ndarray],
    variance: Mapping[str, float],
    num_samples: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(relative squared error, float64 [samples]; error vectors, float32 [samples, at most SKETCH]).

    A value that is not finite, or an output whose shape changed, counts as an error of one variance an element.
    """
    rows = []
    for name, wanted in reference.items():
        if outputs[name].shape != wanted.shape:
            gap = np.ones((num_samples, 1), np.float32)
        else:
            gap = (outputs[name] - wanted).reshape(num_samples, -1) / np.float32(np.sqrt(variance[name]))
            gap = np.where(np.isfinite(gap), gap, np.float32(1))
        rows.append(gap / np.float32(np.sqrt(max(gap.shape[1], 1) * len(reference))))
    joined = np.concatenate(rows, axis=1)
    return np.square(joined.astype(np.float64)).sum(axis=1), _sketch(joined)


def _sketch(vectors: np.ndarray) -> np.ndarray:
    length = vectors.shape[1]
    if length <= SKETCH:
        return vectors
    signs = np.random.default_rng(0).integers(0, 2, length).astype(np.float32) * 2 - 1
    rows = -(-length // SKETCH)
    padded = np.zeros((vectors.shape[0], rows * SKETCH), np.float32)
    padded[:, :length] = vectors * signs
    return padded.reshape(vectors.shape[0], rows, SKETCH).sum(axis=1)
