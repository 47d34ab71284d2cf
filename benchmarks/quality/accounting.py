"""Processor seconds of this process and of everything it started, orphans included."""

import ctypes
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36
_REAP_LIMIT_S = 10.0


def cpu_seconds() -> float:
    """User and system seconds so far, of this process and of the children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


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
