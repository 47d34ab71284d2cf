"""A killed scan leaves its finished batches beside the output, and the same call goes on from there."""

import signal
import subprocess
import sys

import pytest

from quantsieve import api
from quantsieve.errors import InputError, RunFolderError
from quantsieve.run import line as run_line
from quantsieve.run import scanning
from quantsieve.sensitivity import rescue

SAMPLES = 24
PROGRAM = f"""
import os, signal, sys
from quantsieve import api

class Killed:
    def __call__(self, step):
        if step.stage == "sensitivity" and step.total and step.done >= 0.6 * step.total:
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    model, data, output, mode, metric = sys.argv[1:]
    api.scan(model, data, samples={SAMPLES}, mode=mode, metric=metric, output=output, workers=1, progress=Killed())
"""
KINDS = [("alone", "relative_mse"), ("alone", "kl_div"), ("rescue", "relative_mse")]


@pytest.fixture
def batches_of_eight(monkeypatch):
    monkeypatch.setattr(run_line, "BATCH", 8)


def killed(*arguments):
    program = PROGRAM.replace(
        "from quantsieve import api", "from quantsieve import api\nfrom quantsieve.run import line"
    )
    program = program.replace('if __name__ == "__main__":', 'if __name__ == "__main__":\n    line.BATCH = 8')
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr


def counted(monkeypatch):
    """Names of the functions that compute a batch, one entry a call."""
    calls = []
    for module, name in ((run_line.suffix, "Probes"), (scanning, "probe_batch"), (rescue, "rescue_batch")):
        computed = getattr(module, name)

        def spy(*arguments, name=name, computed=computed, **named):
            calls.append(name)
            return computed(*arguments, **named)

        monkeypatch.setattr(module, name, spy)
    return calls


@pytest.mark.parametrize(("mode", "metric"), KINDS)
def test_a_killed_scan_goes_on_behind_its_last_batch(
    mode, metric, small_model, small_data, tmp_path, monkeypatch, batches_of_eight
):
    output = tmp_path / "scan.json"
    killed(small_model, small_data, output, mode, metric)
    assert not output.exists()
    assert len(list(tmp_path.glob("scan.json.work-*"))) == 1
    calls = counted(monkeypatch)
    found = api.scan(small_model, small_data, samples=SAMPLES, mode=mode, metric=metric, output=output, workers=1)
    resumed = len(calls)
    assert not list(tmp_path.glob("scan.json.work-*"))
    calls.clear()
    whole = api.scan(small_model, small_data, samples=SAMPLES, mode=mode, metric=metric, workers=1)
    assert 0 < resumed < len(calls)
    assert found == whole
    assert api.read_scan(output).layers == whole.layers


def test_another_scan_of_the_same_output_does_not_touch_what_is_left(small_model, small_data, tmp_path):
    output = tmp_path / "scan.json"
    killed(small_model, small_data, output, *KINDS[0])
    api.scan(small_model, small_data, samples=4, seed=5, output=output, workers=1)
    assert len(list(tmp_path.glob("scan.json.work-*"))) == 1


def test_bad_input_leaves_no_folder(small_model, tmp_path):
    with pytest.raises(InputError):
        api.scan(small_model, tmp_path / "none.npz", output=tmp_path / "scan.json")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_scan_is_at_work_in_is_refused_and_stays(small_model, small_data, tmp_path, monkeypatch):
    output, met = tmp_path / "scan.json", []

    def again(step):
        if not met:
            met.append(step)
            with pytest.raises(RunFolderError, match="at work"):
                api.scan(small_model, small_data, samples=4, output=output, workers=1)

    api.scan(small_model, small_data, samples=4, output=output, workers=1, progress=again)
    assert met
    assert output.exists()
