"""The seam of the targets: what a runtime with its options on this machine must be able to do, and the facts
it gives.

A target loads a model file, runs it, times several files side by side, and tells what really ran. Each target
is one module of this folder that exports `TARGET`. A bad outcome is a `TargetFailure` with a kind and a
stage; the stage that evaluates candidates turns it into a value, so no candidate ends a run. NaN and wrong
shapes are judged there, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from quantsieve.errors import QuantsieveError, UsageError

Feeds = Mapping[str, np.ndarray]
FailureKind = Literal["error", "signal", "timeout", "memory", "nan", "shape"]
Precision = Literal["int8", "float", "weight-only", "gone", "mixed"]

_ADVICE: Mapping[str, str] = {
    "error": "Read the runtime's message: it names the operator, type or shape that it does not know.",
    "signal": "The runtime itself crashed on this model; try another scheme, target or version.",
    "timeout": "Raise the time limit if the model is merely slow; a loop without end never finishes.",
    "memory": "Raise the memory limit or send smaller batches.",
    "nan": "Look for ranges that overflow: a quantized layer before it may have a useless scale.",
    "shape": "Compare the model's declared outputs with what it returns.",
}


class TargetFailure(QuantsieveError):
    """A model that could not be loaded, run, timed or audited on a target; picklable with all its fields.

    reason: one or a few lines, the signal's name (`SIGSEGV`) where a signal ended the worker.
    stage: 'start', 'load', 'run', 'latency', 'audit', 'probe_saturation' or 'environment'.
    log_tail: the last lines that the runtime wrote to stdout and stderr; empty outside a worker.
    """

    def __init__(self, reason: str, kind: FailureKind = "error", stage: str = "run", log_tail: str = ""):
        super().__init__(f"stage '{stage}' to succeed on the target", f"{kind}: {reason.rstrip('.')}", _ADVICE[kind])
        self.reason = reason
        self.kind: FailureKind = kind
        self.stage = stage
        self.log_tail = log_tail

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reason, self.kind, self.stage, self.log_tail)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to time: at most `rounds` rounds or `max_seconds`, never fewer than `min_rounds`, and no longer than
    until every model's median is known to `precision` (half its 95 % interval over it; 0 for all rounds).

    One round runs every model once, in an order drawn anew from `seed`. Before that, rounds that are thrown
    away until the times are stable, at most `warmup_s` seconds. Threads belong to the target, whose
    environment names them.
    """

    rounds: int = 50
    min_rounds: int = 3
    warmup_s: float = 2.0
    max_seconds: float = 30.0
    precision: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_rounds <= self.rounds or min(self.warmup_s, self.precision) < 0 or self.max_seconds <= 0:
            raise UsageError(
                "1 <= min_rounds <= rounds, warmup_s and precision >= 0, and max_seconds > 0",
                f"{self.min_rounds}, {self.rounds}, {self.warmup_s}, {self.precision} and {self.max_seconds}",
                "Correct the timing settings.",
            )


@dataclass(frozen=True, slots=True)
class Saturation:
    """What an integer kernel returns, divided by the exact sum, when every product is the largest possible.

    s8, u8: the ratio with int8 weights (127) and with uint8 weights (zero point 128), the worst of the probed
    operators; 1.0 is exact, 0.504 is x86-64 without VNNI, whose 16-bit pair sums saturate.
    """

    s8: float
    u8: float

    @property
    def saturates(self) -> bool:
        """True when int8 weights in 8 bits lose their sums here; 7 bits or uint8 weights are the remedy."""
        # The probe's output has 255 steps, so an exact kernel is within half a step of 1.
        return self.s8 < 0.99

    @property
    def u8_saturates(self) -> bool:
        """True when uint8 weights lose their sums too."""
        return self.u8 < 0.99


