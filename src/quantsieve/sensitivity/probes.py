"""Layers probed one by one with all their sources on together, and compared by any metric.

Prices (`suffix.py`) add up over sources because they are squared errors; other metrics have no such sums. So each layer
is quantized alone under each scheme, its weights rounded and the tensors that it forces too, and the outputs are
compared with the float ones. A tensor is rounded for all its readers, as in the prices.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from quantsieve.model.execute import Executor
from quantsieve.sensitivity import metrics
from quantsieve.sensitivity.engine import check_finite, kept_weights, open_engine
from quantsieve.sensitivity.metrics import Measure
from quantsieve.sensitivity.ranking import Choice
from quantsieve.weights import Ingredients

VERSION = 1
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples to probe with. feeds: arrays by input, joined on axis 0; labels: int64 [n] or None."""

    feeds: Mapping[str, np.ndarray]
    num_samples: int
    labels: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Probes:
    """What one metric says of each probe, in its own unit and direction.

    totals: float64 [probes, samples], the mean over outputs. outputs: by name, float64 [probes, samples]; of a task
    none. channels: by name, float64 [probes, channels], means over the samples; none where they were not asked for.
    """

    totals: np.ndarray
    outputs: Mapping[str, np.ndarray]
    channels: Mapping[str, np.ndarray]


def probe_batch(
    executor: Executor,
    batch: Batch,
    wanted: Sequence[tuple[Choice, str]],
    measures: Sequence[Measure],
    parts: Ingredients,
    has_channels: bool = False,
    workers: int = 1,
    tell: Callable[[int], None] = lambda done: None,
) -> tuple[Probes, ...]:
    """One fact a measure, a row for each of `wanted`, of which each runs once, however many measures there are.

    tell: is called with the number of probes done so far. Raises InputError when the outputs cannot be compared by one
    of the measures, UsageError when channels are asked of one that has none.
    """
    engine = open_engine(executor, batch.feeds, batch.num_samples)
    found = engine.reference()
    check_finite(found)
    order = [value.name for value in executor.graph.outputs]  # the model's own, by which tasks choose among outputs
    reference = {name: _by_sample(found[name], batch.num_samples) for name in order if name in found}
    for measure in measures:
        if not callable(measure.compare):
            measure.compare.check(reference, batch.labels)

    def probe(which: tuple[Choice, str]) -> list[tuple[Arrays, Arrays]]:
        choice, name = which
        scheme, layer, calibration = parts.schemes[name], choice.layer, parts.calibration
        rounded = {root: calibration.ranges[root].affine(form) for root, form in choice.forced[name]}
        weights = kept_weights(executor, layer, scheme, calibration, parts.corrections) if layer.weight else None
        outputs = _comparable(engine.together(rounded, layer, weights), reference, batch.num_samples)
        return [
            (
                metrics.values(measure, reference, outputs, batch.labels),
                metrics.channel_values(measure, reference, outputs) if has_channels else {},
            )
            for measure in measures
        ]

    results = []
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for result in pool.map(probe, wanted) if workers > 1 else map(probe, wanted):
            results.append(result)
            tell(len(results))
    return tuple(_table([row[index] for row in results]) for index in range(len(measures)))


def join(parts: Sequence[Probes], rows: Sequence[np.ndarray] | None = None) -> Probes:
    """One fact from the batches of a scan, in their order.

    rows: by part, indices of the probes that it holds, all of them in the first part; None: all in each. Samples that a
    probe did not run are NaN.
    """
    first = parts[0]
    held = [np.arange(len(first.totals))] * len(parts) if rows is None else rows

    def by_sample(arrays: Sequence[np.ndarray]) -> np.ndarray:
        whole = [np.full((len(first.totals), array.shape[1]), np.nan) for array in arrays]
        for wide, array, which in zip(whole, arrays, held, strict=True):
            wide[which] = array
        return np.concatenate(whole, axis=1)

    def by_channel(name: str) -> np.ndarray:
        whole, counts = np.zeros_like(first.channels[name]), np.zeros((len(first.totals), 1))
        for part, which in zip(parts, held, strict=True):
            whole[which] += part.channels[name] * part.totals.shape[1]
            counts[which] += part.totals.shape[1]
        return whole / counts

    return Probes(
        by_sample([part.totals for part in parts]),
        {name: by_sample([part.outputs[name] for part in parts]) for name in first.outputs},
        {name: by_channel(name) for name in first.channels},
    )


def _table(rows: Sequence[tuple[Arrays, Arrays]]) -> Probes:
    by_output = {name: np.stack([values[name] for values, _ in rows]) for name in rows[0][0]}
    return Probes(
        np.stack(list(by_output.values())).mean(axis=0),
        {name: array for name, array in by_output.items() if name},
        {name: np.stack([channels[name].mean(axis=0) for _, channels in rows]) for name in rows[0][1]},
    )


def exposures(executor: Executor, batch: Batch, measure: Measure) -> np.ndarray | None:
    """How much the metric may move at each sample, float64 [samples], by the float outputs; None: it does not tell."""
    found = open_engine(executor, batch.feeds, batch.num_samples).reference()
    check_finite(found)
    return metrics.exposures(measure, {name: _by_sample(array, batch.num_samples) for name, array in found.items()})


def _by_sample(array: np.ndarray, num_samples: int) -> np.ndarray:
    """[samples, ...]; an output without such an axis belongs to one sample, one with more rows has several a sample."""
    if array.ndim and array.shape[0] == num_samples:
        return array
    return array.reshape(num_samples, -1, *array.shape[1:]) if num_samples > 1 else array[None]


def _comparable(outputs: Arrays, reference: Arrays, num_samples: int) -> Arrays:
    """The outputs by sample; one whose shape changed is not a number everywhere, which every metric takes for worst."""
    found = {}
    for name, wanted in reference.items():
        whole = outputs[name]
        fits = whole.size == wanted.size and _by_sample(whole, num_samples).shape == wanted.shape
        found[name] = _by_sample(whole, num_samples) if fits else np.full_like(wanted, np.nan)
    return found
