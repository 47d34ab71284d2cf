"""The whole line on trained models: what the prices promise is what the files measure."""

from pathlib import Path

import numpy as np
import pytest

import quantsieve
from quantsieve.data import Preprocess
from quantsieve.evaluation import Measured

ZOO = Path(__file__).resolve().parents[3] / "shared" / "zoo"

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.slow,
    pytest.mark.skipif(not ZOO.is_dir(), reason="the trained models are not beside this checkout"),
]


@pytest.fixture(scope="module")
def mobilenet(tmp_path_factory: pytest.TempPathFactory) -> quantsieve.TuneResult:
    shift = Preprocess(mean=(125.307, 122.961, 113.8575), std=(62.985, 62.0925, 66.708))
    return quantsieve.tune(
        ZOO / "mobilenetv2_cifar10" / "model.onnx",
        ZOO / "cifar10" / "eval",
        tmp_path_factory.mktemp("mobilenet") / "run",
        calibration_data=ZOO / "cifar10" / "calib",
        preprocess=shift,
        schemes=("int8",),
    )


def _finalists(result: quantsieve.TuneResult) -> list:
    return [c for c in result.candidates if isinstance(c.final, Measured) and c.predicted_mse]


def test_a_model_that_full_int8_ruins_is_rescued_within_its_budget(mobilenet: quantsieve.TuneResult) -> None:
    full = next(c for c in mobilenet.candidates if c.origin == "full int8, uncorrected")
    chosen = mobilenet.recommended
    assert full.final.loss().value > 0.5
    assert chosen is not None and chosen.final.loss().value <= 0.01
    assert mobilenet.summary.kept(chosen) > 0.6


def test_files_measure_what_was_simulated(mobilenet: quantsieve.TuneResult) -> None:
    ratios = [c.measured_mse / c.simulated_mse for c in _finalists(mobilenet)]
    assert max(ratios) < 1.5 and min(ratios) > 1 / 1.5


def test_additive_prediction_ranks_the_finalists(mobilenet: quantsieve.TuneResult) -> None:
    found = mobilenet.summary.prediction
    assert found is not None and found.rank_correlation > 0.9
    assert 1 / 1.5 < found.ratio_median < 1.5


def test_every_layer_ran_as_it_was_planned(mobilenet: quantsieve.TuneResult) -> None:
    refused = {layer.name for layer in mobilenet.summary.layers if layer.refusal}
    for candidate in _finalists(mobilenet):
        wrong = {
            layer: ran
            for layer, ran in candidate.ran.items()
            if layer not in refused and (ran == "int8") != candidate.plan.is_quantized(layer)
        }
        assert not wrong, candidate.origin


def test_keyword_spotting_keeps_its_score_at_full_int8_size(tmp_path: Path) -> None:
    folder = ZOO / "kws_dscnn"
    result = quantsieve.tune(
        folder / "model.onnx", folder / "eval.npz", tmp_path / "run", calibration_data=folder / "calib.npz"
    )
    chosen = result.recommended
    assert chosen is not None and result.summary.kept(chosen) > 0.9
    assert np.isfinite(chosen.final.errors).all()
