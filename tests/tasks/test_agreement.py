import numpy as np
import pytest

from quantsieve import tasks
from quantsieve.errors import InputError

AGREEMENT = tasks.get("agreement")


def one_hot(classes, num_classes, axis):
    return np.moveaxis(np.eye(num_classes, dtype=np.float32)[np.array(classes)], -1, axis)


def score(found, expected):
    return AGREEMENT.score({"y": found}, {"y": expected}, None).tolist()


def test_samples_agree_when_both_models_choose_the_same_class():
    assert score(one_hot([0, 1, 2], 3, -1) * 9, one_hot([0, 2, 2], 3, -1)) == [1, 0, 1]


def test_tokens_are_averaged_with_the_classes_on_the_last_axis():
    found, expected = one_hot([[0, 1, 2, 3]], 4, -1), one_hot([[0, 1, 2, 0]], 4, -1)
    assert score(found, expected) == [0.75]


def test_pixels_are_averaged_with_the_classes_on_axis_one():
    found, expected = one_hot([[[0, 1], [2, 0]]], 3, 1), one_hot([[[0, 1], [1, 1]]], 3, 1)
    assert found.shape == (1, 3, 2, 2)
    assert score(found, expected) == [0.5]


def test_a_position_with_nan_does_not_agree():
    found = one_hot([[0, 1, 2, 3]], 4, -1)
    found[0, 1, 3] = np.nan
    assert score(found, one_hot([[0, 1, 2, 3]], 4, -1)) == [0.75]


def test_the_output_with_a_telling_name_decides_whatever_the_values_are():
    expected = {"boxes": np.ones((2, 4), np.float32), "prob": one_hot([0, 1], 3, -1)}
    found = {"boxes": one_hot([3, 3], 4, -1), "prob": one_hot([0, 2], 3, -1)}
    assert AGREEMENT.score(found, expected, None).tolist() == [1, 0]


def test_outputs_without_classes_are_refused():
    with pytest.raises(InputError, match="axis of classes, found 'y' float32"):
        AGREEMENT.check({"y": np.zeros((3, 1), np.float32)}, None)
