"""Whatever happens in the worker, the caller gets a TargetFailure, and no worker outlives its parent."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from fragile_targets import Fragile, Unloadable

from quantsieve.errors import UsageError
from quantsieve.targets.base import TargetFailure, Timing
from quantsieve.targets.isolation import Isolated
from quantsieve.targets.ort import OrtCpu

X = {"x": np.array([1, 2], np.float32)}
GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_models.scaled(tmp_path / "model.onnx")


def is_gone(pid: int, within_s: float = 5.0) -> bool:
    """True when the process ends (or is a zombie that nobody reaps) in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        # The leader of a process is a zombie a little before its other threads are gone.
        if state in "ZX" and len(list(Path(f"/proc/{pid}/task").iterdir())) == 1:
            return True
        time.sleep(0.01)
    return False


def test_a_model_in_the_worker_answers_what_it_answers_outside(model: Path) -> None:
    with Isolated(OrtCpu()) as isolated:
        outputs = isolated.load(model)(X)
    assert list(outputs) == ["y"]
    np.testing.assert_array_equal(outputs["y"], [2, 4])


def test_several_models_live_in_one_worker(tmp_path: Path, model: Path) -> None:
    with Isolated(Fragile()) as isolated:
        before = isolated.environment()["pid"]
        double, triple = isolated.load(model), isolated.load(tiny_models.scaled(tmp_path / "3.onnx", 3))
        np.testing.assert_array_equal(double(X)["y"], [2, 4])
        np.testing.assert_array_equal(triple(X)["y"], [3, 6])
        assert isolated.environment()["pid"] == before != str(os.getpid())


def test_strings_and_integers_come_back_with_their_types(tmp_path: Path) -> None:
    feeds = {"words": np.array(["naïve", ""], object), "x": np.array([1, 2], np.float32)}
    with Isolated(OrtCpu()) as isolated:
        outputs = isolated.load(tiny_models.strings(tmp_path / "s.onnx"))(feeds)
    assert outputs["same_words"].tolist() == ["naïve", ""]
    assert outputs["best"] == 1 and outputs["best"].dtype == np.int64


def test_a_dropped_model_leaves_the_worker(model: Path) -> None:
    with Isolated(OrtCpu()) as isolated:
        predict = isolated.load(model)
        worker = isolated._worker
        assert worker is not None
        del predict
        gc.collect()
        assert list(worker.released) == [1]
        isolated.environment()
        assert not worker.released
        with pytest.raises(TargetFailure, match="KeyError"):
            worker.request("run", (1, X), 10)


def test_a_refused_file_leaves_the_worker_as_it_is(tmp_path: Path, model: Path) -> None:
    with Isolated(OrtCpu()) as isolated:
        predict = isolated.load(model)
        with pytest.raises(TargetFailure) as caught:
            isolated.load(tiny_models.unknown_op(tmp_path / "unknown.onnx"))
        assert (caught.value.kind, caught.value.stage) == ("error", "load")
        assert "Frobnicate" in caught.value.reason
        np.testing.assert_array_equal(predict(X)["y"], [2, 4])


def test_an_error_while_running_leaves_the_model_usable(tmp_path: Path) -> None:
    with Isolated(OrtCpu()) as isolated:
        predict = isolated.load(tiny_models.gather(tmp_path / "gather.onnx"))
        with pytest.raises(TargetFailure, match="out of") as caught:
            predict({"index": np.array([7])})
        assert (caught.value.kind, caught.value.stage) == ("error", "run")
        assert predict({"index": np.array([2])})["y"] == 2


def test_an_endless_loop_ends_at_the_time_limit(tmp_path: Path) -> None:
    with Isolated(OrtCpu(), timeout_s=0.5) as isolated:
        predict = isolated.load(tiny_models.endless(tmp_path / "endless.onnx"))
        start = time.monotonic()
        with pytest.raises(TargetFailure, match=r"0\.5 s") as caught:
            predict(X)
        assert time.monotonic() - start < 5
    assert (caught.value.kind, caught.value.stage) == ("timeout", "run")


