"""The child process of `isolation`: holds one target, answers on a pipe of its own, never outlives its
parent.

Started as `python -m quantsieve.targets._worker PIPE SHARED PARENT` with two descriptors. A request is (released
session ids, method, arguments), an answer is (True, value) or (False, failure). stdout and stderr belong to the
libraries; nothing of ours is sent there.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from quantsieve.targets._shared import PICKLE_PROTOCOL, SharedArrays
from quantsieve.targets.base import FailureKind, Feeds, Predict, Target, TargetFailure, predict_each

_PR_SET_PDEATHSIG = 1
_MEMORY_WORDS = ("cannot allocate memory", "bad_alloc", "failed to map segment")


class _Sessions:
    """The target and its loaded models by id; the methods are the requests."""

    def __init__(self, target: Target):
        self._target = target
        self._loaded: dict[int, Predict] = {}
        self._next_id = 0

    def release(self, session_ids: tuple[int, ...]) -> None:
        for session_id in session_ids:
            self._loaded.pop(session_id, None)

    def load(self, path: Path) -> int:
        self._next_id += 1
        self._loaded[self._next_id] = self._target.load(path)
        return self._next_id

    def run(self, session_id: int, feeds: Sequence[Feeds]) -> list[dict[str, Any]]:
        return predict_each(self._loaded[session_id], feeds)

    def answer(self, method: str, arguments: tuple[Any, ...]) -> object:
        own: dict[str, Callable[..., object]] = {"load": self.load, "run": self.run}
        return (own.get(method) or getattr(self._target, method))(*arguments)


def main(descriptor: int, shared_descriptor: int, parent: int) -> None:
    """Serve until the pipe ends. The first message is (pickled target, bytes of address space or None)."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (descriptor, shared_descriptor):
        os.set_inheritable(number, False)
    pipe, shared = Connection(descriptor), SharedArrays(shared_descriptor)
    try:
        sessions = _start(pipe, shared)
        while sessions is not None:
            released, method, arguments = _request(pipe, shared)
            sessions.release(released)
            _send(pipe, _answer(sessions, method, arguments), method)
            del arguments
    except (EOFError, ConnectionError):
        return  # the parent closed its end, or is gone


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The signal is not sent for a parent that died before it was asked for.
    if os.getppid() != parent:
        sys.exit(1)


def _request(pipe: Connection, shared: SharedArrays) -> Any:
    return shared.loads(pipe.recv_bytes())


def _start(pipe: Connection, shared: SharedArrays) -> _Sessions | None:
    pickled, memory_bytes = _request(pipe, shared)
    try:
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        sessions = _Sessions(pickle.loads(pickled))
    except Exception as error:
        failure = _failure(error, "start")
        if memory_bytes is not None and _peak_bytes() > memory_bytes / 2:
            # Python itself fails in odd ways then: a ValueError from its own compiler was seen.
            failure = TargetFailure(failure.reason, "memory", "start")
        _send(pipe, (False, failure), "start")
        return None
    _send(pipe, (True, None), "start")
    return sessions


def _peak_bytes() -> int:
    """The largest address space that this process has had; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmPeak:")), 0)


def _answer(sessions: _Sessions, method: str, arguments: tuple[Any, ...]) -> tuple[bool, object]:
    try:
        return True, sessions.answer(method, arguments)
    except Exception as error:
        return False, _failure(error, method)


def _failure(error: Exception, stage: str) -> TargetFailure:
    if isinstance(error, TargetFailure):
        return error
    reason = f"{type(error).__name__}: {error}"
    lost = isinstance(error, MemoryError) or any(words in reason.lower() for words in _MEMORY_WORDS)
    kind: FailureKind = "memory" if lost else "error"
    return TargetFailure(reason, kind, stage)


def _send(pipe: Connection, answer: tuple[bool, object], stage: str) -> None:
    try:
        message = pickle.dumps(answer, PICKLE_PROTOCOL)
    except Exception as error:
        message = pickle.dumps((False, _failure(error, stage)), PICKLE_PROTOCOL)
    pipe.send_bytes(message)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
