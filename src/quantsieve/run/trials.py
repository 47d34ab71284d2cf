"""Candidates: a plan is built as a file, simulated, run on the target, read back, and timed; each a stored fact.

A candidate that fails anywhere is a result with its reason. What a measurement depends on is in its key: the file's
bytes, the samples, the task, and the target's environment.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx

from quantsieve import evaluation, repair, writing
from quantsieve.errors import UnsupportedModel
from quantsieve.evaluation import Exam, Failed, Measured, Outcome, Reference
from quantsieve.model.units import Layer
from quantsieve.operators import as_operators
from quantsieve.plan import EQUALIZED, Plan
from quantsieve.readback import check_written
from quantsieve.run.bench import Bench
from quantsieve.run.keys import array_key, content_key, file_key
from quantsieve.run.line import Line
from quantsieve.schemes._formats import QOPERATOR
from quantsieve.targets.audit import audit_layers
from quantsieve.targets.base import Profile, Profiling, Saturation, TargetFailure, Timing
from quantsieve.tasks import choose, output_variance
from quantsieve.tasks import get as get_task

VERSION = 5
KILLED = "SIGKILL"  # nothing in a model sends it: somebody outside did
EVALUATION_BYTES = 4 << 20  # of inputs of one batch on the target, which runs as many at a time as it has threads
SEARCH_SAMPLES = 256  # most that a candidate is measured on: a squared error needs no more to tell plans apart
TIMED_SAMPLES = 4  # whose runs are timed, by turns
PRECISION = 0.02  # of a median latency, at which timing ends
EVALUATION_BATCH = 32  # most samples of it; with 128 small models' activations leave the processor's caches

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Built:
    """A plan's file. simulated: relative squared error of each scan sample, empty for the float model."""

    path: str  # in the run folder
    size_bytes: int
    file_key: str
    simulated: np.ndarray


