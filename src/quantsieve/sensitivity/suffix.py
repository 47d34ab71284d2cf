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
from quantsieve.model.execute import Affine, Executor
from quantsieve.plan import Options, Rounded
from quantsieve.schemes import Scheme
from quantsieve.sensitivity.engine import check_finite, kept_integers, open_engine
from quantsieve.sensitivity.engine import float_outputs as float_outputs
from quantsieve.sensitivity.interval import half_width
from quantsieve.weights import Corrections

VERSION = 3
SKETCH = 1024  # longest mean error vector kept


@dataclass(frozen=True, slots=True)
class Source:
    """A place where rounding adds noise. kind 'weight': owner a layer, form a scheme;
    kind 'tensor': owner a root, form an activation format."""

    kind: str
    owner: str
    form: str


@dataclass(frozen=True, slots=True)
class Screening:
    """How far prices were screened (see `screen.py`). is_exact: bool [sources]; spread: float64 [sources], standard
    deviation of the logarithm of a screened price, 0 for an exact one; checked: int64, sources whose price was both
    screened and found exactly; rank, spread_checked: their rank correlation and spread, None where none was measured;
    refusal: why the model cannot be screened."""

    is_exact: np.ndarray
    spread: np.ndarray
    checked: np.ndarray
    rank: float | None
    spread_checked: float | None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    """errors: float64 [sources, samples], relative squared error of the outputs, higher is worse.
    mean_vectors: float32 [sources, at most SKETCH], mean over the samples of the error vectors.
    screening: None where all sources were priced exactly from the start."""

    sources: tuple[Source, ...]
    errors: np.ndarray
    mean_vectors: np.ndarray
    screening: Screening | None = None

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
        mean, spread = self.mean(), 0.0 if self.screening is None else self.screening.spread
        half = half_width(self.errors, mean * spread)
        return np.maximum(mean - half, 0.0), mean + half

    def rows(self) -> dict[tuple[str, str, str], int]:
        """Number of the row of each source by (kind, owner, form)."""
        return {(source.kind, source.owner, source.form): row for row, source in enumerate(self.sources)}

    @property
    def is_exact(self) -> np.ndarray:
        """bool [sources]: whose prices were found exactly, none of them screened."""
        return np.ones(len(self.sources), bool) if self.screening is None else self.screening.is_exact

    def switched(self, layer: str, scheme: str, forced: Sequence[Rounded]) -> list[int]:
        """Rows of the sources that one layer switches on when it is quantized alone: its weights under the scheme,
        where it has some, and the tensors that it forces."""
        row = self.rows()
        found = [row["tensor", root, form] for root, form in forced]
        return found + ([row["weight", layer, scheme]] if ("weight", layer, scheme) in row else [])

    def sums(self, layer: str, scheme: str, forced: Sequence[Rounded]) -> np.ndarray:
        """float64 [samples]: what one layer costs alone, that is the sum of the sources that it switches on."""
        return np.asarray(self.errors[self.switched(layer, scheme, forced)].sum(axis=0))

    def doubt(self, rows: Sequence[int]) -> float:
        """Standard deviation of the sum of some prices, so far as it comes from screening; samples come on top."""
        if self.screening is None:
            return 0.0
        return float(np.sqrt(np.square(self.errors[rows].mean(axis=1) * self.screening.spread[rows]).sum()))


def find_sources(executor: Executor, options: Options, schemes: Sequence[Scheme]) -> tuple[Source, ...]:
    """Every source that some plan over the options can switch on."""
    structure = executor.structure
    found = []
    for layer in structure.quantizable:
        if layer.weight is not None:
            found += [Source("weight", layer.name, name) for name in options.schemes.get(layer.name, ())]
    formats = tuple(dict.fromkeys(scheme.activation for scheme in schemes if scheme.activation is not None))
    for tensor in structure.tensors:
        users = [*tensor.readers, *([tensor.producer] if tensor.producer else [])]
        used = {options.forms[scheme] for user in users for scheme in options.schemes.get(user, ())}
        found += [Source("tensor", tensor.root, form) for form in formats if form in used]
    return tuple(found)


