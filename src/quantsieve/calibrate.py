"""Ranges of activations, from one streaming pass over the calibration samples.

For each tensor: smallest and largest value and how many were not finite. For each layer with weights: the mean over
the samples of its input map, from which bias correction takes the mean error of each output channel (a convolution is
linear, so the mean of its error is its error on the mean). Memory does not grow with the number of samples. Methods
other than minmax take a narrower range for 8-bit formats from a histogram of the tensor (`clipping.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from quantsieve.clipping import MINMAX, Histogram, Method, clipped
from quantsieve.errors import InputError
from quantsieve.model.execute import OWN_RANGE, Affine, Executor
from quantsieve.schemes._affine import activation_parameters
from quantsieve.schemes._formats import integer_type

VERSION = 3


@dataclass(frozen=True, slots=True)
class Range:
    """Smallest and largest finite value of a tensor (minmax), in its own unit."""

    low: float
    high: float
    non_finite: int  # values that were NaN or infinite

    def affine(self, form: str) -> Affine:
        """The activation format with this range, which a dynamic one leaves alone; zero is always representable."""
        return _affine(self.low, self.high, form)


@dataclass(frozen=True, slots=True)
class ClippedRange(Range):
    """A range with the narrower one of a method besides minmax, which holds zero. A class of its own, so that
    facts of minmax are stored as ever."""

    clipped_low: float
    clipped_high: float

    def affine(self, form: str) -> Affine:
        """The activation format: 8 bits for the narrower range, 16 for the whole, whose steps are small anyway."""
        if form not in OWN_RANGE and np.iinfo(integer_type(form)).bits == 8:
            return _affine(self.clipped_low, self.clipped_high, form)
        return _affine(self.low, self.high, form)


def _affine(low: float, high: float, form: str) -> Affine:
    if form in OWN_RANGE:
        return Affine(np.float32(1), 0, form)
    scale, zero_point = activation_parameters(low, high, form)
    return Affine(scale, zero_point, integer_type(form))


@dataclass(frozen=True, slots=True)
class Calibration:
    """ranges: by root of a tensor. mean_inputs: by layer name, float32, shape of its input with batch 1."""

    ranges: Mapping[str, Range | ClippedRange]
    mean_inputs: Mapping[str, np.ndarray]
    output_variance: Mapping[str, float]  # of each float graph output over samples and elements
    num_samples: int
    notes: tuple[str, ...]

    def refusal(self, root: str) -> str | None:
        """Why the tensor cannot be rounded; None when it can."""
        found = self.ranges.get(root)
        if found is None:
            return f"{root} was never seen in calibration"
        if found.non_finite:
            return f"{root} holds {found.non_finite} values that are NaN or infinite"
        return None


@dataclass(slots=True)
class _Sketch:
    histogram: Histogram | None  # of the finite values; None where the method needs none
    low: float = np.inf
    high: float = -np.inf
    non_finite: int = 0

    def add(self, array: np.ndarray) -> None:
        if array.size == 0:
            return
        low, high = float(array.min()), float(array.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            finite = array[np.isfinite(array)]
            self.non_finite += int(array.size - finite.size)
            if finite.size == 0:
                return
            array = finite
            low, high = float(finite.min()), float(finite.max())
        self.low, self.high = min(self.low, low), max(self.high, high)
        if self.histogram is not None:
            self.histogram.add(array, low, high)

    def range(self, method: Method) -> Range | ClippedRange:
        if self.histogram is None or not np.isfinite(self.low):
            return Range(self.low, self.high, self.non_finite)
        low, high = clipped(self.histogram, self.low, self.high, method)
        return ClippedRange(self.low, self.high, self.non_finite, low, high)


@dataclass(slots=True)
class _Mean:
    total: np.ndarray | None = None
    count: int = 0
    ragged: bool = False

    def add(self, array: np.ndarray) -> None:
        if self.ragged or array.size == 0:
            return
        summed = array.sum(axis=0, keepdims=True, dtype=np.float64)
        if self.total is not None and self.total.shape != summed.shape:
            self.ragged, self.total = True, None
            return
        self.total = summed if self.total is None else self.total + summed
        self.count += array.shape[0]


@dataclass(slots=True)
class _Moments:
    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    bad: int = 0  # samples with a value that is not finite

    def add(self, array: np.ndarray) -> None:
        self.bad += int((~np.isfinite(array)).reshape(len(array) if array.ndim else 1, -1).any(axis=1).sum())
        wide = array.astype(np.float64)
        self.count += wide.size
        self.total += float(wide.sum())
        self.squares += float(np.square(wide).sum())

    def variance(self) -> float:
        """At least a tiny number, so that a constant output can still be divided by it."""
        if self.count == 0:
            return 1.0
        mean = self.total / self.count
        return max(self.squares / self.count - mean * mean, 1e-12 * max(self.squares / self.count, 1e-12))


@dataclass(slots=True)
class Collector:
    """Takes batches one at a time; `finish` gives the facts."""

    executor: Executor
    mean_samples: int | None = None  # mean inputs are taken over the first so many samples; None: over all
    method: Method = MINMAX
    _ranges: dict[str, _Sketch] = field(default_factory=dict)
    _means: dict[str, _Mean] = field(default_factory=dict)
    _outputs: dict[str, _Moments] = field(default_factory=dict)
    _num_samples: int = 0

    def add(self, feeds: Mapping[str, np.ndarray], num_samples: int) -> None:
        structure = self.executor.structure
        roots = {tensor.root for tensor in structure.tensors}
        inputs = {layer.inputs[0]: layer.name for layer in structure.quantizable if layer.is_product}
        wanted = roots | set(inputs) | self.executor.graph.output_names
        values = self.executor.forward(feeds, keep=lambda name: name in wanted)
        for root in roots:
            if root not in self._ranges:
                self._ranges[root] = _Sketch(None if self.method == MINMAX else Histogram())
            self._ranges[root].add(values[root].numpy())
        # Exactly so many samples: the mean of one sample more differs by more than rounding does (measured on
        # efficientnet_lite0, 65 against 64: six times the squared error once biases are corrected with it).
        wanted_means = num_samples if self.mean_samples is None else self.mean_samples - self._num_samples
        for layer in structure.quantizable if wanted_means > 0 else ():
            if layer.is_product:
                array = values[layer.inputs[0]].numpy()
                share = array if wanted_means >= num_samples else array[:wanted_means]
                self._means.setdefault(layer.name, _Mean()).add(share)
        for name in self.executor.graph.output_names:
            if values[name].is_tensor():
                array = values[name].numpy()
                if array.dtype.kind == "f":
                    self._outputs.setdefault(name, _Moments()).add(array)
        self._num_samples += num_samples

    def finish(self) -> Calibration:
        """Raises InputError when no sample came, and for float outputs that are not finite."""
        if self._num_samples == 0:
            raise InputError("at least one calibration sample", "none", "Give more data.")
        for name, moments in self._outputs.items():
            if moments.bad:
                raise InputError(
                    f"finite float outputs '{name}' of the float model on the calibration samples",
                    f"NaN or infinity in {moments.bad} of {self._num_samples}",
                    "Remove these samples, or mend the model.",
                )
        ranges = {
            root: sketch.range(self.method)
            for root, sketch in self._ranges.items()
            if np.isfinite(sketch.low) or sketch.non_finite
        }
        means = {
            name: (mean.total / mean.count).astype(np.float32)
            for name, mean in self._means.items()
            if mean.total is not None and mean.count
        }
        ragged = [name for name, mean in self._means.items() if mean.ragged]
        notes = (f"{len(ragged)} layers see inputs of several shapes: their bias is not corrected",) if ragged else ()
        variance = {name: moments.variance() for name, moments in self._outputs.items()}
        return Calibration(ranges, means, variance, self._num_samples, notes)


def calibrate(
    executor: Executor,
    batches: Iterable[tuple[Mapping[str, np.ndarray], int]],
    mean_samples: int | None = None,
    method: Method = MINMAX,
) -> Calibration:
    """Facts from an iterable of (feeds, number of samples in them); one batch is in memory at a time.

    mean_samples: mean inputs are taken over the batches of the first so many samples, None for all.
    method: of the ranges for 8-bit formats.
    """
    collector = Collector(executor, mean_samples, method)
    for feeds, num_samples in batches:
        collector.add(feeds, num_samples)
    return collector.finish()
