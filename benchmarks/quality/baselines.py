"""Plain baselines: full int8, the first k layers float, the last k float; written as Quantsieve writes,
without repairs.

k counts layers with weights in the order of the graph; an Add or pool goes with the layers before it.
Weights are rounded to nearest, the bias is not corrected, and the weight type is the one that this machine
multiplies exactly.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.quality.accounting import cpu_seconds
from benchmarks.quality.records import Entry, Method
from benchmarks.quality.zoo import THREADS, ZooModel, ort_run

from quantsieve import schemes
from quantsieve.calibrate import calibrate
from quantsieve.data import batches
from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare
from quantsieve.model.units import Layer, find_structure
from quantsieve.plan import Options, Plan, find_options, full_plan
from quantsieve.targets.ort import OrtCpu
from quantsieve.weights import NO_CORRECTIONS, Ingredients
from quantsieve.writing import write_plan

SCHEMES = ("int8", "int8-channel")
_CALIBRATION_BATCH = 8
_NUM_PREPARE = 2


@dataclass(frozen=True, slots=True)
class Workshop:
    """What plans of one model are made and written with, and the seconds it took to get there."""

    model: ZooModel
    ingredients: Ingredients
    options: Options
    cpu_s: float

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers that may be quantized, in the order of the graph."""
        known = self.options.schemes
        return tuple(layer for layer in self.ingredients.structure.quantizable if layer.name in known)

    def first(self, k: int, scheme: str) -> Plan:
        """Full int8 but for everything before the (k+1)-th layer with weights."""
        return self._without(self._prefix(k), scheme)

    def last(self, k: int, scheme: str) -> Plan:
        """Full int8 but for everything from the k-th layer with weights, counted from the end."""
        num_weighted = sum(layer.weight is not None for layer in self.layers)
        kept = set(self._prefix(num_weighted - k)) if k else {layer.name for layer in self.layers}
        return self._without([layer.name for layer in self.layers if layer.name not in kept], scheme)

    def write(self, plan: Plan, path: Path) -> None:
        """The plan's model as a file."""
        path.write_bytes(write_plan(self.ingredients, plan).SerializeToString())

    def _prefix(self, k: int) -> list[str]:
        names: list[str] = []
        seen = 0
        for layer in self.layers:
            seen += layer.weight is not None
            if seen > k:
                break
            names.append(layer.name)
        return names if k else []

    def _without(self, floats: Iterable[str], scheme: str) -> Plan:
        full = dict(full_plan(self.options, scheme).schemes)
        for name in floats:
            del full[name]
        return Plan(full)


def open_workshop(model: ZooModel) -> Workshop:
    """The prepared model with ranges from the 100 calibration samples."""
    start = cpu_seconds()
    feeds = [model.calibration.feed(i) for i in range(_NUM_PREPARE)]
    prepared, _ = prepare(load_model(model.path), feeds, model.float_bytes)
    graph = Graph(prepared)
    structure = find_structure(graph)
    numbers = np.arange(len(model.calibration))
    fed = ((feed, len(i)) for i, feed in batches(model.calibration, numbers, _CALIBRATION_BATCH))
    calibration = calibrate(Executor(graph, structure), fed)
    chosen = tuple(schemes.get(name) for name in SCHEMES)
    saturation = OrtCpu(threads=THREADS).probe_saturation()
    ingredients = Ingredients(
        graph,
        structure,
        calibration,
        NO_CORRECTIONS,
        {scheme.name: scheme for scheme in chosen},
        "u8" if saturation.saturates and not saturation.u8_saturates else "s8",
    )
    return Workshop(model, ingredients, find_options(graph, structure, calibration, chosen), cpu_seconds() - start)


def measure(workshop: Workshop, plan: Plan, origin: str, folder: Path) -> Entry:
    """The plan's file on all final samples with default session options."""
    path = folder / f"{plan.id}.onnx"
    workshop.write(plan, path)
    entry = Entry(origin, path.stat().st_size, workshop.model.agreement(ort_run(path)))
    path.unlink()
    return entry


def keep_float(workshop: Workshop, side: str, scheme: str, folder: Path, most: int) -> Method:
    """Full int8 and models with k layers float from one side ('first' or 'last'), for at most `most` values of k."""
    start = cpu_seconds()
    make = workshop.first if side == "first" else workshop.last
    num_weighted = sum(layer.weight is not None for layer in workshop.layers)
    entries = [
        measure(workshop, make(k, scheme), f"{side} {k} float", folder) for k in (0, *spread(num_weighted, most))
    ]
    notes = ("CPU seconds include the evaluation of the final samples", "no ranking, no search samples")
    return Method(tuple(entries), cpu_seconds() - start + workshop.cpu_s, len(entries), notes)


def spread(largest: int, most: int) -> tuple[int, ...]:
    """At most `most` numbers of 1..largest, denser at the small end; all of them when there is room."""
    if largest <= most:
        return tuple(range(1, largest + 1))
    curve = 1 + (largest - 1) * np.linspace(0, 1, most) ** 1.5
    return tuple(int(value) for value in np.unique(np.rint(curve)))
