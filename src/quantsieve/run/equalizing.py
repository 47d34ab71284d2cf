"""Equalization in the line: a variant of the prepared model, used where simulated plans get better with it.

What is decided is whether all plans are made of the variant (see `model/equalize.py`), by the squared errors of the
full plans in simulation on scan samples, with and without. The float model stays the prepared one.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from quantsieve.data import batches
from quantsieve.errors import InputError, UnsupportedModel
from quantsieve.model import aside, equalize, prepare
from quantsieve.model.joints import find_joints
from quantsieve.plan import BIAS, EQUALIZED, full_plan
from quantsieve.reports._numbers import three
from quantsieve.run.keys import content_key, model_key
from quantsieve.run.line import Feeds, Line
from quantsieve.run.progress import Step
from quantsieve.run.trials import Trials

VERSION = 1
GAIN = 0.9  # of the squared errors before, in the geometric mean over schemes, that it must at least come down to
# Of a Clip's bound over scaled peaks, tried in turn while float outputs of search samples move; at last without Clips.
HEADROOMS = (equalize.HEADROOM, 4.0, math.inf)
GUARD_SAMPLES = 64  # most search samples that float outputs are compared on, the same whatever the settings of a scan


@dataclass(frozen=True, slots=True)
class Equalized:
    """What was scaled: by layer how many of its channels; why it was not; content key of the file beside this fact."""

    channels: Mapping[str, int]
    refusal: str | None
    file_key: str | None


@dataclass(frozen=True, slots=True)
class Errors:
    """Mean simulated squared errors of the full plans by scheme, of the prepared model and of the variant."""

    plain: Mapping[str, float]
    equalized: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Of both, the geometric mean over schemes."""
        least = 1e-12  # of an error: below it there is nothing to gain
        logs = [math.log(max(self.equalized[s], least) / max(self.plain[s], least)) for s in self.plain]
        return math.exp(sum(logs) / len(logs))

    def text(self) -> str:
        pairs = ((name, self.plain[name], self.equalized[name]) for name in self.plain)
        return ", ".join(f"{three(before)} -> {three(after)} ({name})" for name, before, after in pairs)


def settle(line: Line, trials: Trials) -> Line:
    """The line to go on with: over the variant where the settings ask for it, or where it is better."""
    if line.settings.equalize == "off" or not line.options.schemes:
        return line
    is_asked = line.settings.equalize == "on"
    found = _equalized(line)
    if isinstance(found, str):
        if is_asked:
            line.notes.append(f"nothing was equalized: {found}")
        return line
    other, fact = found
    scaled = f"channels of {len(fact.channels)} layers scaled, {sum(fact.channels.values())} in all"
    if is_asked:
        line.notes.append(f"equalized as asked: {scaled}")
        return other
    line.progress(Step("calibrate", "full plans with and without equalization"))
    errors = _errors(line, other, trials)
    if errors.ratio > GAIN:
        line.notes.append(f"not equalized: the simulated squared error of full plans hardly falls: {errors.text()}")
        return line
    line.lay_aside()
    line.notes.append(f"equalized ({scaled}): simulated squared error of full plans {errors.text()}")
    return other


def _equalized(line: Line) -> tuple[Line, Equalized] | str:
    """The line over the variant and what was scaled, or why there is none."""
    calibration = line.sample_key(line.split.calibration, line.calibration_samples)
    keys = [line.base_key, calibration, line.sample_key(_guard_indices(line))]
    key = content_key("equalize", VERSION, {"scales": equalize.VERSION}, keys)
    path = line.store.path_for("equalize", key, ".onnx")

    def compute() -> Equalized:
        joints = find_joints(line.graph, line.structure)
        if not joints:
            return Equalized({}, "no channels can be scaled between layers of this model", None)
        moments = equalize.measure(line.executor, joints, _calibration_feeds(line))
        refusal = "rounding would cost as much"
        for headroom in HEADROOMS:
            open_joints = [joint for joint in joints if math.isfinite(headroom) or math.isinf(joint.bound)]
            scales = equalize.find_scales(line.graph, line.structure, open_joints, moments, headroom)
            if not scales:
                break
            with line.store.scratch("equalize") as folder:
                aside.save(equalize.equalized(line.graph.model, open_joints, scales), folder / path.name)
                gap = prepare.largest_gap(line.base_path, folder / path.name, _guard_feeds(line))
                if gap <= prepare.RELATIVE_TOLERANCE:
                    for file in folder.glob(f"{path.stem}.*"):
                        line.store.take_file(file, path.with_name(file.name))
                    channels = {layer: int((own != 1).sum()) for layer, own in scales.items()}
                    return Equalized(channels, None, model_key(path))
            refusal = f"a float output moved by {gap:.1e} of its range"
        return Equalized({}, refusal, None)

    def is_whole(found: Equalized) -> bool:
        try:
            return found.file_key is None or model_key(path) == found.file_key
        except (InputError, UnsupportedModel):
            return False

    fact = line.fact("equalize", key, Equalized, compute, is_whole)
    return fact.refusal if fact.refusal is not None else (line.over(path, key), fact)


def _calibration_feeds(line: Line) -> Iterator[tuple[Feeds, int]]:
    for part, feeds in batches(line.calibration_samples, line.split.calibration, line.batch):
        yield feeds, len(part)


def _guard_indices(line: Line) -> np.ndarray:
    """Search samples: they may go beyond what calibration saw."""
    return line.split.search[:GUARD_SAMPLES]


def _guard_feeds(line: Line) -> Iterator[Feeds]:
    for _, feeds in batches(line.samples, _guard_indices(line), line.batch):
        yield feeds


def _errors(line: Line, other: Line, trials: Trials) -> Errors:
    bias = (BIAS,) if line.settings.bias_correction else ()
    settings = {**line.numbers, "bias_correction": bool(bias), "weights": trials.weight_type, **line.kept}
    keys = [other.base_key, line.calibration_key, line.sample_key(trials.scan_indices)]

    def compute() -> Errors:
        found: list[dict[str, float]] = []
        for each, repairs in ((line, bias), (other, (*bias, EQUALIZED))):
            bench = trials.bench(each)
            plans = {name: replace(full_plan(each.options, name), repairs=repairs) for name in line.settings.schemes}
            found.append({name: float(bench.simulate(p, bench.parts(p)).mean()) for name, p in plans.items()})
        return Errors(*found)

    return line.fact("equalize-errors", content_key("equalize-errors", VERSION, settings, keys), Errors, compute)
