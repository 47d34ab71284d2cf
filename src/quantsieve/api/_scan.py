"""Scores of layers, and layers picked by them: scan, read_scan, pick."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from quantsieve.api._files import write_text
from quantsieve.api._line import beside, open_line, open_sources, ranges_of, spec_of
from quantsieve.data import Preprocess
from quantsieve.model.load import open_model
from quantsieve.run.drift import check_wanted, with_drift
from quantsieve.run.keys import model_key
from quantsieve.run.plugin import find_metric
from quantsieve.run.progress import Progress
from quantsieve.run.scan_file import load_blocks, load_scan
from quantsieve.run.scanning import Scoring, scan_line
from quantsieve.run.spec import Limits, Settings
from quantsieve.schemes._formats import Formats
from quantsieve.selection import Selection
from quantsieve.sensitivity.blocks import match
from quantsieve.sensitivity.metrics import Metric
from quantsieve.sensitivity.pick import NEAR, PickResult, Rule, pick_layers
from quantsieve.sensitivity.racing import LOOKS
from quantsieve.sensitivity.scan_document import DEFAULT, ScanResult, check_model, scan_text
from quantsieve.tasks import Task


def scan(
    model: str | os.PathLike[str],
    data: object = None,
    *,
    synthetic: int | None = None,
    calibration_data: object = None,
    calibration_method: str = "minmax",
    percentile: float | None = None,
    preprocess: Preprocess | None = None,
    skip_bad: bool = False,
    class_names: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] = (),
    nodes_to_quantize: Sequence[str] = (),
    op_types_to_exclude: Sequence[str] = (),
    op_types_to_quantize: Sequence[str] = (),
    schemes: Sequence[str] = ("int8", "int8-channel"),
    seed: int = 0,
    workers: int = 2,
    weight_type: str = "auto",
    activation_type: str = "u8",
    symmetric_activations: bool = False,
    asymmetric_weights: bool = False,
    file_format: str = "qdq",
    bias_correction: bool = True,
    mode: str = "alone",
    metric: str | Metric | Task = DEFAULT,
    per_output: bool = False,
    per_channel: bool = False,
    combined_weights: tuple[float, float] = (0.5, 0.5),
    samples: int | None = None,
    screen: str = "auto",
    drift: str | int = "auto",
    memory_limit: int | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ScanResult:
    """The score of every layer under every scheme; written as scan.json to `output` where one is given.

    mode: 'alone' scores each layer quantized alone; 'rescue' what its return to float takes away from the error of the
    fully quantized model. samples: how many the scores are means over; None races: samples are added, 64 at most,
    while their ranking or one of the worst scores is open ('rescue' takes 32). screen: 'auto' estimates
    most scores from gradients where a graph has some hundred sources of noise, 'on' wherever it can, 'off' never.

    metric: `relative_mse`, whose scores add up and are what the search takes; mse, sqnr, kl_div, cos, top1, top5,
    max_abs; the loss of a task's score: accuracy (needs labels), agreement, fidelity, or quality for the one that
    `tune` would take; a function of (float, perturbed) output, both [n, ...], to float64 [n], higher is worse, or its
    place as `file.py:function` or `module:function`. per_output, per_channel: rows tell the value of each output, and
    of each of its channels (mse, sqnr, cos, max_abs and functions). combined_weights: of the local and the accumulated
    error in the rank of the tensors.

    drift: scores are of the simulation. With the mode 'alone' the fully quantized model of each scheme is written, run
    in a real session on the samples of the scores, and its error over the simulated one told; 'auto' measures the 10
    worst rows alone as well where that ratio is outside 0.9 to 1.1, N the N worst rows of each scheme in any case,
    'off' runs no session. Raises UsageError for another value, and for N with the mode 'rescue'.

    nodes_to_exclude, nodes_to_quantize, op_types_to_exclude, op_types_to_quantize: layers chosen by hand, names or
    `re:PATTERN`, see `Selection`; those that stay float have no score and stand among the refused.

    calibration_method, percentile, memory_limit, and weight_type to file_format: as for `tune`. A killed scan leaves
    its batches in `OUTPUT.work-...`, where the same call goes on.
    """
    check_wanted(drift, mode)
    selection = Selection.of(nodes_to_exclude, nodes_to_quantize, op_types_to_exclude, op_types_to_quantize)
    scoring = Scoring(samples is None, mode, find_metric(metric), per_output, per_channel, combined_weights)
    count = samples
    if count is None:
        count = 32 if mode == "rescue" else LOOKS[-1]
    ranges = ranges_of(calibration_method, percentile)
    formats = Formats(weight_type, activation_type, symmetric_activations, asymmetric_weights, file_format)
    settings = Settings(
        tuple(schemes), None, seed, 1, formats, bias_correction, count, None, (), screen, *ranges, selection
    )
    path = Path(model)
    open_model(path)
    sources = open_sources(path, data, synthetic, calibration_data, preprocess, skip_bad, class_names, seed)
    limits = Limits(workers=workers, memory_limit=memory_limit)
    with (
        beside(output, spec_of(path, sources, settings)) as folder,
        open_line(folder, path, sources, settings, limits, progress) as line,
    ):
        result = with_drift(line, scan_line(line, scoring), drift)
        if output is not None:
            write_text(Path(output), scan_text(result))
    return result


def read_scan(path: str | os.PathLike[str]) -> ScanResult:
    """The scan in a scan.json. Raises InputError when the file is none."""
    return load_scan(path)


def pick(
    scan: str | os.PathLike[str] | ScanResult,
    *,
    coverage: float | None = None,
    threshold: float | None = None,
    scheme: str | None = None,
    blocks: str | os.PathLike[str] | Mapping[str, str] | None = None,
    block_agg: str = "sum",
    max_layers: int | None = None,
    near: float = NEAR,
    output: str | os.PathLike[str] | None = None,
) -> PickResult:
    """Layers to keep float, from the scores of a scan without a search; needs neither model nor data.

    coverage: share of all scores that the fewest layers must hold, 0..1. threshold: scores above it are kept float.
    scheme: whose scores count; default the first scanned. blocks: as the scan found them (`auto`; larger
    ones, `stage`; attention and MLP apart, `half`), `op_type`, or a map name -> regular expression or a TOML or JSON
    file of it, first match wins. block_agg: sum, max or mean. near: ratio of scores from which a cut is warned of; one
    between layers that tie in the scan is, too. output: gets the scan with the picked layers, and no others, marked.
    """
    rule = Rule(coverage, threshold, block_agg, max_layers, near)
    given = scan if isinstance(scan, ScanResult) else load_scan(scan)
    found = pick_layers(given, rule, scheme, _blocks(given, blocks))
    if output is not None:
        write_text(Path(output), scan_text(found.scan))
    return found


def kept_layers(scan: str | os.PathLike[str] | ScanResult | None, model: Path) -> tuple[str, ...]:
    """Names of the layers that the scan marks. Raises InputError when it is a scan of another model."""
    if scan is None:
        return ()
    key = model_key(model)
    if isinstance(scan, ScanResult):
        return check_model(scan, "the scan", key).keep_float
    return load_scan(scan, key).keep_float


def _blocks(scan: ScanResult, blocks: str | os.PathLike[str] | Mapping[str, str] | None) -> Mapping[str, str | None]:
    """The block of each layer, as far as it has one."""
    if blocks is None:
        return {}
    if blocks == "stage":
        return {score.layer: score.stage or score.block for score in scan.layers}
    if blocks == "auto":
        return {score.layer: score.block for score in scan.layers}
    if blocks == "half":
        return {score.layer: score.half or score.block for score in scan.layers}
    if blocks == "op_type":
        return {score.layer: score.op_type for score in scan.layers}
    patterns = blocks if isinstance(blocks, Mapping) else load_blocks(blocks)
    return match([score.layer for score in scan.layers], patterns)
