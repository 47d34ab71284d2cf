"""What every runner shares: the samples in, processor seconds of the process and its children, the records out.

Runs in the environment of a peer: it needs numpy, onnx and onnxruntime, and nothing of Quantsieve. A runner is called
as `python RUNNER.py MODEL SAMPLES.npz OUT.json LIMIT_S`; the archive has `calibration/INPUT` and `samples/INPUT`,
float32 [samples, ...]. Every onnxruntime session of a runner gets one thread, whatever the peer asks for: threads that
wait spin, and would be charged to it.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime

BATCH = 8
_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)

Feed = dict[str, np.ndarray]


class Enough(Exception):
    """The time limit is over, or all that is measured is done: leaves the peer's own loop."""


@dataclass(frozen=True)
class Job:
    model: Path
    calibration: Feed  # by input, [samples, ...]
    samples: Feed
    limit_s: float

    @property
    def num_samples(self) -> int:
        return len(next(iter(self.samples.values())))


@dataclass
class Record:
    """setup_cpu_s: before the first probe: reading, calibrating, the peer's own graph. probes: of a whole scan; timed:
    of them, those that ran, in probe_cpu_s together. scores: by node (of Quantsieve: by layer), higher is worse.
    nodes: by layer, nodes of the file, where scores are by layer."""

    versions: dict[str, str]
    fpe_s: float = 0.0
    setup_cpu_s: float = 0.0
    probe_cpu_s: float = 0.0
    wall_s: float = 0.0
    probes: int = 0
    timed: int = 0
    peak_mb: float = 0.0
    samples: float = 0  # that a probe ran, in the mean
    unit: str = "KL"
    scores: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, list[str]] = field(default_factory=dict)


class Clock:
    """Processor seconds since it was made, of the process and its ended children."""

    def __init__(self) -> None:
        self._start = _cpu_s()

    def read(self) -> float:
        return _cpu_s() - self._start


def run(packages: tuple[str, ...], works: Mapping[str, Callable[[Job, Record], None]]) -> None:
    """Reads the arguments, lets each of `works` fill a record and writes all of them, by name.

    Float passes before and after each are its unit: a busy machine slows both. The peak of a record is that of the
    process so far.
    """
    model, samples, out, limit = sys.argv[1:]
    with np.load(samples) as archive:
        parts = {name: archive[name] for name in archive.files}
    job = Job(Path(model), _part(parts, "calibration"), _part(parts, "samples"), float(limit))
    _one_thread()
    records = {}
    for name, work in works.items():
        record = Record({package: version(package) for package in (*packages, "onnxruntime", "onnx")})
        record.samples = job.num_samples
        passes = _float_passes(job)
        start = time.perf_counter()
        work(job, record)
        record.wall_s = time.perf_counter() - start
        record.peak_mb = _peak_mb()
        record.fpe_s = float(np.median(passes + _float_passes(job)))
        records[name] = asdict(record)
        Path(out).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def feeds(part: Feed, batch: int = BATCH) -> list[Feed]:
    """Batches of consecutive samples."""
    count = len(next(iter(part.values())))
    return [{name: array[i : i + batch] for name, array in part.items()} for i in range(0, count, batch)]


def kl(reference: np.ndarray, perturbed: np.ndarray) -> np.ndarray:
    """KL divergence of the softmax of logits [n, classes] from the float ones, float64 [n], in nats."""
    before, after = _log_softmax(reference), _log_softmax(perturbed)
    return (np.exp(before) * (before - after)).sum(axis=1)


def float_outputs(job: Job) -> np.ndarray:
    """The first output of the float model for all samples, [samples, classes]."""
    session = _session(job.model)
    return np.concatenate([session.run(None, feed)[0] for feed in feeds(job.samples)])


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores.astype(np.float64) - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in _WHO]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _peak_mb() -> float:
    """Of this process alone: getrusage would count what its parent held when it forked."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def _part(parts: Mapping[str, np.ndarray], name: str) -> Feed:
    return {key.split("/", 1)[1]: array for key, array in parts.items() if key.startswith(name + "/")}


def _session(model: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])


def _float_passes(job: Job) -> list[float]:
    session = _session(job.model)
    taken = []
    for _ in range(4):
        clock = Clock()
        for feed in feeds(job.samples):
            session.run(None, feed)
        taken.append(clock.read())
    return taken[1:]  # the first fills caches and arenas


def _one_thread() -> None:
    plain = onnxruntime.InferenceSession.__init__

    def patched(self, path_or_bytes, sess_options=None, *rest, **named):
        options = sess_options or onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        plain(self, path_or_bytes, options, *rest, **named)

    onnxruntime.InferenceSession.__init__ = patched
