"""The memory limit: how it is shared out, and what a scan of a model larger than it takes."""

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest

import small_network
from quantsieve.errors import UsageError
from quantsieve.run.memory import BATCH_BYTES, LEAST, Memory, default_limit

PROGRAM = """
import sys, threading, time
from pathlib import Path
from quantsieve import api

peak = 0

def own_bytes():  # without the pages of mapped files, which are the disk's cache
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) << 10

def watch():
    global peak
    while True:
        peak = max(peak, own_bytes())
        time.sleep(0.002)

if __name__ == "__main__":
    start = own_bytes()
    threading.Thread(target=watch, daemon=True).start()
    result = api.scan(sys.argv[1], sys.argv[2], samples=8, schemes=("int8",), workers=1, memory_limit=int(sys.argv[3]))
    print(len(result.layers), peak - start)
"""
SIDE, DEPTH = 2048, 6  # 101 MB of weights
LIMIT = 64 << 20
LIBRARIES = 64 << 20  # code and tables of onnxruntime and the other libraries that are imported late


@pytest.mark.parametrize("limit", [LEAST, 1 << 28, 1 << 31, 1 << 36])
def test_all_shares_together_stay_under_the_limit(limit):
    memory = Memory(limit)
    room = memory.room(limit, 2)
    assert room.is_lean
    assert not room.keeps_integers
    assert memory.samples + memory.batch + memory.correction + room.values <= limit
    assert memory.samples // 4 + memory.batch > 0


def test_a_small_model_is_held_with_all_that_makes_it_fast():
    room = Memory(1 << 32).room(1 << 20, 2)
    assert (room.is_lean, room.keeps_integers) == (False, True)


def test_batches_are_the_same_under_limits_that_differ_a_little():
    assert Memory(5 << 27).batch == Memory(7 << 27).batch == 1 << 26
    assert Memory(1 << 34).batch == BATCH_BYTES


def test_a_limit_too_small_to_keep_is_refused():
    with pytest.raises(UsageError, match="at least 64 MiB"):
        Memory(LEAST - 1)


def test_the_default_is_at_most_half_of_the_machine():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert LEAST <= default_limit() <= max(LEAST, total // 2)


def stacked(path):
    """Gemm and Relu, over and over, weights in a file beside the model."""
    draw = np.random.default_rng(0)
    nodes, constants, read = [], [], "x"
    for index in range(DEPTH):
        weight = draw.standard_normal((SIDE, SIDE), dtype=np.float32) * np.float32((2 / SIDE) ** 0.5)
        constants.append(onnx.numpy_helper.from_array(weight, f"w{index}"))
        constants.append(onnx.numpy_helper.from_array(np.zeros(SIDE, np.float32), f"b{index}"))
        nodes.append(onnx.helper.make_node("Gemm", [read, f"w{index}", f"b{index}"], [f"g{index}"]))
        nodes.append(onnx.helper.make_node("Relu", [f"g{index}"], [f"r{index}"]))
        read = f"r{index}"
    graph = onnx.helper.make_graph(
        nodes,
        "stacked",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", SIDE])],
        [onnx.helper.make_tensor_value_info(read, onnx.TensorProto.FLOAT, ["n", SIDE])],
        constants,
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=1024)
    return path


@pytest.mark.slow
def test_a_scan_takes_no_more_than_one_copy_of_the_model_and_the_limit(tmp_path):
    model = stacked(tmp_path / "stacked.onnx")
    x = np.random.default_rng(1).standard_normal((24, SIDE), dtype=np.float32)
    data = small_network.save_arrays(tmp_path / "x.npz", {"x": x})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(data), str(LIMIT)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    layers, peak = map(int, done.stdout.split())
    assert layers == DEPTH
    assert peak <= (tmp_path / "weights").stat().st_size + LIMIT + LIBRARIES, peak
