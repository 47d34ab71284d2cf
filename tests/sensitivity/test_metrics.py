"""Metrics of the scan against values by hand, and what each promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quantsieve.errors import InputError, UsageError
from quantsieve.sensitivity import metrics

Y = np.array([[1.0, 2.0, 2.0], [0.0, 3.0, 4.0]], np.float32)
Z = np.array([[1.0, 2.0, 3.0], [0.0, 3.0, 4.0]], np.float32)
ERRORS = [name for name in metrics.METRICS if name != "sqnr"]
scores = arrays(np.float32, (3, 7), elements=st.floats(-20, 20, width=32))


def test_values_by_hand():
    np.testing.assert_allclose(metrics.mse(Y, Z), [1 / 3, 0])
    np.testing.assert_allclose(metrics.sqnr(Y, Z), [10 * np.log10(9), np.inf])
    np.testing.assert_allclose(metrics.cos(Y, Z), [1 - 11 / (3 * np.sqrt(14)), 0], atol=1e-12)
    np.testing.assert_allclose(metrics.max_abs(Y, Z), [1, 0])
    np.testing.assert_allclose(metrics.top1(Y, Z), [1, 0])  # ties go to the first class: 1 before, 2 after


def test_kl_div_is_of_the_softmax_once():
    p = np.exp(Y) / np.exp(Y).sum(axis=1, keepdims=True)
    q = np.exp(Z) / np.exp(Z).sum(axis=1, keepdims=True)
    wanted = (p * np.log(p / q)).sum(axis=1)
    np.testing.assert_allclose(metrics.kl_div(Y, Z), wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(metrics.kl_div(p, q), wanted, rtol=1e-4, atol=1e-6)  # probabilities as they are


def test_top5_asks_whether_the_float_class_is_among_the_five_highest():
    before = np.array([[9, 1, 2, 3, 4, 5, 6]], np.float32)
    fifth = np.array([[2.5, 1, 2, 3, 4, 5, 6]], np.float32)
    sixth = np.array([[1.5, 1, 2, 3, 4, 5, 6]], np.float32)
    assert metrics.top5(before, fifth) == 0
    assert metrics.top5(before, sixth) == 1
    assert metrics.top1(before, fifth) == 1


def test_decisions_at_every_place_are_averaged():
    before = np.zeros((1, 3, 2, 2), np.float32)
    before[:, 0] = 1
    after = before.copy()
    after[0, 2, 0, 0] = 5  # one pixel of four
    assert metrics.top1(before, after) == 0.25


@given(scores)
def test_no_change_costs_nothing(y):
    for name in ERRORS:
        np.testing.assert_allclose(metrics.METRICS[name](y, y), 0, atol=1e-12, err_msg=name)
    assert (metrics.sqnr(y, y) == np.inf).all()


@given(scores, scores)
def test_errors_are_never_negative_nor_nan(y, z):
    for name in ERRORS:
        values = metrics.METRICS[name](y, z)
        assert values.dtype == np.float64 and values.shape == (3,) and (values >= 0).all(), name


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_output_that_is_not_finite_is_the_worst(bad):
    broken = Y.copy()
    broken[0, 0] = bad
    for name in ("mse", "kl_div", "max_abs"):
        assert metrics.METRICS[name](Y, broken)[0] == np.inf, name
        assert np.isfinite(metrics.METRICS[name](Y, broken)[1]), name
    assert metrics.sqnr(Y, broken)[0] == -np.inf
    assert metrics.cos(Y, broken)[0] == 1


def test_classes_are_asked_for_where_there_are_none():
    for name in ("kl_div", "top1", "top5"):
        with pytest.raises(InputError, match="classes"):
            metrics.METRICS[name](np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float32))


def test_a_plug_in_is_a_plain_function_of_one_value_a_sample():
    def spread(reference, perturbed):
        return np.ptp(perturbed - reference, axis=1)

    np.testing.assert_allclose(metrics.apply(metrics.get(spread), Y, Z), [1, 0])
    with pytest.raises(InputError, match=r"shape \[2, 3\]"):
        metrics.apply(lambda y, z: z - y, Y, Z)
    with pytest.raises(UsageError, match="kl_div"):
        metrics.get("kl")
    assert metrics.is_cleaner_when_higher("sqnr") and not metrics.is_cleaner_when_higher(spread)
