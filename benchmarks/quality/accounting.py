"""Processor seconds of this process and of everything it started, orphans included."""

import ctypes
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_REAP_LIMIT_S = 10.0


def cpu_seconds() -> float:
    """User and system seconds so far, of this process and of the children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def live_seconds() -> float:
    """As `cpu_seconds`, with the children that still run (Linux)."""
    ticks = os.sysconf("SC_CLK_TCK")
    running = sum((_ticks_of_child(entry) for entry in Path("/proc").glob("[0-9]*")), 0)
    return cpu_seconds() + running / ticks


def _ticks_of_child(process: Path) -> int:
    try:
        fields = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return 0
    parent, user, system = int(fields[1]), int(fields[11]), int(fields[12])
    return user + system if parent == os.getpid() else 0


class StageClock:
    """Processor seconds by stage; each call says which stage has begun, or goes on."""

    def __init__(self, first: str):
        self._stage = first
        self._since = live_seconds()
        self.seconds: dict[str, float] = {}

    def enter(self, stage: str) -> None:
        if stage != self._stage:
            self.close()
            self._stage = stage

    def close(self) -> None:
        """Adds what was used since the last call to the stage that was running."""
        now = live_seconds()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._since = now


def run_counted(command: Sequence[str]) -> float:
    """Runs a command to its end and returns the processor seconds of its whole tree of processes.

    Workers that outlive the command come to us, as the kernel lets us adopt them (Linux), and are waited for.
    Raises CalledProcessError when the command fails.
    """
    _adopt_orphans()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True)
    _wait_for_orphans()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wait_for_orphans() -> None:
    deadline = time.monotonic() + _REAP_LIMIT_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(0.05)
