"""One process at a time works in a folder; the kernel, not the process, lets the next one in."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quantsieve.errors import RunFolderError
from quantsieve.run.lock import FolderLock

HOLD = """
import os, sys, time
from pathlib import Path
from quantsieve.run.lock import FolderLock
lock = FolderLock.take(Path(sys.argv[1]))
if sys.argv[2] == "alone" or os.fork() == 0:  # the child speaks: only then has it let go
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def holder(folder: Path, mode: str = "alone") -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_the_second_process_is_told_the_pid_of_the_first(tmp_path):
    process, _ = holder(tmp_path)
    try:
        with pytest.raises(RunFolderError, match=rf"process {process.pid} at work"):
            FolderLock.take(tmp_path)
    finally:
        process.kill()
        process.communicate()


def test_a_killed_holder_lets_the_next_one_in(tmp_path):
    process, _ = holder(tmp_path)
    process.kill()
    process.communicate()
    FolderLock.take(tmp_path).release()


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    process, child = holder(tmp_path, "fork")
    process.kill()
    process.wait()
    try:
        os.kill(int(child), 0)  # the child is alive
        FolderLock.take(tmp_path).release()
    finally:
        os.kill(int(child), signal.SIGKILL)
        process.communicate()


def test_a_child_that_ends_does_not_unlock_its_parents_folder(tmp_path):
    lock = FolderLock.take(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            lock.release()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(RunFolderError):
        FolderLock.take(tmp_path)
    lock.release()


def test_one_process_cannot_take_a_folder_twice_but_again_after_release(tmp_path):
    lock = FolderLock.take(tmp_path)
    with pytest.raises(RunFolderError, match=rf"process {os.getpid()} at work"):
        FolderLock.take(tmp_path)
    lock.release()
    lock.release()
    FolderLock.take(tmp_path).release()


def test_only_one_of_many_processes_gets_the_lock(tmp_path):
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from quantsieve.errors import RunFolderError\nfrom quantsieve.run.lock import FolderLock\n"
        "sys.stdin.readline()\n"
        "try:\n    lock = FolderLock.take(Path(sys.argv[1]))\n    print('in', flush=True)\n"
        "except RunFolderError:\n    print('out', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.stdout.readline().strip() for process in processes]
    for process in processes:
        process.communicate("end\n")
    assert sorted(answers) == ["in", "out", "out", "out"]