def test_a_worker_that_stops_reading_ends_at_the_time_limit() -> None:
    with Isolated(Fragile(), timeout_s=0.5) as isolated:
        os.kill(int(isolated.environment()["pid"]), signal.SIGSTOP)
        large = {"x": np.zeros(10_000_000, np.uint8)}  # far more than a pipe holds
        with pytest.raises(TargetFailure) as caught:
            isolated.latency([Path("none.onnx")], [large], Timing())
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize(("how", "name"), [("segfault", "SIGSEGV"), ("talk and crash", "SIGABRT")])
def test_a_crash_tells_the_signal(how: str, name: str, model: Path) -> None:
    with Isolated(Fragile(how)) as isolated, pytest.raises(TargetFailure) as caught:
        isolated.load(model)
    assert (caught.value.kind, caught.value.stage, caught.value.reason) == ("signal", "load", name)


def test_a_crash_tells_the_last_words_of_the_runtime(model: Path) -> None:
    with Isolated(Fragile("talk and crash")) as isolated, pytest.raises(TargetFailure) as caught:
        isolated.load(model)
    assert "last words" in caught.value.log_tail


def test_a_worker_killed_from_outside_tells_the_signal(tmp_path: Path) -> None:
    with Isolated(Fragile(), timeout_s=30) as isolated:
        predict = isolated.load(tiny_models.endless(tmp_path / "endless.onnx"))
        pid = int(isolated.environment()["pid"])
        killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(TargetFailure) as caught:
            predict(X)
        killer.join()
    assert (caught.value.kind, caught.value.reason) == ("signal", "SIGKILL")


def test_a_worker_that_exits_tells_its_exit_code(model: Path) -> None:
    with Isolated(Fragile("exit")) as isolated, pytest.raises(TargetFailure, match="exit code 3") as caught:
        isolated.load(model)
    assert caught.value.kind == "error"


def test_weights_cut_after_loading_are_a_failure_not_a_crash_of_the_caller(tmp_path: Path) -> None:
    path = tiny_models.external_weights(tmp_path / "external.onnx")
    with Isolated(OrtCpu()) as isolated:
        assert isolated.load(path)({"x": np.zeros(4096, np.float32)})["y"][0] == 1
        os.truncate(tmp_path / "external.weights", 100)
        with pytest.raises(TargetFailure):
            isolated.load(path)({"x": np.zeros(4096, np.float32)})


def test_after_a_crash_the_next_request_starts_a_worker_and_the_old_model_stays_dead(
    tmp_path: Path, model: Path
) -> None:
    with Isolated(Fragile()) as isolated:
        predict = isolated.load(model)
        os.kill(int(isolated.environment()["pid"]), signal.SIGKILL)
        with pytest.raises(TargetFailure):
            predict(X)
        np.testing.assert_array_equal(isolated.load(model)(X)["y"], [2, 4])
        with pytest.raises(TargetFailure, match="has ended") as caught:
            predict(X)
        assert caught.value.kind == "signal"


def test_a_worker_that_died_between_requests_is_replaced(model: Path) -> None:
    with Isolated(Fragile()) as isolated:
        pid = int(isolated.environment()["pid"])
        os.kill(pid, signal.SIGKILL)
        assert is_gone(pid)
        assert isolated.environment()["pid"] != str(pid)


def test_too_large_an_allocation_fails_as_memory(tmp_path: Path) -> None:
    path = tiny_models.huge(tmp_path / "huge.onnx")
    with Isolated(OrtCpu(), memory_bytes=2 * GIB) as isolated:
        predict = isolated.load(path)
        with pytest.raises(TargetFailure) as caught:
            predict({"n": np.array([1 << 30])})
        assert (caught.value.kind, caught.value.stage) == ("memory", "run")
        assert predict({"n": np.array([5])})["y"].shape == (5,)


def test_a_memory_limit_too_low_for_the_runtime_is_told_as_memory(model: Path) -> None:
    with Isolated(OrtCpu(), memory_bytes=64 << 20) as isolated, pytest.raises(TargetFailure) as caught:
        isolated.load(model)
    assert (caught.value.kind, caught.value.stage) == ("memory", "start")


