import numpy as np
import pytest

from quantsieve import tasks

RANDOM = np.random.default_rng(0)


def softmax(array, axis):
    exponents = np.exp(array)
    return (exponents / exponents.sum(axis=axis, keepdims=True)).astype(np.float32)


def unit_rows(array):
    return array / np.linalg.norm(array, axis=-1, keepdims=True)


def test_labels_mean_top1():
    assert tasks.choose({"y": np.zeros((3, 4), np.float32)}, np.zeros(3, np.int64)).name == "top1"


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("y", RANDOM.normal(size=(8, 10))),
        ("y", RANDOM.normal(size=(8, 10, 1, 1))),
        ("token_logits", RANDOM.normal(size=(8, 6, 10))),
        ("y", softmax(RANDOM.normal(size=(8, 6, 10)), -1)),
        ("y", softmax(RANDOM.normal(size=(8, 10, 4, 4)), 1)),
    ],
)
def test_outputs_that_look_like_classes_mean_agreement(name, array):
    assert tasks.choose({name: np.float32(array)}, None).name == "agreement"


@pytest.mark.parametrize(
    "array",
    [
        RANDOM.normal(size=(8, 1)),
        RANDOM.normal(size=8),
        unit_rows(RANDOM.normal(size=(8, 32))),
        RANDOM.normal(size=(8, 100, 85)),
        RANDOM.normal(size=(8, 3, 16, 16)),
    ],
)
def test_other_outputs_mean_fidelity(array):
    assert tasks.choose({"y": np.float32(array)}, None).name == "fidelity"


def test_one_output_of_classes_among_others_is_enough():
    outputs = {
        "embedding": np.float32(unit_rows(RANDOM.normal(size=(8, 32)))),
        "y": np.zeros((8, 3), np.float32),
    }
    assert tasks.choose(outputs, None).name == "agreement"
