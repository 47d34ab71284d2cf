"""All that a report says about a run, as one fact; the text, JSON, picture and page are drawn from it alone.

What can be worked out from the fields (shares, ratios, ranks, reasons) is a function here, so that every form
of the report says the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from quantsieve import schemes
from quantsieve.evaluation import Estimate, Failed, Measured
from quantsieve.front import (
    Candidate,
    Recommendation,
    final_loss,
    is_float,
    is_measured,
    named,
    size_reduction_kept,
)
from quantsieve.plan import KEPT_BY
from quantsieve.reports import _numbers as numbers
from quantsieve.sensitivity.drift import error_ratio
from quantsieve.targets.timing import Ratio, ratio

VERSION = 1

Setting = str | int | float | bool | None | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Splits:
    """How many samples each part has; the parts are disjoint."""

    calibration: int
    search: int
    final: int


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """A layer of the prepared model under the user's own name."""

    name: str
    op_type: str
    num_params: int
    weight_bytes: int  # float32, weight and bias
    macs: int  # multiply-adds of one sample; 0 where unknown or without weights
    refusal: str | None  # why it has to be float: no scheme can quantize it, or the user keeps it so

    @property
    def is_kept(self) -> bool:
        """Whether the user keeps it float."""
        return self.refusal is not None and self.refusal.startswith(KEPT_BY)


@dataclass(frozen=True, slots=True)
class Price:
    """What quantizing one layer alone does to the outputs, higher is worse, with its 95 % interval.
    Measured by simulation on scan samples: mean relative squared error of the float outputs."""

    layer: str
    scheme: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """How well the additive model told the squared errors of the finalists; None where too few were
    measured."""

    ratio_median: float | None  # predicted / measured
    rank_correlation: float | None  # Spearman
    num_finalists: int


@dataclass(frozen=True)
class Summary:
    """A run, ready to be reported. Ids are plan ids; layers are in graph order."""

    model_file: str
    model_key: str  # content key of the model's bytes
    metric: str  # the task's name
    metric_text: str  # what its score is, for people
    data: str  # where samples come from, for people
    synthetic: bool
    splits: Splits
    seed: int
    environment: Mapping[str, str]  # runtime, version, processor, threads, ...
    saturation: str  # what integer kernels do here and what happens to the file on other processors
    layers: tuple[LayerFacts, ...]
    prices: tuple[Price, ...]
    candidates: tuple[Candidate, ...]
    files: Mapping[str, str]  # id -> path of the model file inside the run folder
    front: tuple[str, ...]  # by size, smallest first
    recommendation: Recommendation
    max_drop: float  # largest acceptable loss of score, absolute
    confident: bool  # the loss's high end must be within max_drop, not its point alone
    float_bytes: int  # file of the float model
    full_bytes: int  # smallest file with every layer under one scheme that can have it
    schemes: tuple[str, ...]  # allowed ones besides float
    settings: Mapping[str, Setting]
    elapsed_s: float
    stopped: Literal["done", "timeout", "max trials", "interrupted"]
    prediction: Prediction | None
    notes: tuple[str, ...]  # warnings that the stages recorded

    def candidate(self, id: str) -> Candidate:
        return next(c for c in self.candidates if c.id == id)

    @property
    def recommended(self) -> Candidate | None:
        return None if self.recommendation.id is None else self.candidate(self.recommendation.id)

    @property
    def reference(self) -> Candidate | None:
        """The float model."""
        return next((c for c in self.candidates if is_float(c)), None)

    @cached_property
    def names(self) -> dict[str, tuple[str, ...]]:
        """id -> 'recommended', 'best quality', 'smallest', 'fastest', as far as they are its names."""
        found: dict[str, tuple[str, ...]] = {}
        for name, id in named(self.candidates, self.recommendation.id).items():
            found[id] = (*found.get(id, ()), name)
        return found

    def kept(self, candidate: Candidate) -> float | None:
        """Share of the size reduction of `full_name`; None when that saves nothing."""
        return size_reduction_kept(candidate.size_bytes, self.float_bytes, self.full_bytes)

    @property
    def full_name(self) -> str:
        """What the smallest full plan is called: 'full int8', per channel or not, or 'full w8'."""
        origin = next(
            (c.origin for c in self.candidates if is_end(c) and not is_float(c) and c.size_bytes == self.full_bytes), ""
        )
        return "full int8" if origin.startswith("full int8") or not origin else origin

    def of_float_time(self, candidate: Candidate) -> Ratio | None:
        """Time over the float model's, of paired rounds; None where either was not timed in them."""
        float_ms = self.reference.latency_ms if self.reference is not None else ()
        if not float_ms or len(float_ms) != len(candidate.latency_ms):
            return None
        return ratio(candidate.latency_ms, float_ms)

    def shown(self) -> tuple[Candidate, ...]:
        """Rows of a table: the front, the recommended model, float and full int8; by size, smallest first."""
        ids = {*self.front, self.recommendation.id}
        rows = [c for c in self.candidates if c.id in ids or (is_measured(c) and is_end(c))]
        return tuple(sorted(rows, key=lambda c: (c.size_bytes, c.id)))


