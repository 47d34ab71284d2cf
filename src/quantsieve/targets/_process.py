"""The life of a worker process as its parent sees it: start, question and answer, end and its reason.

The worker has its own session (Ctrl-C in the terminal does not reach it), dies with its parent by a kernel
signal, answers on a private pipe, and its stdout and stderr go to a file whose tail is told with a failure.
Not `multiprocessing`: its children import the caller's main module, which breaks scripts without a main
guard.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from quantsieve.targets._scratch import ScratchFolder
from quantsieve.targets._shared import PICKLE_PROTOCOL, SharedArrays
from quantsieve.targets.base import FailureKind, Target, TargetFailure

_START_LIMIT_S = 120.0  # a cold import of a runtime from a slow disk; a warm one takes 0.3 s
_EXIT_LIMIT_S = 10.0
_LOG_TAIL_BYTES = 4000
_LOG_LIMIT_BYTES = 1 << 20  # a log longer than this is cut before the next request


class WorkerProcess:
    """One process with its pipe, log and folder for temporary files, from start to end."""

    def __init__(self, memory_bytes: int | None):
        self.released: deque[int] = deque()
        self._owner = os.getpid()
        self._memory_bytes = memory_bytes
        self._ended: tuple[str, FailureKind] | None = None
        self._is_killed = False
        self._oom_kills = _oom_kills()
        self._folder = ScratchFolder()
        self._log = _append_only_log()
        self._log_start = 0
        self._shared = SharedArrays.create()
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = _popen([theirs.fileno(), self._shared.descriptor], self._folder.path, self._log)

    @classmethod
    def started(cls, target: Target, memory_bytes: int | None) -> WorkerProcess:
        """A worker that holds the target. Raises TargetFailure of stage 'start' when it does not come up."""
        pickled = pickle.dumps(target, PICKLE_PROTOCOL)
        worker = _SPAWNER.run(lambda: cls(memory_bytes))
        try:
            worker._exchange((pickled, memory_bytes), "start", _START_LIMIT_S)
        except BaseException:
            worker.kill()
            raise
        return worker

    def is_usable(self) -> bool:
        """False once it has ended, was killed, or belongs to the process that forked this one."""
        is_alive = self._ended is None and not self._is_killed and self._owner == os.getpid()
        return is_alive and self._is_running()

    def request(self, method: str, arguments: tuple[object, ...], timeout_s: float) -> Any:
        """The answer. Raises TargetFailure for a refusal, and for the worker's end, then and ever after."""
        if self._ended is not None or self._is_killed or self._owner != os.getpid():
            reason, kind = self._ended or ("closed", "error")
            raise TargetFailure(f"the worker that held this model has ended ({reason})", kind, method)
        released = tuple(self.released.popleft() for _ in range(len(self.released)))
        return self._exchange((released, method, arguments), method, timeout_s)

    def kill(self) -> None:
        """End the process group and remove its files; does nothing the second time or in a forked child."""
        if self._is_killed or self._owner != os.getpid():
            return
        self._is_killed = True
        self._kill_group()
        self._exit_code()
        self._pipe.close()
        self._shared.close()
        self._log.close()
        self._folder.remove()

    def _exchange(self, message: tuple[object, ...], stage: str, timeout_s: float) -> Any:
        content = self._shared.dumps(message)
        answer: bytes | None = None
        self._begin_log()
        deadline = _Deadline(timeout_s, self._kill_group)
        try:
            self._pipe.send_bytes(content)
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError):
            pass  # it ended; `_death` finds out why
        except BaseException:
            # Interrupted between question and answer: the pipe would be out of step.
            self.kill()
            raise
        finally:
            is_late = deadline.end()
        if answer is None or is_late:
            failure = self._death(stage, timeout_s, is_late)
            self._ended = failure.reason, failure.kind
            self.kill()
            raise failure
        is_done, value = pickle.loads(answer)
        if not is_done:
            value.log_tail = value.log_tail or self._log_tail()
            raise value
        return value

    def _death(self, stage: str, timeout_s: float, has_timed_out: bool) -> TargetFailure:
        code = self._exit_code()
        tail = self._log_tail()
        if has_timed_out:
            return TargetFailure(f"no answer within {timeout_s:g} s", "timeout", stage, tail)
        if code >= 0:
            reason = f"the worker ended with exit code {code}"
            return TargetFailure(reason, self._kind("error", tail), stage, tail)
        name = _signal_name(-code)
        if code == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            return TargetFailure(f"{name}: the system ran out of memory", "memory", stage, tail)
        return TargetFailure(name, self._kind("signal", tail), stage, tail)

    def _kind(self, otherwise: FailureKind, tail: str) -> FailureKind:
        # Under a limit of address space an allocation that C++ code does not expect to fail ends in abort().
        words = ("bad_alloc", "cannot allocate memory", "memoryerror", "failed to map segment")
        is_memory = self._memory_bytes is not None and any(word in tail.lower() for word in words)
        return "memory" if is_memory else otherwise

    def _kill_group(self) -> None:
        # Children of the runtime may outlive the leader of the group. Before the leader is reaped nobody else
        # can have its number, afterwards somebody might.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _exit_code(self) -> int:
        """The exit code of a worker that closed its pipe; one that does not end by itself is killed."""
        deadline = time.monotonic() + _EXIT_LIMIT_S
        while self._is_running() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._kill_group()
        try:
            return self._process.wait(_EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL  # stuck in the kernel; the signal takes effect when it comes back

    def _is_running(self) -> bool:
        # WNOWAIT leaves it unreaped, see `_kill_group`.
        try:
            exited = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False  # reaped already
        return exited is None

    def _begin_log(self) -> None:
        descriptor = self._log.fileno()
        if os.fstat(descriptor).st_size > _LOG_LIMIT_BYTES:
            os.ftruncate(descriptor, 0)
        self._log_start = os.fstat(descriptor).st_size

    def _log_tail(self) -> str:
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        start = max(self._log_start, size - _LOG_TAIL_BYTES)
        return os.pread(descriptor, size - start, start).decode(errors="replace").strip()


class _Deadline:
    """Calls `strike` once after some seconds, from a thread, unless `end` comes first.

    A thread rather than a poll of the pipe: a worker may stop in the middle of reading or writing a message.
    """

    def __init__(self, seconds: float, strike: Callable[[], None]):
        self._strike = strike
        self._lock = threading.Lock()
        self._is_over = False
        self._has_struck = False
        self._timer = threading.Timer(seconds, self._on_time)
        self._timer.daemon = True
        self._timer.start()

    def _on_time(self) -> None:
        with self._lock:
            if not self._is_over:
                self._has_struck = True
                self._strike()

    def end(self) -> bool:
        """True when it has struck; never strikes afterwards."""
        with self._lock:
            self._is_over = True
        self._timer.cancel()
        return self._has_struck


class _Spawner:
    """A thread that lives as long as this process and starts all workers.

    Linux sends the parent-death signal when the *thread* that started the child ends, so a worker that was
    started by a short-lived thread would die with it. Daemonic: it does not keep the interpreter alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[tuple[Future[WorkerProcess], Callable[[], WorkerProcess]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, start: Callable[[], WorkerProcess]) -> WorkerProcess:
        """What `start` returns or raises, called in the thread."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="quantsieve-spawner", daemon=True)
                self._thread.start()
        future: Future[WorkerProcess] = Future()
        self._jobs.put((future, start))
        return future.result()

    def _serve(self) -> None:
        while True:
            future, start = self._jobs.get()
            try:
                future.set_result(start())
            except OSError as error:
                future.set_exception(error)
            del future, start  # a worker must not live on in this frame

    def forget(self) -> None:
        """Start anew in a forked child, which has none of its parent's threads."""
        self.__init__()  # type: ignore[misc]


_SPAWNER = _Spawner()
os.register_at_fork(after_in_child=_SPAWNER.forget)


def _popen(descriptors: Sequence[int], folder: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    # -P keeps the working folder off the module path; the caller's own path is passed on, so that the worker
    # finds the very modules that the caller would.
    paths = [path or os.getcwd() for path in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder)}
    flags = ["-P", "-u", "-X", "faulthandler"]
    return subprocess.Popen(
        [sys.executable, *flags, "-m", "quantsieve.targets._worker", *map(str, descriptors), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        pass_fds=descriptors,
        start_new_session=True,
    )


def _append_only_log() -> IO[bytes]:
    log = tempfile.TemporaryFile(prefix="quantsieve-log-")  # noqa: SIM115 - closed by WorkerProcess.kill
    # Appending, so that cutting the file leaves no hole before what the worker writes next.
    fcntl.fcntl(log, fcntl.F_SETFL, fcntl.fcntl(log, fcntl.F_GETFL) | os.O_APPEND)
    return log


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it booted; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
