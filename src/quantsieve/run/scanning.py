"""A scan of one line: its prices as ranked layers, with what the layers are in the user's own file."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from quantsieve import tasks
from quantsieve.data import batches
from quantsieve.errors import InputError, UsageError
from quantsieve.model.graph import Graph
from quantsieve.model.load import open_model
from quantsieve.model.units import Layer
from quantsieve.plan import Plan, forced_tensors, full_plan
from quantsieve.run.keys import array_key, content_key
from quantsieve.run.line import Feeds, Line
from quantsieve.run.progress import Step
from quantsieve.run.trials import Trials
from quantsieve.schemes._static import by_name
from quantsieve.sensitivity import metrics, probes, racing, rescue
from quantsieve.sensitivity.engine import refusal
from quantsieve.sensitivity.local import TensorRow, check_weights, rows, tensor_errors
from quantsieve.sensitivity.metrics import LOWER, METRICS, Meaning, Measure, no_channels
from quantsieve.sensitivity.origin import original_nodes
from quantsieve.sensitivity.places import find_places
from quantsieve.sensitivity.probes import Batch, Probes, join, probe_batch
from quantsieve.sensitivity.racing import is_settled
from quantsieve.sensitivity.ranking import (
    Choice,
    Refused,
    Score,
    alone,
    doubts_of,
    rank,
    rank_gains,
    rank_values,
    sums_of,
)
from quantsieve.sensitivity.scan_document import DEFAULT, MODES, PRICED, ScanResult, Screen
from quantsieve.sensitivity.suffix import Prices


@dataclass(frozen=True, slots=True)
class Scoring:
    """What the scores of a scan are.

    is_race: end before all scan samples are used when the order of the worst layers is settled. mode: 'alone', or
    'rescue' for what each layer's return to float takes away from the fully quantized model's error. metric: None for
    the sums of prices, 'quality' for the score of the task that fits. has_outputs, has_channels: whether rows tell the
    value of each output, and of each of its channels. combined_weights: of the local and the accumulated error of
    tensors. Raises UsageError for what does not go together.
    """

    is_race: bool = False
    mode: str = "alone"
    metric: Measure | Literal["quality"] | None = None
    has_outputs: bool = False
    has_channels: bool = False
    combined_weights: tuple[float, float] = (0.5, 0.5)

    def __post_init__(self) -> None:
        check_weights(*self.combined_weights)
        if self.mode not in MODES:
            raise UsageError(f"a mode of {', '.join(MODES)}", repr(self.mode), "Choose one of them.")
        if self.mode != "alone" and self.metric is not None:
            raise UsageError(f"the metric {DEFAULT} with the mode {self.mode}", "another one", "Leave one of them out.")
        if not (self.has_outputs or self.has_channels):
            return
        measure = self.metric
        if not isinstance(measure, Measure) or not callable(measure.compare):
            shown = measure.meaning.name if isinstance(measure, Measure) else measure or DEFAULT
            todo = f"Choose from {', '.join(METRICS)}."
            raise UsageError("a metric with a value of each output", f"{shown}, which takes all outputs as one", todo)
        if self.has_channels and not measure.has_channels:
            raise no_channels(measure)


def scan_line(line: Line, scoring: Scoring) -> ScanResult:
    """Every layer of the model: ranked under each scheme that it may have, or refused with the reason."""
    options = line.options
    refusals = options.refusals
    if options.schemes:
        _check_outputs(line.graph)
    choices = _choices(line)
    meaning = PRICED[scoring.mode]
    layers: tuple[Score, ...] = ()
    count, screen = 0, None
    if scoring.metric is not None:
        measure = scoring.metric
        if not isinstance(measure, Measure):
            measure = metrics.get(tasks.get(Trials(line).task))
        meaning = measure.meaning
        if choices:
            layers, count = _probed(line, choices, measure, scoring)
    elif options.schemes and scoring.mode == "alone":
        if scoring.is_race:
            line.is_settled = lambda prices: _are_settled(choices, prices)
        layers, count = rank(choices, line.prices), line.prices.num_samples
        screen = _screen(line.prices)
    elif options.schemes:
        layers, count = rank_gains(choices, _gains(line)), len(line.scan_indices)
    return ScanResult(
        mode=scoring.mode,
        metric=meaning,
        combined_weights=scoring.combined_weights,
        tensors=_tensors(line, count, scoring.combined_weights) if options.schemes else (),
        model_file=line.path.name,
        model_key=line.model_key,
        num_samples=count,
        seed=line.settings.seed,
        schemes=line.settings.schemes,
        activation=", ".join(dict.fromkeys(scheme.activation or "float" for scheme in line.schemes)),
        calibration_samples=len(line.split.calibration),
        calibration_method=line.settings.ranges,
        layers=layers,
        screen=screen,
        refused=tuple(
            Refused(x.name, x.op_type, refusals[x.name]) for x in line.structure.layers if x.name in refusals
        ),
        notes=(
            *line.prepared.notes,
            *line.sources.notes(),
            *dict.fromkeys(line.notes),
            *_scan_notes(line, layers if meaning is PRICED["alone"] else ()),
        ),
    )


def _check_outputs(graph: Graph) -> None:
    """Raises InputError when no output is float: nothing could be compared."""
    if not any("float" in value.dtype for value in graph.outputs):
        found = ", ".join(f"'{value.name}' of {value.dtype}" for value in graph.outputs)
        raise InputError("at least one float output", found, "Expose the logits as an output of the model.")


def _probed(line: Line, choices: Sequence[Choice], measure: Measure, scoring: Scoring) -> tuple[tuple[Score, ...], int]:
    """(rows, number of samples) of a metric other than the prices."""
    parts, labels = line.parts(), line.samples.labels
    rows, total = alone(choices), len(line.scan_indices)
    indices, exposures = line.scan_indices, None
    if scoring.is_race and measure.exposure is not None:
        indices, exposures = _most_exposed_first(line, measure)
    looks = racing.looks(total, exposures) if scoring.is_race else (total,)
    found: list[Probes] = []
    held: list[np.ndarray] = []
    still = np.arange(len(rows))  # rows of which more samples are probed
    done, start = 0, time.perf_counter()
    for part, feeds in _between(line, indices, looks):

        def tell(number: int, done: int = done, count: int = len(part), of: int = len(still)) -> None:
            share = (done + count * number / of) / total
            left = (time.perf_counter() - start) * (1 - share) / share
            text = f"{measure.meaning.name}: {of} probes of layers on {total} samples"
            line.progress(Step("sensitivity", text, round(1000 * share), 1000, left))

        batch = Batch(feeds, len(part), None if labels is None else labels[part])

        wanted = [rows[row] for row in still]

        def compute(
            batch: Batch = batch, wanted: Sequence[tuple[Choice, str]] = wanted, tell: Callable[[int], None] = tell
        ) -> Probes:
            has_channels, workers = scoring.has_channels, line.workers
            return probe_batch(line.executor, batch, wanted, [measure], parts, has_channels, workers, tell)[0]

        settings = _settings(line) | {"metric": measure.meaning.name, "channels": scoring.has_channels}
        if len(still) < len(rows):
            settings["rows"] = [[choice.layer.name, scheme] for choice, scheme in wanted]
        key = content_key(
            "probes", probes.VERSION, settings, [line.calibration_key, line.sample_key(part), *_key(batch)]
        )
        found.append(line.fact("probes", key, Probes, compute) if _is_lasting(measure) else compute())
        held.append(still)
        done += len(part)
        if done not in looks[:-1]:
            continue
        totals = join(found, held).totals
        if exposures is not None:
            still = np.intersect1d(still, np.flatnonzero(racing.open_rows(totals, exposures)))
            if not len(still):
                break
        elif _is_settled(measure.meaning, totals):
            break
    whole = join(found, held)
    totals, outputs, doubts = whole.totals, whole.outputs if scoring.has_outputs else {}, None
    counts = totals.shape[1] - np.isnan(totals).sum(axis=1)
    if exposures is not None and counts.min() < total:
        least, most = int(counts.min()), int(counts.max())
        share = exposures[:least].sum() / exposures.sum()
        more = f" (up to {most} for layers whose place was open)" if most > least else ""
        totals, doubts = racing.foretold(totals, exposures)
        outputs = {name: racing.foretold(array, exposures)[0] for name, array in outputs.items()}
        line.notes.append(
            f"the scores are means over {total} samples: over the {least} of which the float model is least "
            f"sure{more}, where {share:.0%} of the divergence is to be expected, as probed, over the others as "
            "foretold from those; --samples probes all"
        )
    return rank_values(choices, measure.meaning, totals, outputs, whole.channels, doubts), done


def _most_exposed_first(line: Line, measure: Measure) -> tuple[np.ndarray, np.ndarray]:
    """(indices of the scan samples, their exposures), the greatest first; one pass of the float model."""
    line.progress(Step("sensitivity", "float outputs, to begin with the samples of which the model is least sure"))
    fed = batches(line.samples, line.scan_indices, line.batch)
    found = [probes.exposures(line.executor, Batch(feeds, len(part)), measure) for part, feeds in fed]
    exposures = np.concatenate([part for part in found if part is not None])
    order = np.argsort(-exposures, kind="stable")
    return line.scan_indices[order], exposures[order]


def _between(line: Line, indices: np.ndarray, looks: Sequence[int]) -> Iterator[tuple[np.ndarray, Feeds]]:
    """Batches that end where a look is."""
    for begin, end in pairwise((0, *looks)):
        yield from batches(line.samples, indices[begin:end], line.batch)


def _settings(line: Line) -> dict[str, object]:
    return {**line.numbers, "bias_correction": line.settings.bias_correction, **line.kept}


def _key(batch: Batch) -> list[str]:
    return [] if batch.labels is None else [array_key(batch.labels)]


def _is_lasting(measure: Measure) -> bool:
    """Whether the name says what is computed; a function of the user's may change between two calls."""
    own = METRICS.get(measure.meaning.name)
    return measure is own or type(measure.compare).__module__.startswith("quantsieve.tasks")


