"""A scan of one line: its prices as ranked layers, with what the layers are in the user's own file."""

from collections.abc import Sequence

import numpy as np

from quantsieve.data import batches
from quantsieve.errors import UsageError
from quantsieve.model.graph import Graph
from quantsieve.plan import full_plan
from quantsieve.run.line import Line
from quantsieve.run.progress import Step
from quantsieve.search.prices import forced_tensors
from quantsieve.sensitivity import rescue
from quantsieve.sensitivity.blocks import find_blocks
from quantsieve.sensitivity.local import TensorRow, rows, tensor_errors
from quantsieve.sensitivity.origin import original_nodes
from quantsieve.sensitivity.racing import is_settled
from quantsieve.sensitivity.ranking import Choice, Refused, Score, doubts_of, rank, rank_gains, sums_of
from quantsieve.sensitivity.scan_document import METRICS, ScanResult, Screen
from quantsieve.sensitivity.suffix import Prices


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
        line.is_settled = lambda prices: _is_settled(choices, prices, form)
    layers: tuple[Score, ...] = ()
    count, screen = 0, None
    if options.schemes and mode == "alone":
        layers, count = rank(choices, line.prices, form), line.prices.num_samples
        screen = _screen(line.prices)
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
        screen=screen,
        refused=tuple(
            Refused(x.name, x.op_type, refusals[x.name]) for x in line.structure.layers if x.name in refusals
        ),
        notes=(*line.prepared.notes, *line.sources.notes(), *dict.fromkeys(line.notes)),
    )


def _is_settled(choices: Sequence[Choice], prices: Prices, form: str) -> bool:
    return is_settled(sums_of(choices, prices, form), doubts=doubts_of(choices, prices, form))


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
    blocks = find_blocks(line.graph, line.structure)
    nodes = original_nodes(Graph(line.original), line.structure.layers, dict(line.prepared.given_names))
    allowed = line.options.schemes
    return [
        Choice(layer, allowed[layer.name], forced_tensors(line.graph, layer), nodes[layer.name], blocks.get(layer.name))
        for layer in line.structure.quantizable
        if layer.name in allowed
    ]