def is_end(candidate: Candidate) -> bool:
    """The float model or full int8: the two ends that everything is compared with."""
    return is_float(candidate) or candidate.origin.startswith("full ")


def is_baseline(candidate: Candidate) -> bool:
    """A cheap plan that the programme has to beat: first k float, last k float, a ranking."""
    return not is_end(candidate) and candidate.origin.startswith(("first", "last", "ranking"))


def mse_ratio(candidate: Candidate) -> float | None:
    """Measured over simulated squared error, as `error_ratio` has it."""
    return error_ratio(candidate.measured_mse, candidate.simulated_mse)


def outcome(candidate: Candidate) -> Measured | Failed | None:
    """On the final samples, else on the search samples."""
    return candidate.final if candidate.final is not None else candidate.search


@dataclass(frozen=True, slots=True)
class Precision:
    """Asked against what ran. differing: layer -> what ran instead, for layers that could be quantized."""

    asked_int8: int
    ran_int8: int
    gone: int  # asked for int8, and folded or fused away without a trace
    differing: Mapping[str, str]

    def text(self) -> str:
        gone = f", {self.gone} fused away" if self.gone else ""
        layers = numbers.count(self.asked_int8, "layer")
        return f"asked int8 on {layers}, ran int8 on {self.ran_int8:,}{gone}"


def precision(summary: Summary, candidate: Candidate) -> Precision | None:
    """What ran, read back from the optimized graph; None when it was not read."""
    if not candidate.ran:
        return None
    plan, ran = candidate.plan, candidate.ran
    wanted = {name: schemes.get(plan.scheme(name)).runs_as for name in plan.quantized()}
    asked = [name for name, precisions in wanted.items() if precisions == {"int8"}]
    able = [layer for layer in summary.layers if layer.refusal is None or layer.is_kept]
    choosable = [layer.name for layer in able if layer.name in ran]
    differing = {name: ran[name] for name in choosable if ran[name] not in {"gone", *wanted.get(name, {"float"})}}
    quantized = [ran.get(name, "gone") for name in asked]
    integer = quantized.count("int8")
    return Precision(len(asked), integer, quantized.count("gone"), differing)


def failures(candidate: Candidate) -> tuple[Failed, ...]:
    return tuple(found for found in (candidate.search, candidate.final) if isinstance(found, Failed))


def loss_of(candidate: Candidate) -> Estimate | None:
    """On the final samples; exactly 0 for float; None when it was not measured there."""
    return final_loss(candidate) if is_measured(candidate) else None


def disagreement_of(candidate: Candidate) -> Estimate | None:
    """Share of final samples whose label differs from float's; 0 for float; None when it was not measured."""
    if not isinstance(candidate.final, Measured):
        return None
    return Estimate(0.0, 0.0, 0.0) if is_float(candidate) else candidate.final.disagreement()