@pytest.mark.parametrize(("size_bytes", "kind"), [(0, "error"), (3 * GIB // 2, "memory")])
def test_an_odd_failure_of_the_start_is_told_as_memory_only_near_the_limit(size_bytes: int, kind: str) -> None:
    isolated = Isolated(Unloadable(size_bytes), memory_bytes=2 * GIB)  # type: ignore[arg-type]
    with pytest.raises(TargetFailure, match="not installed here") as caught:
        isolated.environment()
    assert (caught.value.kind, caught.value.stage) == (kind, "start")


def test_what_a_library_prints_reaches_neither_the_answer_nor_our_output(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Isolated(Fragile("print")) as isolated:
        np.testing.assert_array_equal(isolated.load(model)(X)["y"], [2, 4])
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_a_target_that_cannot_be_made_in_the_worker_is_a_failure_of_the_start() -> None:
    isolated = Isolated(Unloadable())  # type: ignore[arg-type]
    with pytest.raises(TargetFailure, match="not installed here") as caught:
        isolated.environment()
    assert caught.value.stage == "start"


def test_an_answer_that_cannot_be_sent_is_a_failure(model: Path) -> None:
    with Isolated(Fragile()) as isolated:
        with pytest.raises(TargetFailure) as caught:
            isolated.probe_saturation()
        assert caught.value.stage == "probe_saturation"
        isolated.environment()


def test_an_exception_that_cannot_be_sent_still_tells_its_type(model: Path) -> None:
    with Isolated(Fragile("unpicklable")) as isolated, pytest.raises(TargetFailure, match="Unpicklable"):
        isolated.load(model)


def test_a_failure_survives_pickling_with_all_its_fields() -> None:
    failure = pickle.loads(pickle.dumps(TargetFailure("SIGSEGV", "signal", "load", "last words")))
    assert (failure.reason, failure.kind, failure.stage, failure.log_tail) == (
        "SIGSEGV",
        "signal",
        "load",
        "last words",
    )


def test_closing_ends_the_worker_and_removes_its_temporary_folder() -> None:
    isolated = Isolated(Fragile())
    environment = isolated.environment()
    assert Path(environment["temporary"]).is_dir()
    isolated.close()
    assert is_gone(int(environment["pid"]))
    assert not Path(environment["temporary"]).exists()


def test_a_model_of_a_closed_worker_raises_at_once(model: Path) -> None:
    isolated = Isolated(OrtCpu())
    predict = isolated.load(model)
    isolated.close()
    with pytest.raises(TargetFailure, match="closed"):
        predict(X)


def test_a_forgotten_target_ends_its_worker() -> None:
    isolated = Isolated(Fragile())
    pid = int(isolated.environment()["pid"])
    del isolated
    gc.collect()
    assert is_gone(pid)


def test_a_timeout_also_ends_what_the_worker_started(tmp_path: Path, model: Path) -> None:
    note = tmp_path / "child"
    with Isolated(Fragile("child", str(note)), timeout_s=1) as isolated, pytest.raises(TargetFailure):
        isolated.load(model)
    assert is_gone(int(note.read_text()))


def test_an_interrupt_ends_the_worker_and_passes_through(tmp_path: Path) -> None:
    with Isolated(Fragile(), timeout_s=30) as isolated:
        predict = isolated.load(tiny_models.endless(tmp_path / "endless.onnx"))
        pid = int(isolated.environment()["pid"])
        interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            predict(X)
        interrupt.join()
        assert is_gone(pid)
        assert isolated.environment()["pid"] != str(pid)


def test_a_worker_has_a_session_of_its_own() -> None:
    with Isolated(Fragile()) as isolated:
        environment = isolated.environment()
    assert environment["session"] == environment["pid"] != str(os.getsid(0))


def test_a_worker_outlives_the_thread_that_asked_for_it(model: Path) -> None:
    # Linux sends the parent-death signal at the end of the *thread* that started the child.
    with Isolated(OrtCpu()) as isolated:
        loaded = []
        thread = threading.Thread(target=lambda: loaded.append(isolated.load(model)))
        thread.start()
        thread.join()
        time.sleep(0.2)
        np.testing.assert_array_equal(loaded[0](X)["y"], [2, 4])


def test_threads_take_turns(model: Path) -> None:
    with Isolated(OrtCpu()) as isolated:
        predict = isolated.load(model)
        answers: list[float] = []

        def ask(number: int) -> None:
            feeds = {"x": np.full(2, number, np.float32)}
            answers.extend(predict(feeds)["y"][0] - 2 * number for _ in range(20))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [0.0] * 80


PARENT = """
import sys, time
from pathlib import Path
from fragile_targets import Fragile
from quantsieve.targets.isolation import Isolated
isolated = Isolated(Fragile(sys.argv[2]))
print(isolated.environment()["pid"], flush=True)
if sys.argv[3] == "end":
    sys.exit()
if sys.argv[2] == "nothing":
    time.sleep(600)
isolated.load(Path(sys.argv[1]))
"""


def start_parent(model: Path, how: str, then: str = "wait") -> tuple[subprocess.Popen[str], int]:
    """A script without a main guard, and the pid of its worker."""
    script = model.with_name("parent.py")
    script.write_text(textwrap.dedent(PARENT))
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, str(script), str(model), how, then],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(model.parent)},
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("how", ["nothing", "hang"])
def test_a_worker_dies_with_its_parent_idle_or_busy(model: Path, how: str) -> None:
    parent, worker = start_parent(model, how)
    with parent:
        time.sleep(0.2)  # long enough to be inside `load`
        assert not is_gone(worker, within_s=0.05)
        parent.kill()
    assert is_gone(worker)


def scratch_folders(model: Path) -> set[Path]:
    return set(model.parent.glob("quantsieve-scratch-*"))


def test_the_folder_of_a_killed_parent_goes_with_the_next_start_and_a_living_ones_stays(model: Path) -> None:
    killed, worker = start_parent(model, "nothing")
    with killed:
        (abandoned,) = scratch_folders(model)
        (abandoned / "optimized.onnx").write_bytes(b"half of it")
        killed.kill()
    assert is_gone(worker) and abandoned.exists()
    living, _ = start_parent(model, "nothing")
    with living:
        try:
            (kept,) = scratch_folders(model)
            assert kept != abandoned
            other, _ = start_parent(model, "nothing", "end")
            with other:
                assert other.wait(20) == 0
            assert scratch_folders(model) == {kept}
        finally:
            living.kill()


def test_what_only_looks_like_a_workers_folder_is_left_alone(model: Path) -> None:
    elsewhere = model.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (model.parent / "quantsieve-scratch-link").symlink_to(elsewhere)
    (model.parent / "quantsieve-scratch-file").touch()
    parent, _ = start_parent(model, "nothing", "end")
    with parent:
        assert parent.wait(20) == 0
    assert (elsewhere / "file").exists() and len(scratch_folders(model)) == 2


def test_a_script_that_ends_without_closing_leaves_no_worker(model: Path) -> None:
    parent, worker = start_parent(model, "nothing", "end")
    with parent:
        assert parent.wait(20) == 0
    assert is_gone(worker)


def test_a_forked_child_leaves_its_parents_worker_alone(model: Path) -> None:
    with Isolated(Fragile()) as isolated:
        before = isolated.environment()["pid"]
        child = os.fork()
        if child == 0:
            own = isolated.environment()["pid"]
            isolated.close()
            os._exit(0 if own != before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert isolated.environment()["pid"] == before


def test_an_isolated_target_pickles_without_its_worker() -> None:
    with Isolated(OrtCpu(threads=2), timeout_s=7, memory_bytes=3 * GIB) as isolated:
        isolated.environment()
        again = pickle.loads(pickle.dumps(isolated))
    assert (again.target, again.timeout_s, again.memory_bytes) == (OrtCpu(threads=2), 7, 3 * GIB)


@pytest.mark.parametrize("limits", [{"timeout_s": 0}, {"memory_bytes": 0}])
def test_limits_that_are_not_positive_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="above 0"):
        Isolated(OrtCpu(), **limits)


def test_a_long_log_is_cut_and_only_the_words_of_the_request_are_told(tmp_path: Path, model: Path) -> None:
    with Isolated(Fragile("print")) as isolated:
        isolated.load(model)
        with pytest.raises(TargetFailure) as caught:
            isolated.load(tmp_path / "absent.onnx")
        assert caught.value.log_tail.count("talks on stdout") == 1
