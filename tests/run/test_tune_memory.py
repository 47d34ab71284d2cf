"""Peak memory of a tune: model, batches and the decoded samples that are kept, never activations of all samples."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import small_network

PROGRAM = """
import sys
from pathlib import Path
from quantsieve import api

if __name__ == "__main__":
    model, data, run = sys.argv[1:]
    api.tune(model, data, run, samples=8, max_trials=2, workers=1)
    # Not ru_maxrss: it begins with the peak of the process that started this one.
    status = Path("/proc/self/status").read_text()
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""
SIDE = 48  # of the images: 27 kB a sample, and 290 kB of activations
NOISE_BYTES = 24 << 20  # of the allocator, between repeated runs
FEW, MANY = 600, 2000  # both fill every part and every batch to its largest size


def wide_network(path: Path) -> Path:
    model = onnx.load(small_network.network(path))
    for dimension in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        dimension.dim_value = SIDE
    onnx.save(model, path)
    return path


def peak_bytes(*arguments: object) -> int:
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) << 10


@pytest.mark.slow
def test_peak_memory_grows_by_no_more_than_the_samples_that_are_kept(tmp_path):
    """Decoded samples are kept up to a limit, 1 GiB. Activations of the added samples would be ten times as much."""
    model = wide_network(tmp_path / "wide.onnx")
    draw = np.random.default_rng(0)
    peaks, sizes = [], []
    for count in (FEW, MANY):
        x = draw.standard_normal((count, 3, SIDE, SIDE), np.float32)
        data = small_network.save_arrays(tmp_path / f"{count}.npz", {"x": x})
        sizes.append(x.nbytes)
        peaks.append(peak_bytes(model, data, tmp_path / f"run{count}"))
    assert peaks[1] - peaks[0] <= 1.2 * (sizes[1] - sizes[0]) + NOISE_BYTES, (peaks, sizes)