def _is_settled(meaning: Meaning, totals: np.ndarray) -> bool:
    """A race takes shares of a score: decibels are none, so it is run on the noise that they stand for."""
    values = 10 ** (-totals / 10) if meaning.direction == LOWER else totals
    with np.errstate(invalid="ignore"):
        return is_settled(values)


def _scan_notes(line: Line, layers: Sequence[Score]) -> Iterator[str]:
    """Why the scan was slow, and which layers, quantized alone, it could not see."""
    reason = refusal(line.executor)
    if reason is not None:
        yield f"the scan ran layer by layer, which takes longer and gives the same scores: {reason}"
    unmoved = list(dict.fromkeys(score.layer for score in layers if score.value == 0))
    if unmoved:
        names = ", ".join(unmoved[:5]) + (f" and {len(unmoved) - 5} more" if len(unmoved) > 5 else "")
        yield (
            f"on these samples quantizing alone moved no float output, so the score is 0, for {names}; "
            "outputs of other types are not compared"
        )


def _are_settled(choices: Sequence[Choice], prices: Prices) -> bool:
    return is_settled(sums_of(choices, prices), doubts=doubts_of(choices, prices))


def _screen(prices: Prices) -> Screen | None:
    found = prices.screening
    if found is None:
        return None
    return Screen(found.rank, len(found.checked), int((~found.is_exact).sum()), len(found.is_exact))


