"""The memory benchmark's model is what it is said to be, and the peaks are those of the scan and all it starts."""

import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from benchmarks.scan.memory import NUM_FILE, Use, measure_limits, num_bytes, table, watched, write_model, write_samples

SIDE, LAYERS = 512, 8  # 8 MiB of weights
MIB = 1 << 20
FILL = f"import numpy, time; x = numpy.ones({48 * MIB}, 'u1'); time.sleep(0.3)"
MAP = """
import sys, numpy, time
x = numpy.memmap(sys.argv[1], 'u1', 'r'); print(x.sum()); time.sleep(0.3)
"""


def test_the_model_has_its_weights_in_a_file_and_values_keep_their_size(tmp_path):
    path = write_model(tmp_path, SIDE, LAYERS)
    onnx.checker.check_model(path)
    assert (tmp_path / "weights").stat().st_size == LAYERS * SIDE * SIDE * 4
    assert path.stat().st_size < 64 << 10
    x = np.load(write_samples(tmp_path / "x.npz", SIDE))["x"]
    y = onnxruntime.InferenceSession(path).run(None, {"x": x})[0]
    assert y.shape == x.shape == (NUM_FILE, SIDE)
    assert 0.1 < (y**2).mean() / (x**2).mean() < 10


def test_pages_of_a_mapped_file_are_resident_but_not_own(tmp_path):
    idle = watched([sys.executable, "-c", "import numpy, time; time.sleep(0.3)"])[0]
    (tmp_path / "zeros").write_bytes(bytes(48 * MIB))
    own, resident, wall, cpu = watched([sys.executable, "-c", MAP, str(tmp_path / "zeros")])
    assert own < idle + 16 * MIB
    assert resident > own + 40 * MIB
    assert wall > 0 and cpu > 0


def test_what_a_process_starts_counts_too():
    own, resident, _, _ = watched(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {FILL!r}])"]
    )
    assert own > 48 * MIB
    assert resident > 48 * MIB


def test_a_command_that_fails_is_not_measured():
    with pytest.raises(subprocess.CalledProcessError):
        watched([sys.executable, "-c", "raise SystemExit(3)"])


def test_a_small_model_is_measured_under_each_limit(tmp_path):
    uses = measure_limits(tmp_path, ("1G", "64M"), SIDE, LAYERS)
    assert [use.limit for use in uses] == ["1G", "64M"]
    assert all(use.num_layers == LAYERS and use.own_bytes < use.resident_bytes for use in uses)
    assert uses[0].score_gap == 0
    assert uses[1].score_gap < 1e-3
    assert uses[0].is_met


def test_the_table_tells_aim_and_peaks():
    missed = Use("2G", 1024 * MIB, 3073 * MIB, 4000 * MIB, 60.2, 101.0, 16, 2e-6)
    line = table([missed]).splitlines()[-1]
    assert num_bytes("512M") == 512 * MIB
    assert "| 1024 MiB | 3072 MiB | **3073 MiB** | no | 4000 MiB | 60 s | 101 s | 16 | 2e-06 |" in line
    assert "| **3072 MiB** | yes |" in table([Use("2G", 1024 * MIB, 3072 * MIB, 0, 1.0, 1.0, 16, 0.0)])
