"""A scan of one line: its prices as ranked layers, with what the layers are in the user's own file."""

from collections.abc import Iterator, Sequence

import numpy as np

from quantsieve.data import batches
from quantsieve.errors import UsageError
from quantsieve.model.graph import Graph
from quantsieve.plan import full_plan
from quantsieve.run.line import Line
from quantsieve.run.progress import Step
from quantsieve.search.prices import forced_tensors
from quantsieve.sensitivity import rescue
from quantsieve.sensitivity.engine import refusal
from quantsieve.sensitivity.local import TensorRow, rows, tensor_errors
from quantsieve.sensitivity.origin import original_nodes
from quantsieve.sensitivity.places import find_places
from quantsieve.sensitivity.racing import is_settled
from quantsieve.sensitivity.ranking import Choice, Refused, Score, rank, rank_gains, sums_of
from quantsieve.sensitivity.scan_document import METRICS, ScanResult


def scan_line(line: Line, is_race: bool = False, mode: str = "alone") -> ScanResult:
    """Every layer of the model: ranked under each scheme that it may have, or refused with the reason.

    is_race: end before all scan samples are priced when the order of the worst layers is settled. mode: 'alone', or
    'rescue' for what each layer's return to float takes away from the fully quantized model's error.
    """
    if mode not in METRICS:
        raise UsageError(f"a mode of {', '.join(METRICS)}", repr(mode), "Choose one of them.")
    options, form = line.options, line.schemes[0].activation
    refusals = options.refusals
    choices = _choices(line)
    if is_race:
        line.is_settled = lambda prices: is_settled(sums_of(choices, prices, form))
    layers: tuple[Score, ...] = ()
    count = 0
    if options.schemes and mode == "alone":
        layers, count = rank(choices, line.prices, form), line.prices.num_samples
    elif options.schemes:
        layers, count = rank_gains(choices, _gains(line)), len(line.scan_indices)
    return ScanResult(
        mode=mode,
        tensors=_tensors(line, count) if options.schemes else (),
        model_file=line.path.name,
        model_key=line.model_key,
        num_samples=count,
        seed=line.settings.seed,
        schemes=line.settings.schemes,
        activation=form,
        calibration_samples=len(line.split.calibration),
        layers=layers,
        refused=tuple(
            Refused(x.name, x.op_type, refusals[x.name]) for x in line.structure.layers if x.name in refusals
        ),
        notes=(
            *line.prepared.notes,
            *line.sources.notes(),
            *dict.fromkeys(line.notes),
            *_scan_notes(line, layers if mode == "alone" else ()),
        ),
    )


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


def _gains(line: Line) -> dict[tuple[str, str], np.ndarray]:
    """By layer and scheme, of the model that has that scheme wherever it can."""
    gains: dict[tuple[str, str], np.ndarray] = {}
    for scheme in line.settings.schemes:
        plan, found, done = full_plan(line.options, scheme), [], 0
        for part, feeds in batches(line.samples, line.scan_indices, line.batch):
            line.progress(Step("sensitivity", f"{scheme}, all but one: layer by layer", done, len(line.scan_indices)))
            found.append(rescue.rescue_batch(line.executor, line.parts(), plan, feeds, len(part)))
            done += len(part)
        whole = rescue.join(found)
        for layer, errors in zip(whole.layers, whole.errors, strict=True):
            gains.setdefault((layer, plan.scheme(layer)), whole.full - errors)
    return gains


def _tensors(line: Line, count: int) -> tuple[TensorRow, ...]:
    """Both errors of every tensor on the samples of the scores; the quantized model has the first scheme everywhere."""
    line.progress(Step("sensitivity", "errors of every tensor, alone and in the quantized model"))
    indices = line.scan_indices[:count]
    feeds = (feeds for _, feeds in batches(line.samples, indices, line.batch))
    plan = full_plan(line.options, line.settings.schemes[0])
    return rows(line.executor, tensor_errors(line.executor, line.parts(), plan, feeds))


def _choices(line: Line) -> list[Choice]:
    places = find_places(line.graph, line.structure)
    layers, given = line.structure.quantizable, dict(line.prepared.given_names)
    nodes = original_nodes(Graph(line.original), line.graph, layers, given)
    allowed = line.options.schemes
    return [
        Choice(layer, allowed[layer.name], forced_tensors(line.graph, layer), nodes[layer.name], places[layer.name])
        for layer in layers
        if layer.name in allowed
    ]