def _gains(line: Line) -> dict[tuple[str, str], np.ndarray]:
    """By layer and scheme, of the model that has that scheme wherever it can."""
    gains: dict[tuple[str, str], np.ndarray] = {}
    for scheme in line.settings.schemes:
        plan, found, done = full_plan(line.options, scheme), [], 0
        for part, feeds in batches(line.samples, line.scan_indices, line.batch):
            line.progress(Step("sensitivity", f"{scheme}, all but one: layer by layer", done, len(line.scan_indices)))

            def compute(plan: Plan = plan, feeds: Feeds = feeds, count: int = len(part)) -> rescue.Rescues:
                return rescue.rescue_batch(line.executor, line.parts(), plan, feeds, count)

            settings = _settings(line) | {"plan": plan.id}
            key = content_key("rescue", rescue.VERSION, settings, [line.calibration_key, line.sample_key(part)])
            found.append(line.fact("rescue", key, rescue.Rescues, compute))
            done += len(part)
        whole = rescue.join(found)
        for layer, errors in zip(whole.layers, whole.errors, strict=True):
            gains.setdefault((layer, plan.scheme(layer)), whole.full - errors)
    return gains


def _tensors(line: Line, count: int, weights: tuple[float, float]) -> tuple[TensorRow, ...]:
    """Both errors of every tensor on the samples of the scores; the quantized model has the first scheme everywhere, of
    those that round tensors at all."""
    static = next((scheme.name for scheme in line.schemes if scheme.activation is not None), None)
    if static is None:
        return ()
    line.progress(Step("sensitivity", "errors of every tensor, alone and in the quantized model"))
    indices = line.scan_indices[:count]
    feeds = (feeds for _, feeds in batches(line.samples, indices, line.batch))
    plan = full_plan(line.options, static)
    return rows(line.executor, tensor_errors(line.executor, line.parts(), plan, feeds), weights)


def _choices(line: Line) -> list[Choice]:
    places = find_places(line.graph, line.structure)
    layers, given = line.structure.quantizable, dict(line.prepared.given_names)
    nodes = original_nodes(Graph(open_model(line.path)), line.graph, layers, given)
    allowed, schemes = line.options.schemes, by_name(line.schemes)

    def choice(layer: Layer) -> Choice:
        own = allowed[layer.name]
        forced = {scheme: forced_tensors(line.graph, layer, schemes[scheme]) for scheme in own}
        return Choice(layer, own, forced, nodes[layer.name], places[layer.name])

    return [choice(layer) for layer in layers if layer.name in allowed]
