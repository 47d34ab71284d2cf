"""Two ways to switch on sources and get the outputs: suffixes of the optimized graph, or layer by layer.

The first costs about half as much and is taken whenever the optimized graph passes its check; the second works for
every model. Both give the same numbers but for the order of float sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from quantsieve.calibrate import Calibration
from quantsieve.errors import InputError
from quantsieve.model.execute import Affine, Executor, Values
from quantsieve.model.units import Layer
from quantsieve.schemes import Scheme
from quantsieve.schemes._affine import QuantizedLayer
from quantsieve.sensitivity._check import check
from quantsieve.sensitivity.optimized import Refused, optimize, save
from quantsieve.sensitivity.suffixes import Suffixes
from quantsieve.weights import Corrections, integers

Arrays = dict[str, np.ndarray]
Weights = tuple[np.ndarray, np.ndarray | None]  # weight and bias


class Engine(Protocol):
    """Outputs of one batch of samples. Arrays that come back are not to be changed."""

    def reference(self) -> Arrays:
        """Outputs without any source."""

    def rounded(self, root: str, affine: Affine) -> Arrays:
        """Outputs when one tensor is rounded."""

    def reweighted(self, layer: Layer, weight: np.ndarray, bias: np.ndarray | None) -> Arrays:
        """Outputs when one layer has other weights."""

    def together(self, rounded: Mapping[str, Affine], layer: Layer, weights: Weights | None) -> Arrays:
        """Outputs when tensors are rounded, by root, and a layer has other weights, all in one: a tensor is rounded as
        the changes before it leave it, for all its readers. weights: None where the layer keeps its own."""


class ByLayer:
    """One session a layer of the model as it is."""

    def __init__(self, executor: Executor, feeds: Mapping[str, np.ndarray]):
        self._executor = executor
        self._base = executor.forward(feeds)

    def reference(self) -> Arrays:
        return float_outputs(self._executor, self._base)

    def rounded(self, root: str, affine: Affine) -> Arrays:
        changed = {root: self._executor.round(self._base[root], affine)}
        return float_outputs(self._executor, self._executor.after_values(self._base, changed))

    def reweighted(self, layer: Layer, weight: np.ndarray, bias: np.ndarray | None) -> Arrays:
        return float_outputs(self._executor, self._executor.after_weights(self._base, layer, weight, bias))

    def together(self, rounded: Mapping[str, Affine], layer: Layer, weights: Weights | None) -> Arrays:
        return float_outputs(self._executor, self._executor.after_sources(self._base, rounded, layer, weights))


class BySuffix:
    """Suffixes of the optimized graph."""

    def __init__(self, suffixes: Suffixes, executor: Executor, feeds: Mapping[str, np.ndarray]):
        self._suffixes = suffixes
        self._executor = executor
        self._base = suffixes.base(feeds)

    def reference(self) -> Arrays:
        return self._floats({name: self._base[name] for name in self._suffixes.optimized.outputs})

    def rounded(self, root: str, affine: Affine) -> Arrays:
        place = self._suffixes.optimized.places[root]
        if place not in self._base:  # nothing that reaches an output reads it
            return self.reference()
        changed = {place: self._executor.rounded(self._base[place], affine)}
        return self._floats(self._suffixes.after(self._base, changed))

    def reweighted(self, layer: Layer, weight: np.ndarray, bias: np.ndarray | None) -> Arrays:
        return self._floats(self._suffixes.reweighted(self._base, layer, weight, bias))

    def together(self, rounded: Mapping[str, Affine], layer: Layer, weights: Weights | None) -> Arrays:
        optimized, base = self._suffixes.optimized, self._base
        # What is not among the base values reaches no output.
        places = {place: rounded[root] for root in rounded if (place := optimized.places[root]) in base}
        found = None if weights is None else self._suffixes.swapped(layer, *weights)
        swaps = {} if found is None else {found[0]: found[1]}
        makers = optimized.makers
        last = max([*swaps, *(makers[place] for place in places if place in makers)], default=-1)
        changed = {
            place: self._executor.rounded(base[place], affine)
            for place, affine in places.items()
            if place not in makers
        }
        # Up to the last change region by region, as a value may have to be rounded between any two.
        for index, region in enumerate(optimized.regions[: last + 1]):
            if index in swaps or any(name in changed for name in region.reads):
                made = self._suffixes.region(index, {**base, **changed}, swaps.get(index))
            else:
                made = {name: base[name] for name in region.outputs if name in places}
            for name, array in made.items():
                changed[name] = self._executor.rounded(array, places[name]) if name in places else array
        return self._floats(self._suffixes.after(base, changed, last + 1))

    def _floats(self, values: Arrays) -> Arrays:
        names = sorted(name for name, array in values.items() if array.dtype in (np.float32, np.float16))
        return {name: values[name] for name in names}


def float_outputs(executor: Executor, values: Values) -> Arrays:
    """Copies of the float outputs of the graph, by name in alphabetical order."""
    found = {}
    for name in sorted(executor.graph.output_names):
        if values[name].is_tensor() and "float" in values[name].data_type():
            found[name] = values[name].numpy().copy()
    return found


def check_finite(reference: Mapping[str, np.ndarray]) -> None:
    """Raises InputError when a float output of the float model holds NaN or infinity: nothing can be scored by it."""
    for name, array in reference.items():
        bad = int(array.size - np.isfinite(array).sum())
        if bad:
            raise InputError(
                f"finite float outputs '{name}' of the float model on the samples of the scan",
                f"NaN or infinity in {bad} of {array.size} values of a batch",
                "Check the preprocessing and remove such samples, or mend the model.",
            )


@dataclass(slots=True)
class _Kept:
    """What the scans of one executor share from batch to batch."""

    suffixes: Suffixes | None
    refusal: str | None
    facts: tuple[object, ...] = ()  # on which the integers depend
    integers: dict[tuple[str, Scheme], QuantizedLayer] = field(default_factory=dict)


_kept: WeakKeyDictionary[Executor, _Kept] = WeakKeyDictionary()
_lock = Lock()


def open_engine(executor: Executor, feeds: Mapping[str, np.ndarray], num_samples: int) -> Engine:
    """The fastest engine that the model can be trusted to, with the base values of one batch."""
    suffixes = _keep(executor, feeds, num_samples).suffixes
    return ByLayer(executor, feeds) if suffixes is None else BySuffix(suffixes, executor, feeds)


def refusal(executor: Executor) -> str | None:
    """Why the executor's scans run layer by layer; None when they do not, or none ran yet."""
    kept = _kept.get(executor)
    return None if kept is None else kept.refusal