@dataclass(frozen=True, slots=True)
class Ran:
    """Precision by layer, read back from the optimized graph; a reason when it could not be read."""

    precision: Mapping[str, str]
    reason: str | None


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of interleaved rounds by plan id."""

    ms: Mapping[str, tuple[float, ...]]
    reason: str | None


class Trials:
    """Builds and measures the candidates of one line on its target.

    indices: samples that plans are simulated and measured on, and no others; None for the scan's and the splits.
    task: None for that of the settings, or the one that fits.
    """

    def __init__(self, line: Line, indices: np.ndarray | None = None, task: str | None = None):
        self.line = line
        self._indices = indices
        self._task = task
        self.store = line.store
        self.target = line.target
        self._reference: tuple[str, Reference] | None = None  # of the split in work; a large model's can be large
        self._bench: Bench | None = None

    # --- what all candidates share ----------------------------------------------------------------------------

    @cached_property
    def environment(self) -> dict[str, str]:
        return _twice(self.target.environment)

    @cached_property
    def saturation(self) -> Saturation | None:
        """What integer kernels do here; None when the probe itself failed."""
        try:
            return _twice(self.target.probe_saturation)
        except TargetFailure as failure:
            self.line.notes.append(f"the saturation probe failed: {failure.reason}")
            return None

    @cached_property
    def weight_type(self) -> str:
        """s8, or u8 where signed weights saturate and unsigned ones do not."""
        if self.line.settings.formats.weight_type != "auto":
            return self.line.settings.formats.weight_type
        found = self.saturation
        is_unsigned = found is not None and found.saturates and not found.u8_saturates
        return "u8" if is_unsigned and self.line.settings.formats.takes_unsigned else "s8"

    def drift_reason(self) -> str:
        """Why a file may do something else than its simulation here."""
        found = self.saturation
        if self.weight_type == "s8" and found is not None and found.saturates:
            kind = "u8" if self.line.settings.formats.takes_unsigned else "s7"
            todo = "" if found.u8_saturates else f": use --weight-type {kind}"
            return f"signed weights saturate in this processor's integer kernels{todo}"
        return "integer kernels here compute something else than the fake-quantized simulation"

    @cached_property
    def task(self) -> str:
        line = self.line
        if self._task is not None:
            return self._task
        if line.settings.metric is not None:
            return line.settings.metric
        exam = self._exam("search", line.split.search[:2], "agreement")
        outputs = self._outputs(exam)
        return choose(outputs, line.samples.labels).name

    def _exam(self, split: str, indices: np.ndarray, task: str) -> Exam:
        batch = 1
        if self.line.is_batched:
            sample = self.line.samples.feed(int(indices[0]))
            batch = int(
                np.clip(EVALUATION_BYTES // max(1, sum(a.nbytes for a in sample.values())), 1, EVALUATION_BATCH)
            )
        return Exam(split, self.line.samples, indices, task, batch)

    @cached_property
    def exams(self) -> Mapping[str, Exam]:
        if self._indices is not None:
            return {"search": self._exam("search", self._indices, self.task)}
        split = self.line.split
        count = max(SEARCH_SAMPLES, len(self.line.scan_indices))  # simulation and measurement share the scan samples
        return {
            "search": self._exam("search", split.search[:count], self.task),
            "final": self._exam("final", split.final, self.task),
        }

    def _outputs(self, exam: Exam) -> evaluation.Outputs:
        """The float model's outputs. Raises UnsupportedModel when the target cannot run the float model itself."""
        try:
            return _twice(lambda: evaluation.run_outputs(self.target, self.line.path, exam))
        except TargetFailure as failure:
            raise UnsupportedModel(
                f"a float model that {self.target.name} can run",
                f"a failure before any quantization: {failure.reason}",
                "Mend the model or choose another target.",
            ) from failure

    def reference(self, split: str) -> Reference:
        """The float model's outputs on the split, stored."""
        exam = self.exams[split]

        def compute() -> Reference:
            outputs = self._outputs(exam)
            self._check(outputs, exam)
            return Reference(outputs, output_variance(outputs))

        key = content_key("reference", VERSION, self._circumstances(exam), [self.line.model_key])
        if self._reference is None or self._reference[0] != key:
            self._reference = (key, self.line.fact("reference", key, Reference, compute))
        return self._reference[1]

    def _check(self, outputs: evaluation.Outputs, exam: Exam) -> None:
        """Raises InputError for outputs or labels that do not fit. The final samples' labels are looked at with the
        search samples': a wrong one would else be found at the very end."""
        task, labels = get_task(exam.task), exam.labels
        task.check(outputs, labels)
        if labels is not None and exam.split == "search" and self._indices is None:
            rest = self.line.samples.labels[self.line.split.final]  # type: ignore[index]
            rows = np.arange(len(rest)) % len(labels)  # only the classes of these outputs matter here
            task.check({name: array[rows] for name, array in outputs.items()}, rest)

    def _circumstances(self, exam: Exam) -> dict[str, object]:
        task = get_task(exam.task)
        samples = [self.line.samples.fingerprint(), array_key(exam.indices)]
        return {"samples": samples, "task": [task.name, task.version], "environment": self.environment}

    @property
    def scan_indices(self) -> np.ndarray:
        return self.line.scan_indices if self._indices is None else self._indices

    # --- one candidate ----------------------------------------------------------------------------------------

    def build(self, plan: Plan) -> Built:
        """The plan as a file in the run folder, and its simulation on the scan samples."""
        line = self.line if plan.quantized() and EQUALIZED in plan.repairs else self.line.plain
        formats: dict[str, object] = {"weights": None}
        if plan.quantized():
            formats = {"weights": self.weight_type, **line.settings.formats.changed()}
        settings = {"plan": dict(plan.schemes), "repairs": list(plan.repairs), **formats}
        versions = {"quantize": writing.VERSION, "repair": repair.VERSION}
        inputs = [line.base_key]
        if plan.quantized():
            inputs += [line.calibration_key, line.sample_key(self.scan_indices)]
        key = content_key("build", VERSION, {**settings, **versions}, inputs)
        path = line.store.plan_folder(plan.id) / "model.onnx"
        found = line.store.load("build", key, Built)
        if found is not None and path.is_file() and file_key(path) == found.file_key:
            return found
        parts, simulated = line.float_parts, np.zeros(0)
        if plan.quantized():
            bench = self.bench(line)
            parts = bench.parts(plan)
            simulated = bench.simulate(plan, parts)
        model = writing.write_plan(parts, plan)
        if line.settings.formats.file_format == QOPERATOR:
            floats = [x for x in line.structure.layers if not plan.is_quantized(x.name)]
            model = as_operators(model, {name for layer in floats for name in layer.nodes})
        content = model.SerializeToString()
        if line.selected.kept:
            written = onnx.ModelProto.FromString(content)
            check_written(written.graph, line.graph, line.structure, plan, line.selected.kept)
        line.store.save_file(path, content)
        document = {"schema": 1, "id": plan.id, "layers": dict(plan.schemes), "repairs": list(plan.repairs)}
        line.store.save_file(path.with_name("plan.json"), json.dumps(document, indent=1).encode())
        built = Built(str(path.relative_to(line.store.root)), len(content), file_key(path), simulated)
        line.store.save("build", key, built)
        return built

    def bench(self, line: Line) -> Bench:
        """Where plans over the line, that of these trials or its plain one, are simulated; one is kept at a time."""
        if self._bench is None or self._bench.line is not line:
            self._bench = Bench(line, self.scan_indices, self.weight_type, lambda: self.reference("search").variance)
        return self._bench

    def measure_file(self, path: Path, split: str) -> Outcome:
        """A file that is no plan of this run, compared with float on one split; not stored."""
        return evaluation.evaluate(self.target, path, self.exams[split], self.reference(split))

    def measure(self, built: Built, split: str) -> Outcome:
        """The file on the target over one split, compared with float."""
        exam = self.exams[split]
        key = content_key("evaluate", evaluation.VERSION, self._circumstances(exam), [built.file_key])

        def compute() -> Outcome:
            path, reference = self.store.root / built.path, self.reference(split)
            found = evaluation.evaluate(self.target, path, exam, reference)
            if isinstance(found, Failed) and found.reason == KILLED:
                found = evaluation.evaluate(self.target, path, exam, reference)
            return found

        return self.line.fact("evaluate", key, Measured | Failed, compute, _is_lasting)  # type: ignore[arg-type]

    def read_back(self, built: Built) -> Ran:
        """What precision each layer really ran in, with the options of measuring."""
        key = content_key("audit", VERSION, {"environment": self.environment}, [built.file_key])
        layers = {layer.name: _telling(layer) for layer in self.line.structure.quantizable}

        def compute() -> Ran:
            try:
                audit = self.target.audit(self.store.root / built.path)
            except TargetFailure as failure:
                return Ran({}, failure.reason)
            there = dict(audit.ran)  # an integer operator stands for a Relu as well
            found = audit_layers(audit, {layer: [x for x in nodes if x in there] for layer, nodes in layers.items()})
            return Ran({layer: str(precision) for layer, precision in found.items()}, None)

        return self.line.fact("audit", key, Ran, compute, lambda ran: ran.reason is None)

    def profile(self, built: Built, runs: int) -> Profile:
        """Where the time of the file goes, batch 1. Raises TargetFailure where the target does not tell."""
        key = content_key("profile", VERSION, {"environment": self.environment, "runs": runs}, [built.file_key])
        samples = self.line.split.search[:TIMED_SAMPLES]

        def compute() -> Profile:
            feeds = [self.line.samples.feed(int(i)) for i in samples]
            if not isinstance(self.target, Profiling):
                raise TargetFailure(f"{self.target.name} does not tell where the time goes", stage="latency")
            return self.target.profile(self.store.root / built.path, feeds, runs)

        return self.line.fact("profile", key, Profile, compute)

    def time(self, built: Mapping[str, Built], seconds: float) -> Times:
        """Latency of all candidates at once, batch 1, rounds interleaved; float is timed as the user's own file."""
        ids = sorted(built)
        keys = [built[id].file_key for id in ids]
        key = content_key("latency", VERSION, {"environment": self.environment, "seconds": seconds}, keys)
        samples = self.line.split.search[:TIMED_SAMPLES]

        def compute() -> Times:
            paths = [self.store.root / built[id].path for id in ids]
            feeds = [self.line.samples.feed(int(i)) for i in samples]
            timing = Timing(
                rounds=60,
                min_rounds=10,
                warmup_s=min(2.0, seconds / 8),
                max_seconds=seconds,
                precision=PRECISION,
            )
            try:
                rounds = self.target.latency(paths, feeds, timing)
            except TargetFailure as failure:
                return Times({}, failure.reason)
            return Times(dict(zip(ids, rounds, strict=True)), None)

        return self.line.fact("latency", key, Times, compute, lambda times: times.reason is None)


