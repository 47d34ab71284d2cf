"""A small network with its data, and one run of it to the end, shared by the tests of the whole line."""

from pathlib import Path

import pytest

import small_network
from quantsieve import api
from quantsieve.api import TuneResult


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_network.network(tmp_path_factory.mktemp("small") / "small.onnx")


@pytest.fixture(scope="session")
def small_data(small_model: Path) -> Path:
    """120 labelled images."""
    return small_network.save_arrays(small_model.with_name("data.npz"), small_network.arrays(small_model, count=120))


@pytest.fixture(scope="session")
def whole_run(small_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    """An undisturbed run. Not to be changed: copy it."""
    return api.tune(small_model, small_data, tmp_path_factory.mktemp("whole") / "run", samples=8, workers=1)