class Probes:
    """Exact prices of single sources on one batch; peak memory: a float pass of the batch and one probe a worker."""

    def __init__(
        self,
        executor: Executor,
        feeds: Mapping[str, np.ndarray],
        num_samples: int,
        calibration: Calibration,
        corrections: Corrections,
        schemes: Mapping[str, Scheme],
        workers: int = 1,
    ):
        self.executor = executor
        self.feeds = feeds
        self.num_samples = num_samples
        self.calibration = calibration
        self.workers = workers
        self._corrections = corrections
        self._schemes = schemes
        self._engine = open_engine(executor, feeds, num_samples)
        self.layers = {layer.name: layer for layer in executor.structure.quantizable}
        self.reference = self._engine.reference()
        check_finite(self.reference)

    def affine(self, source: Source) -> Affine:
        """How a source of kind 'tensor' rounds."""
        return self.calibration.ranges[source.owner].affine(source.form)

    def weights(self, source: Source) -> tuple[np.ndarray, np.ndarray | None]:
        """Rounded weight and bias of a source of kind 'weight', as floats."""
        layer = self.layers[source.owner]
        scheme = self._schemes[source.form]
        return kept_integers(self.executor, layer, scheme, self.calibration, self._corrections).dequantized()

    def price(self, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """(errors, float64 [samples]; mean error vector, float32 [at most SKETCH])."""
        if source.kind == "tensor":
            outputs = self._engine.rounded(source.owner, self.affine(source))
        else:
            outputs = self._engine.reweighted(self.layers[source.owner], *self.weights(source))
        variance = self.calibration.output_variance
        error, vectors = error_vectors(outputs, self.reference, variance, self.num_samples)
        return error, vectors.mean(axis=0)

    def prices(
        self, sources: Sequence[Source], tell: Callable[[int], None] = lambda done: None
    ) -> tuple[np.ndarray, np.ndarray]:
        """`price` of some sources, at least one, stacked. tell: is called with the number of sources priced so far."""
        results = []
        with ThreadPoolExecutor(max_workers=self.workers) as pool:
            for result in pool.map(self.price, sources) if self.workers > 1 else map(self.price, sources):
                results.append(result)
                tell(len(results))
        return np.stack([error for error, _ in results]), np.stack([mean for _, mean in results])


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
    """Exact prices of all sources on one batch."""
    probes = Probes(executor, feeds, num_samples, calibration, corrections, schemes, workers)
    return Prices(tuple(sources), *probes.prices(sources, tell))


def join(parts: Sequence[Prices]) -> Prices:
    """One fact from the batches of a scan, in their order."""
    counts = np.asarray([part.num_samples for part in parts], np.float64)
    width = max(part.mean_vectors.shape[1] for part in parts)
    vectors = (padded(part.mean_vectors, width) for part in parts)
    means = sum(found * count for found, count in zip(vectors, counts, strict=True)) / counts.sum()
    errors = np.concatenate([part.errors for part in parts], axis=1)
    return Prices(parts[0].sources, errors, np.asarray(means, np.float32), _join_screenings(parts, counts))


def _join_screenings(parts: Sequence[Prices], counts: np.ndarray) -> Screening | None:
    """Batches share the checked sources, so that their spreads are alike rather than independent."""
    found = [part.screening for part in parts if part.screening is not None]
    if not found:
        return None
    spreads = [part.screening.spread * count for part, count in zip(parts, counts, strict=True) if part.screening]
    ranks = [screening.rank for screening in found if screening.rank is not None]
    checked = [screening.spread_checked for screening in found if screening.spread_checked is not None]
    return Screening(
        is_exact=np.logical_and.reduce([part.is_exact for part in parts]),
        spread=np.asarray(sum(spreads) / counts.sum()),
        checked=found[0].checked,
        rank=min(ranks, default=None),
        spread_checked=max(checked, default=None),
        refusal=found[0].refusal,
    )


def padded(vectors: np.ndarray, width: int) -> np.ndarray:
    """Vectors with zeros behind them up to `width`; same lengths."""
    return np.pad(vectors, ((0, 0), (0, width - vectors.shape[1])))


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