@dataclass(frozen=True, slots=True)
class Audit:
    """What really ran, as read back from the graph that the runtime made of a file.

    ran: (node name of the file, precision), in the file's order, without QuantizeLinear, DequantizeLinear and
    Constant nodes; a node without a name goes by its first output tensor. 'gone' is a node that was folded,
    fused away without a trace, or removed; it says nothing about precision. 'weight-only': quantized weights,
    float activations.
    op_counts: (operator, count) of the graph that ran, sorted; domains but ONNX's own as `domain:operator`.
    boundaries: QuantizeLinear and DequantizeLinear nodes left on activations, each a pass over a tensor.
    """

    ran: tuple[tuple[str, Precision], ...]
    op_counts: tuple[tuple[str, int], ...]
    boundaries: int

    def precision(self, nodes: Iterable[str]) -> Precision:
        """The precision of a layer made of `nodes`: theirs when they agree, otherwise 'mixed'.

        'gone' when none of them is left. Raises KeyError for a name that the file does not have.
        """
        ran = dict(self.ran)
        seen = {ran[name] for name in nodes} - {"gone"}
        if len(seen) > 1:
            return "mixed"
        return seen.pop() if seen else "gone"


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds of one run by what they are spent on.

    nodes: by node of the file, kernels of several nodes at the heavy one, those without a name left out. quantize: by
    float tensor that is quantized. dequantize: by float tensor whose integers become floats again, for one reader.
    total: of all kernels.
    """

    nodes: Mapping[str, float]
    quantize: Mapping[str, float]
    dequantize: Mapping[str, float]
    total: float


@runtime_checkable
class Profiling(Protocol):
    """A target that can tell where the time goes."""

    def profile(self, path: Path, feeds: Sequence[Feeds], runs: int) -> Profile:
        """Medians over `runs` runs, the i-th on `feeds[i % len(feeds)]`. Raises `TargetFailure`."""
        ...


@runtime_checkable
class Predict(Protocol):
    """A loaded model: feeds by input name to all outputs by name, dtypes (strings too) as they come."""

    def __call__(self, feeds: Feeds) -> dict[str, np.ndarray]: ...


@runtime_checkable
class PredictEach(Predict, Protocol):
    """A loaded model that may take several inputs side by side, which costs less than threads within each run."""

    def each(self, feeds: Sequence[Feeds]) -> list[dict[str, np.ndarray]]:
        """As a call for each of them, in order."""
        ...


Load = Callable[[Path], Predict]


def predict_each(predict: Predict, feeds: Sequence[Feeds]) -> list[dict[str, np.ndarray]]:
    """The outputs for each of the inputs, side by side where the target can."""
    return predict.each(feeds) if isinstance(predict, PredictEach) else [predict(one) for one in feeds]


@runtime_checkable
class Target(Protocol):
    """A runtime with its options on this machine. Picklable by reference; safe to use from one thread at a
    time.

    Every method raises `TargetFailure` where the runtime refuses, crashes or (isolated) exceeds its limits.
    """

    @property
    def name(self) -> str:
        """Short and stable, such as 'ort-cpu'; how the user asks for the target."""
        ...

    def environment(self) -> dict[str, str]:
        """All that a measurement depends on beside the file: runtime, processor, threads, options."""
        ...

    def load(self, path: Path) -> Predict:
        """The model of `path`, ready to run with the options that a user's deployment would have."""
        ...

    def latency(self, paths: Sequence[Path], feeds: Sequence[Feeds], timing: Timing) -> tuple[tuple[float, ...], ...]:
        """Milliseconds a run, one tuple for each path, all of one length: the i-th entries are of one round.

        feeds: one or more inputs that fit every model; round i runs all models on `feeds[i % len(feeds)]`.
        """
        ...

    def audit(self, path: Path) -> Audit:
        """Which nodes of the file ran as integers and which as floats."""
        ...

    def probe_saturation(self) -> Saturation:
        """Whether integer kernels lose large sums on this machine."""
        ...

    def close(self) -> None:
        """Release what the target holds; it may be used again afterwards."""
        ...
