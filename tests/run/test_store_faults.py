"""What kills the writer or fills the disk costs the fact under way, never one that was finished."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from quantsieve.errors import RunFolderError
from quantsieve.run.store import Store

SPEC = {"samples": 1}


@dataclass(frozen=True, slots=True)
class Prices:
    name: str
    values: np.ndarray


def prices() -> Prices:
    return Prices("conv", np.array([1.0, 2.0]))


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob(".quantsieve-*"))


WRITER = """
import itertools, sys
from dataclasses import dataclass
from pathlib import Path
import numpy as np
from quantsieve.run.store import Store

@dataclass(frozen=True, slots=True)
class Prices:
    name: str
    values: np.ndarray

def fact(i):
    return Prices(f"source {i}", np.full(200_000, i))

def main(root, first):
    with Store.open(Path(root), {"samples": 1}) as store:
        print("open", flush=True)
        for i in itertools.count(int(first)):
            store.save("scan", f"key{i}", fact(i))
            store.note("saved", f"fact {i}")

main(*sys.argv[1:])
"""


def test_a_writer_killed_at_any_moment_leaves_whole_facts_only(tmp_path):
    moments = random.Random(20)
    root, first, found = tmp_path / "run", 0, 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root), str(first)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(moments.uniform(0.0, 0.06))
        process.kill()
        process.communicate()
        with Store.open(root, {"samples": 1}) as store:
            assert temporaries(root) == []
            stored = sorted(int(path.stem[3:]) for path in root.glob("facts/scan/*.json"))
            # Saved one after the other: what is there has no gap, and each is complete.
            assert stored == list(range(len(stored)))
            for i in stored[found:]:
                fact = store.load("scan", f"key{i}", Prices)
                assert fact is not None and (fact.values == i).all() and fact.name == f"source {i}"
        first = found = len(stored)
    assert found > 0


def is_killed_at(line: int, root: Path, key: str) -> bool:
    """Saves a fact in a forked process that kills itself before the given line of the store's own code."""
    child = os.fork()
    if child != 0:
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or status == 0
        return os.WIFSIGNALED(status)
    left = line

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal left
        if Path(frame.f_code.co_filename).name not in ("store.py", "_atomic.py"):
            return None
        left -= event == "line"
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    try:
        store = Store.open(root, SPEC)
        sys.settrace(trace)
        store.save("scan", key, prices())
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("again", [False, True], ids=["first time", "in place of the same"])
def test_a_save_killed_before_any_of_its_lines_leaves_a_whole_fact_or_none(tmp_path, again):
    with Store.open(tmp_path, SPEC) as store:
        if again:
            store.save("scan", "key", prices())
    line, missed = 1, 0
    while is_killed_at(line, tmp_path, key := "key" if again else f"key{line}"):
        with Store.open(tmp_path, SPEC) as store:
            assert temporaries(tmp_path) == []
            assert (store.load("scan", key, Prices) is not None) == store.has("scan", key)
            missed += not store.has("scan", key)
        line += 1
    assert line > 40
    assert missed == 0 if again else 0 < missed < line - 1


def test_leftovers_of_a_killed_process_are_removed_and_other_files_are_not(tmp_path):
    Store.open(tmp_path, SPEC).close()
    ours = [".quantsieve-0123456789abcdef.tmp", "facts/scan/.quantsieve-fedcba9876543210.tmp"]
    others = ["notes.tmp", ".quantsieve-notes.tmp", "mine/.quantsieve-0123456789abcdef.tmp", "plans/p/a.tmp"]
    for name in ours + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    Store.read(tmp_path)
    assert all((tmp_path / name).exists() for name in ours)
    Store.open(tmp_path, SPEC).close()
    assert not any((tmp_path / name).exists() for name in ours)
    assert all((tmp_path / name).exists() for name in others)


FILL = """
import resource, sys
from dataclasses import dataclass
from pathlib import Path
import numpy as np
from quantsieve.errors import RunFolderError
from quantsieve.run.store import Store

@dataclass(frozen=True, slots=True)
class Prices:
    name: str
    values: np.ndarray

root = Path(sys.argv[1])
with Store.open(root, {}) as store:
    store.save("scan", "small", Prices("small", np.zeros(10)))
    store.save("scan", "replaced", Prices("old", np.zeros(10)))
    if sys.argv[2] == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    for key in ("big", "replaced"):
        try:
            store.save("scan", key, Prices("new", np.zeros(100_000)))
        except RunFolderError as error:
            print(error.__cause__.errno, error)
    print(*root.rglob(".quantsieve-*"))
    store.save("scan", "after", Prices("after", np.ones(10)))
with Store.open(root, {}) as store:
    for key in ("small", "big", "replaced", "after"):
        fact = store.load("scan", key, Prices)
        print(key, fact and fact.name)
"""


def check_full_disk(command: list[str], number: int) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *errors, leftovers, small, big, replaced, after = done.stdout.splitlines()
    assert len(errors) == 2
    for error in errors:
        assert error.startswith(f"{number} Expected room for the run folder's files, found ")
        assert error.endswith(
            "Free some space there (or raise the quota or file size limit), "
            "then repeat the command: what was finished is kept."
        )
    assert leftovers == ""
    assert [small, big, replaced, after] == ["small small", "big None", "replaced old", "after after"]


def test_a_file_size_limit_loses_only_the_fact_that_did_not_fit(tmp_path):
    check_full_disk([sys.executable, "-c", FILL, str(tmp_path), "limit"], errno.EFBIG)


def test_a_full_disk_loses_only_the_fact_that_did_not_fit(tmp_path):
    # A disk of 256 KB in a mount namespace of its own, which ends with the process.
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    mount = 'mount -t tmpfs -o size=256k tmpfs "$0" && exec "$@"'
    command = [*own, "sh", "-c", mount, str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine lets a test mount no small disk")
    check_full_disk([*command, sys.executable, "-c", FILL, str(tmp_path), "disk"], errno.ENOSPC)


def test_a_file_in_the_place_of_a_folder_is_told(tmp_path):
    (tmp_path / "run").write_text("a file")
    for root in (tmp_path / "run", tmp_path / "run" / "inner"):
        with pytest.raises(RunFolderError, match=r"in the place of a folder.*Choose another folder"):
            Store.open(root, SPEC)
        with pytest.raises(RunFolderError):
            Store.read(root)
    with Store.open(tmp_path / "good", SPEC) as store:
        store.save_file("facts/scan", b"a file")
        with pytest.raises(RunFolderError, match="in the place of a folder"):
            store.save("scan", "key", prices())


FORBIDDEN = """
import os, sys
from pathlib import Path
from quantsieve.errors import RunFolderError
from quantsieve.run.store import Store
root = Path(sys.argv[1])
os.chdir(root)  # while the way to it may still be walked
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for folder in (Path("."), Path("inner")):
    try:
        Store.open(folder, {})
    except RunFolderError as error:
        print(error)
"""


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    root.chmod(0o555)
    command = [sys.executable, "-c", FORBIDDEN, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("Permission denied" in line and "change the permissions" in line for line in lines)
    assert list(root.iterdir()) == []
