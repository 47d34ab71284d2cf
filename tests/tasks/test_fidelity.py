import numpy as np
import pytest

from quantsieve import tasks

FIDELITY = tasks.get("fidelity")


def score(found, expected):
    return FIDELITY.score({"y": np.float32(found)}, {"y": np.float32(expected)}, None).tolist()


def test_the_score_is_one_minus_the_relative_error_of_each_sample():
    # |(3, 4)| = 5; an error of (0, 1) is a fifth of it, one of (-6, -8) twice it.
    assert score([[3, 5], [-3, -4]], [[3, 4], [3, 4]]) == pytest.approx([0.8, 0])


def test_axes_of_any_number_count_as_one_signal():
    assert score(np.full((1, 2, 2, 2), 0.5), np.ones((1, 2, 2, 2))) == [0.5]
    assert score([2.0, 1.0], [2.0, 2.0]) == [1, 0.5]


def test_a_signal_of_zeros_is_met_exactly_or_not_at_all():
    assert score([[0, 0], [0, 1e-9], [0, np.nan]], [[0, 0], [0, 0], [0, 0]]) == [1, 0, 0]


def test_float_outputs_are_averaged_and_others_ignored():
    expected = {
        "a": np.ones((1, 2), np.float32),
        "b": np.full((1, 3), 1000, np.float32),
        "n": np.zeros((1, 1), int),
    }
    found = {"a": np.zeros((1, 2), np.float32), "b": expected["b"], "n": np.ones((1, 1), int)}
    assert FIDELITY.score(found, expected, None).tolist() == [0.5]