def same_samples(built: Built, outcome: Outcome | None) -> tuple[float | None, float | None]:
    """(simulated, measured) mean squared error on the samples that both have."""
    if not isinstance(outcome, Measured) or not len(built.simulated):
        return None, None
    return float(built.simulated.mean()), float(outcome.errors[: len(built.simulated)].mean())


def _telling(layer: Layer) -> tuple[str, ...]:
    """The nodes that tell a layer's precision. The bias Add of a MatMul and what follows it may run in float behind an
    integer kernel, which does not slow it down; an activation that a convolution did not fuse does."""
    return layer.nodes[:1] if layer.op_type == "MatMul" else layer.nodes


def _twice(work: Callable[[], Answer]) -> Answer:
    """The answer of a target whose worker may be killed from outside, once. Raises TargetFailure."""
    try:
        return work()
    except TargetFailure as failure:
        if failure.reason != KILLED:
            raise
        return work()


def _is_lasting(outcome: Outcome) -> bool:
    """Whether a later process may use the outcome: a time limit, want of memory or a kill is no trait of the file."""
    return isinstance(outcome, Measured) or not (outcome.kind in ("timeout", "memory") or outcome.reason == KILLED)


class Deadline:
    """Time that is left. A clock is a parameter so that tests need not wait."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._start = clock()
        self._seconds = seconds

    def elapsed(self) -> float:
        return self._clock() - self._start

    def left(self) -> float:
        """Seconds, below 0 when the time is over; infinite without a limit."""
        return float("inf") if self._seconds is None else self._seconds - self.elapsed()

    def is_over(self, share: float = 1.0) -> bool:
        """Whether `share` of the time has gone."""
        return self._seconds is not None and self.elapsed() >= self._seconds * share