def kept_integers(
    executor: Executor, layer: Layer, scheme: Scheme, calibration: Calibration, corrections: Corrections
) -> QuantizedLayer:
    """`integers` of a layer whose executor has an engine, kept where there is room (a byte a weight and scheme)."""
    if not executor.room.keeps_integers:
        return integers(executor.graph, layer, scheme, calibration, corrections)
    kept = _kept[executor]
    facts = (calibration, corrections, scheme.version)
    key = (layer.name, scheme)
    with _lock:
        if len(kept.facts) != len(facts) or any(a is not b for a, b in zip(kept.facts, facts, strict=True)):
            kept.facts, kept.integers = facts, {}
        store = kept.integers
    if key not in store:
        store[key] = integers(executor.graph, layer, scheme, calibration, corrections)
    return store[key]


def kept_weights(
    executor: Executor, layer: Layer, scheme: Scheme, calibration: Calibration, corrections: Corrections
) -> Weights:
    """Weight and bias that `kept_integers` stand for, float32."""
    return kept_integers(executor, layer, scheme, calibration, corrections).dequantized()


def _keep(executor: Executor, feeds: Mapping[str, np.ndarray], num_samples: int) -> _Kept:
    with _lock:
        found = _kept.get(executor)
        if found is None:
            try:
                found = _Kept(_open_suffixes(executor, _first(feeds, num_samples)), None)
            except Refused as error:
                found = _Kept(None, str(error))
            _kept[executor] = found
    return found


def _open_suffixes(executor: Executor, feeds: Mapping[str, np.ndarray]) -> Suffixes:
    graph, structure = executor.graph, executor.structure
    with TemporaryDirectory(prefix="quantsieve-") as folder:
        try:
            saved = save(graph, Path(folder))
            suffixes = Suffixes(optimize(saved, graph, structure, executor.types), graph, structure, executor.room)
            check(suffixes, saved, graph, structure, feeds)
        except Refused:
            raise
        except Exception as error:  # onnxruntime raises classes of its own without a common base
            raise Refused(f"the optimized graph does not run: {str(error)[:200]}") from error
    return suffixes


def _first(feeds: Mapping[str, np.ndarray], num_samples: int) -> dict[str, np.ndarray]:
    """One sample of a batch that looks stacked; whether it is one matters not, both sides of a check see the same."""
    is_stacked = num_samples > 1 and all(array.shape[:1] == (num_samples,) for array in feeds.values())
    return {name: array[:1] if is_stacked else array for name, array in feeds.items()}
