"""Two errors of every tensor, one pass each: quantized alone at its place, and as the fully quantized model has it.

`local` is the error of rounding the tensor's own float values; `accumulated` is that of the tensor in the quantized
model against the float model's, so everything that happened before it is in it. Both are told as SQNR in decibel
(higher is cleaner) and as relative error, the noise's power over the signal's (higher is worse). `combined` ranks by a
weighted mean of both, each SQNR taken as an error, that is with its sign turned, and scaled so that the tensors span
0..1: higher is worse. (Two errors, scaled and added half each, is the ranking of the SeQTO tuner, which sorts the SQNRs
themselves as if they were errors.)
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quantsieve.errors import UsageError
from quantsieve.model.execute import Executor, Values
from quantsieve.plan import Plan
from quantsieve.simulate import Simulation
from quantsieve.weights import Ingredients

CLEANEST_DB = 200.0  # what an error of exactly 0 counts as when SQNRs are scaled; float32 itself reaches about 150


@dataclass(frozen=True, slots=True)
class Error:
    """Powers summed over all elements and samples in float64."""

    signal: float
    noise: float

    @property
    def relative(self) -> float:
        """noise / signal, higher is worse; inf where a signal of zeros has an error."""
        if self.noise == 0:
            return 0.0
        return self.noise / self.signal if self.signal > 0 and math.isfinite(self.noise) else math.inf

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / noise), higher is cleaner; +inf without noise."""
        return decibel(self.relative)


def decibel(relative: float) -> float:
    """SQNR of a relative error: +inf for 0, -inf for inf."""
    if relative == 0:
        return math.inf
    return -10 * math.log10(relative) if relative < math.inf else -math.inf


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor in a scan. local, accumulated: relative errors, higher is worse; combined: in 0..1, higher is worse.
    producer: the layer that makes it, None for an input; readers: the layers that read it and can be quantized."""

    root: str
    producer: str | None
    readers: tuple[str, ...]
    local: float
    accumulated: float
    combined: float


@dataclass(frozen=True, slots=True)
class TensorErrors:
    """root: the tensor's name. local, accumulated: see the module's first lines."""

    root: str
    local: Error
    accumulated: Error


@dataclass(slots=True)
class _Sums:
    signal: float = 0.0
    noise: dict[str, float] = field(default_factory=dict)


def tensor_errors(
    executor: Executor, parts: Ingredients, plan: Plan, batches: Iterable[Mapping[str, np.ndarray]]
) -> tuple[TensorErrors, ...]:
    """Both errors of every tensor that `plan` rounds, in graph order, over all batches.

    The float and the quantized model walk side by side, so only values that are still needed are in memory, twice.
    """
    simulation = Simulation(executor, parts, plan)
    order = [tensor.root for tensor in executor.structure.tensors]
    roots = dict(simulation.rounded)
    sums: dict[str, _Sums] = {}
    for feeds in batches:
        walk = _Walk(executor, parts, simulation, roots, sums)
        walk.run(feeds)
    return tuple(
        TensorErrors(root, Error(sums[root].signal, sums[root].noise["local"]),
                     Error(sums[root].signal, sums[root].noise["accumulated"]))
        for root in order if root in sums
    )  # fmt: skip


class _Walk:
    def __init__(
        self,
        executor: Executor,
        parts: Ingredients,
        simulation: Simulation,
        roots: Mapping[str, str],
        sums: dict[str, _Sums],
    ):
        self.executor, self.parts, self.simulation = executor, parts, simulation
        self.roots, self.sums = roots, sums

    def run(self, feeds: Mapping[str, np.ndarray]) -> None:
        executor, simulation = self.executor, self.simulation
        plain, rounded = executor.feed_values(feeds), executor.feed_values(feeds)
        left = set(self.roots)
        self._compare(plain, rounded, left)
        for index, layer in enumerate(executor.steps):
            name = layer.name if layer is not None else ""
            executor.run_step(index, plain)
            weights = simulation.weights.get(name)
            executor.run_step(index, rounded, weights, simulation.reads.get(name, {}), simulation.outputs)
            self._compare(plain, rounded, left)

    def _compare(self, plain: Values, rounded: Values, left: set[str]) -> None:
        for root in [root for root in left if root in plain and root in rounded]:
            left.remove(root)
            affine = self.parts.affine(root, self.roots[root])
            exact = plain[root].numpy().astype(np.float64)
            alone = self.executor.round(plain[root], affine)
            # A tensor that float layers read too is not rounded in place, its readers round it.
            there = rounded[root] if root in self.simulation.outputs else self.executor.round(rounded[root], affine)
            found = self.sums.setdefault(root, _Sums(0.0, {"local": 0.0, "accumulated": 0.0}))
            found.signal += float(np.square(exact).sum())
            found.noise["local"] += float(np.square(alone.numpy() - exact).sum())
            found.noise["accumulated"] += float(np.square(there.numpy() - exact).sum())


def combined(errors: Sequence[TensorErrors], local: float = 0.5, accumulated: float = 0.5) -> dict[str, float]:
    """Weighted mean of both errors by root, each scaled to 0..1 over the tensors; higher is worse.

    Raises UsageError for weights that are negative or both 0.
    """
    check_weights(local, accumulated)
    total = local + accumulated
    columns = [
        local / total * _scaled([-error.local.sqnr_db for error in errors]),
        accumulated / total * _scaled([-error.accumulated.sqnr_db for error in errors]),
    ]
    return dict(zip([error.root for error in errors], sum(columns).tolist(), strict=True))  # type: ignore[union-attr]


def check_weights(local: float, accumulated: float) -> None:
    """Raises UsageError unless both are 0 or more, not both 0."""
    if not (local >= 0 and accumulated >= 0 and 0 < local + accumulated < math.inf):
        raise UsageError("two weights of 0 or more, not both 0", f"{local} and {accumulated}", "Give 0.5 and 0.5.")


def rows(
    executor: Executor, errors: Sequence[TensorErrors], weights: tuple[float, float] = (0.5, 0.5)
) -> tuple[TensorRow, ...]:
    """The tensors ranked by `combined` with those weights, worst first."""
    weighted = combined(errors, *weights)
    tensors = {tensor.root: tensor for tensor in executor.structure.tensors}
    found = [
        TensorRow(
            error.root,
            tensors[error.root].producer,
            tensors[error.root].readers,
            error.local.relative,
            error.accumulated.relative,
            weighted[error.root],
        )
        for error in errors
    ]
    return tuple(sorted(found, key=lambda row: -row.combined))


def _scaled(errors: Sequence[float]) -> np.ndarray:
    values = np.clip(np.asarray(errors, np.float64), -CLEANEST_DB, CLEANEST_DB)
    span = np.ptp(values) if len(values) else 0.0
    return (values - values.min()) / span if span > 0 else np.zeros_like(values)
