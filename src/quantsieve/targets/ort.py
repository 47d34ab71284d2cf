"""onnxruntime on the processor, with the options that a user's deployment would have.

Only threads, level and the session options that were asked for differ from the defaults; in particular no
optimizer is disabled, so a file that onnxruntime spoils at load is seen spoilt. One inter-op thread,
sequential execution.
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, TypeVar

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from onnxruntime.capi import onnxruntime_pybind11_state as native

from quantsieve.errors import UsageError
from quantsieve.targets import saturation
from quantsieve.targets.audit import audit_graph
from quantsieve.targets.base import Audit, FailureKind, Feeds, Profile, Saturation, TargetFailure, Timing
from quantsieve.targets.profile import profile_graph
from quantsieve.targets.timing import interleave

Result = TypeVar("Result")

_LEVELS = {
    "off": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
# All exceptions that onnxruntime's binding declares (Fail, InvalidGraph...): they share no base of their own.
_NATIVE = tuple(kind for kind in vars(native).values() if isinstance(kind, type) and issubclass(kind, Exception))
_REFUSALS = (*_NATIVE, RuntimeError, ValueError, TypeError, OSError, MemoryError, DecodeError)
_SPINNING_STOP = "session.force_spinning_stop"
_WARMING = 3  # runs before a profile
_OUT_OF_MEMORY = ("failed to allocate memory", "bad_alloc", "bad allocation", "cannot allocate memory")
# The flags that choose between integer kernels; ARM's names are those of Linux.
_X86 = ("sse4_1", "avx", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
_ARM = ("asimd", "asimddp", "i8mm", "sve", "sve2", "bf16")
_FEATURES = frozenset(_X86 + _ARM)


@dataclass(frozen=True, slots=True)
class OrtCpu:
    """onnxruntime's CPU execution provider.

    threads: intra-op threads, at least 1. optimization: 'off', 'basic', 'extended' or 'all' (the default).
    session_options: (key, value) of `SessionOptions.add_session_config_entry`.
    Raises UsageError for other values.
    """

    threads: int = 1
    optimization: str = "all"
    session_options: tuple[tuple[str, str], ...] = ()
    name: ClassVar[str] = "ort-cpu"

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise UsageError("1 or more threads", str(self.threads), "Give the number of threads to measure with.")
        if self.optimization not in _LEVELS:
            raise UsageError(
                "an optimization level of onnxruntime",
                repr(self.optimization),
                f"Use one of these: {', '.join(_LEVELS)}.",
            )

    def environment(self) -> dict[str, str]:
        """Strings by name: runtime, version, processor and its features, platform, threads, options."""
        processor, features = processor_and_features()
        return {
            "target": self.name,
            "runtime": "onnxruntime",
            "version": onnxruntime.__version__,
            "processor": processor,
            "features": features,
            "platform": f"{platform.system()} {platform.machine()}",
            "threads": str(self.threads),
            "optimization": self.optimization,
            "session_options": json.dumps(dict(self.session_options), sort_keys=True),
        }

    def load(self, path: Path) -> OrtPredict:
        """A session on `path`. Raises TargetFailure with onnxruntime's own message.

        A run has one thread, and `each` as many runs as the target has threads: the outputs are the same, and a
        small model's layers are too short to be shared out (two threads took a third more processor time).
        """
        options = self._options()
        options.intra_op_num_threads = 1
        return OrtPredict(self._session(path, options), self.threads)

    def latency(self, paths: Sequence[Path], feeds: Sequence[Feeds], timing: Timing) -> tuple[tuple[float, ...], ...]:
        """Milliseconds of each path's runs, interleaved; see `Target.latency`.

        A model's threads spin within its runs, as they do by default, but not after them: the next model would share
        the processor with them.
        """
        models = [OrtPredict(self._session(path, self._options({_SPINNING_STOP: "1"}))) for path in paths]
        return interleave(models, feeds, timing)

    def audit(self, path: Path) -> Audit:
        """What ran at this level with these options; see `audit` for how nodes are found again."""
        original = _refuse("audit", lambda: onnx.load(path, load_external_data=False)).graph
        ran = self._optimized(path, self.optimization)
        plain = self._optimized(path, "extended") if self.optimization == "all" else None
        return audit_graph(original, ran, plain)

    def profile(self, path: Path, feeds: Sequence[Feeds], runs: int) -> Profile:
        """Where the time of one run goes; a few runs before the counted ones warm it up."""
        original = _refuse("audit", lambda: onnx.load(path, load_external_data=False)).graph
        with tempfile.TemporaryDirectory() as folder:
            options = self._options({_SPINNING_STOP: "1"})
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "profile")
            session = self._session(path, options)
            predict = OrtPredict(session)
            for number in range(_WARMING + runs):
                predict(feeds[number % len(feeds)])
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        starts = sorted(event["ts"] for event in events if event.get("name") == "model_run")
        counted = [event for event in events if event["ts"] >= starts[_WARMING]]
        return profile_graph(original, self._optimized(path, self.optimization), counted, runs)

    def probe_saturation(self) -> Saturation:
        """Returned over exact sums with these options on this machine."""
        return saturation.probe(self.load)

    def close(self) -> None:
        """Nothing to release: sessions live as long as what `load` returned."""

    def _options(self, defaults: Mapping[str, str] = MappingProxyType({})) -> onnxruntime.SessionOptions:
        """defaults: session options where the user has given none of these names."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = _LEVELS[self.optimization]
        options.log_severity_level = 3  # errors; warnings about unused initializers would drown them
        for key, value in {**defaults, **dict(self.session_options)}.items():
            options.add_session_config_entry(key, value)
        return options

    def _session(
        self, path: Path, options: onnxruntime.SessionOptions, stage: str = "load"
    ) -> onnxruntime.InferenceSession:
        return _refuse(
            stage,
            lambda: onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]),
        )

    def _optimized(self, path: Path, level: str) -> onnx.GraphProto:
        options = self._options()
        options.graph_optimization_level = _LEVELS[level]
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "optimized.onnx"
            options.optimized_model_filepath = str(saved)
            # Weights beside the file: a protobuf cannot hold 2 GB, and we never read them.
            options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
            options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
            self._session(path, options, "audit")
            return onnx.load(saved, load_external_data=False).graph


