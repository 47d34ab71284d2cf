"""What a real session makes of the quantized model, told beside the simulated scores of a scan."""

import functools
import json
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from crashing_targets import Crashing
from drifting_targets import Clipping, clipped
from onnx import TensorProto, helper

import small_network
from quantsieve import api
from quantsieve.api import _line
from quantsieve.errors import UsageError
from quantsieve.run import memory, trials
from quantsieve.sensitivity.drift import Drift, error_ratio

SAMPLES = 8
SCHEMES = ("int8", "int8-channel")


@pytest.fixture
def clipping(monkeypatch):
    monkeypatch.setattr(_line, "OrtCpu", Clipping)


@pytest.fixture
def built(monkeypatch):
    """By layers that are quantized: the model of each plan that was built."""
    found, write = {}, trials.writing.write_plan

    def spy(parts, plan):
        model = write(parts, plan)
        found[(*plan.quantized(), *sorted({plan.scheme(layer) for layer in plan.quantized()}))] = model
        return model

    monkeypatch.setattr(trials.writing, "write_plan", spy)
    return found


def squared_error(float_model, model, x):
    """Mean over samples of the relative squared error of `logits`, from sessions of this process."""
    def run(content):
        return ort.InferenceSession(content, providers=["CPUExecutionProvider"]).run(["logits"], {"x": x})[0]

    wanted, found = (run(content).astype(np.float64) for content in (float_model, model))
    return np.square(found - wanted).mean() / wanted.var()


def scanned_images(small_model, small_data, monkeypatch, **options):
    """(the scan, the images that its drift was measured on)"""
    drawn, make = [], trials.Exam

    def spy(split, samples, indices, task, batch):
        drawn.append(indices)
        return make(split, samples, indices, task, batch)

    monkeypatch.setattr(trials, "Exam", spy)
    found = api.scan(small_model, small_data, **options)
    (indices,) = drawn
    return found, np.load(small_data)["x"][indices]


def test_the_drift_of_a_scheme_is_what_sessions_of_its_file_give(small_model, small_data, built, monkeypatch):
    found, x = scanned_images(small_model, small_data, monkeypatch, samples=SAMPLES)
    assert [drift.scheme for drift in found.drift] == list(SCHEMES) and len(x) == SAMPLES
    full = {name[-1]: model for name, model in built.items()}
    for drift in found.drift:
        content = full[drift.scheme].SerializeToString()
        assert drift.measured == pytest.approx(squared_error(str(small_model), content, x), rel=1e-4)
        assert 0.9 < drift.ratio < 1.1 and drift.reason is None and drift.num_samples == SAMPLES
    assert all(score.drift is None for score in found.layers)
    assert not any("real session" in note for note in found.notes)


def test_a_session_that_computes_something_else_is_told_with_its_worst_rows(
    small_model, small_data, clipping, built, monkeypatch
):
    found, x = scanned_images(small_model, small_data, monkeypatch, samples=SAMPLES, schemes=["int8"])
    (drift,) = found.drift
