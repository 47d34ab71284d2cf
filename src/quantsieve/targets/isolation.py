"""A target in a process of its own: whatever a model does to the runtime, the caller gets a `TargetFailure`.

One warm worker, started by the first request and again after it was lost; `_process` is its life. A request
has a time limit, the worker on demand a limit of address space.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantsieve.errors import UsageError
from quantsieve.targets._process import WorkerProcess
from quantsieve.targets.base import Audit, Feeds, Predict, Profile, Profiling, Saturation, Target, TargetFailure, Timing


class Isolated:
    """A target whose work is done in a worker process. Itself a `Target`; requests of several threads take
    turns.

    timeout_s: seconds that one request may take, its start-up not counted; then the worker's whole process
    group is killed. memory_bytes: limit of the worker's address space (onnxruntime alone needs about 0.5 GB),
    None for none. Raises UsageError for limits that are not positive. Use it as a context manager, or call
    `close`.
    """

    def __init__(self, target: Target, timeout_s: float = 300.0, memory_bytes: int | None = None):
        if timeout_s <= 0 or (memory_bytes is not None and memory_bytes <= 0):
            found = f"{timeout_s} s and {memory_bytes} bytes"
            raise UsageError("a time limit and a memory limit above 0", found, "Correct the limits.")
        self.target = target
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self._lock = threading.RLock()
        self._worker: WorkerProcess | None = None
        self._end: Callable[[], object] | None = None

    @property
    def name(self) -> str:
        """The name of the target inside."""
        return self.target.name

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.target, self.timeout_s, self.memory_bytes)

    def __repr__(self) -> str:
        return f"Isolated({self.target!r}, timeout_s={self.timeout_s}, memory_bytes={self.memory_bytes})"

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def environment(self) -> dict[str, str]:
        """What the target inside tells, asked in the worker."""
        environment: dict[str, str] = self._request("environment")
        return environment

    def load(self, path: Path) -> Predict:
        """A model in the worker; its session goes when the returned function is dropped."""
        with self._lock:
            session_id = self._request("load", Path(path).absolute())
            assert self._worker is not None
            return _RemotePredict(self, self._worker, session_id)

    def latency(self, paths: Sequence[Path], feeds: Sequence[Feeds], timing: Timing) -> tuple[tuple[float, ...], ...]:
        """Milliseconds of each path's runs, interleaved in the worker; the time limit is for all of it."""
        absolute = [Path(path).absolute() for path in paths]
        times: tuple[tuple[float, ...], ...] = self._request(
            "latency", absolute, [dict(feed) for feed in feeds], timing
        )
        return times

    def audit(self, path: Path) -> Audit:
        """What the target inside tells about the file."""
        audit: Audit = self._request("audit", Path(path).absolute())
        return audit

    def profile(self, path: Path, feeds: Sequence[Feeds], runs: int) -> Profile:
        """What the target inside tells; TargetFailure where it tells no such thing."""
        if not isinstance(self.target, Profiling):
            raise TargetFailure(f"{self.target.name} does not tell where the time goes", stage="latency")
        profile: Profile = self._request("profile", Path(path).absolute(), [dict(feed) for feed in feeds], runs)
        return profile

    def probe_saturation(self) -> Saturation:
        """What the target inside finds, in the worker."""
        saturation: Saturation = self._request("probe_saturation")
        return saturation

    def close(self) -> None:
        """End the worker and all it started, after the request under way; a later request starts another."""
        with self._lock:
            if self._end is not None:
                self._end()
            self._worker = self._end = None

    def _request(self, method: str, *arguments: object) -> Any:
        with self._lock:
            if self._worker is None or not self._worker.is_usable():
                self.close()
                self._worker = WorkerProcess.started(self.target, self.memory_bytes)
                self._end = weakref.finalize(self, self._worker.kill)
            return self._worker.request(method, arguments, self.timeout_s)

    def _run(self, worker: WorkerProcess, session_id: int, feeds: Sequence[Feeds]) -> list[dict[str, np.ndarray]]:
        with self._lock:
            outputs: list[dict[str, np.ndarray]] = worker.request("run", (session_id, feeds), self.timeout_s)
            return outputs


class _RemotePredict:
    """A model that a worker holds. After the worker's end every call raises the failure that ended it."""

    def __init__(self, isolated: Isolated, worker: WorkerProcess, session_id: int):
        self._isolated = isolated
        self._worker = worker
        self._session_id = session_id
        # Only noted here: a finalizer may run at any moment, also within a request.
        weakref.finalize(self, worker.released.append, session_id).atexit = False

    def __call__(self, feeds: Feeds) -> dict[str, np.ndarray]:
        return self.each([feeds])[0]

    def each(self, feeds: Sequence[Feeds]) -> list[dict[str, np.ndarray]]:
        """One request, with one time limit, for all."""
        return self._isolated._run(self._worker, self._session_id, [dict(one) for one in feeds])