class OrtPredict:
    """A session as a function of its feeds; holds the session until it is dropped.

    runs: how many at a time `each` makes.
    """

    __slots__ = ("_names", "_runs", "_session")

    def __init__(self, session: onnxruntime.InferenceSession, runs: int = 1):
        self._session = session
        self._runs = runs
        self._names = [output.name for output in session.get_outputs()]

    def __call__(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """All outputs by name. Raises TargetFailure for feeds that do not fit and for kernels' errors."""
        values = _refuse("run", lambda: self._session.run(self._names, dict(feeds)))
        return dict(zip(self._names, values, strict=True))

    def each(self, feeds: Sequence[Feeds]) -> list[dict[str, np.ndarray]]:
        """All outputs of each input, in order."""
        with ThreadPoolExecutor(self._runs) as pool:
            return list(pool.map(self, feeds))


def _refuse(stage: str, call: Callable[[], Result]) -> Result:
    """What `call` returns; its refusal as a TargetFailure of `stage`."""
    try:
        return call()
    except _REFUSALS as refusal:
        reason = f"{type(refusal).__name__}: {refusal}"
        lost = isinstance(refusal, MemoryError) or any(text in reason.lower() for text in _OUT_OF_MEMORY)
        kind: FailureKind = "memory" if lost else "error"
        raise TargetFailure(reason, kind, stage) from refusal


@cache
def processor_and_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, str]:
    """The processor's name and, sorted and separated by blanks, its features that choose kernels.

    Where the file is absent, what the platform module knows, and no features.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    parts = (fields.get("cpu implementer"), fields.get("cpu part"))
    name = fields.get("model name") or " ".join(filter(None, parts)) or platform.processor() or platform.machine()
    flags = (fields.get("flags") or fields.get("features") or "").split()
    return name, " ".join(sorted(_FEATURES.intersection(flags)))


TARGET = OrtCpu()
