"""Metrics of the scan against values by hand, and what each promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quantsieve import tasks
from quantsieve.errors import InputError, UsageError
from quantsieve.sensitivity import metrics

Y = np.array([[1.0, 2.0, 2.0], [0.0, 3.0, 4.0]], np.float32)
Z = np.array([[1.0, 2.0, 3.0], [0.0, 3.0, 4.0]], np.float32)
ERRORS = [name for name, measure in metrics.METRICS.items() if measure.meaning.is_error]
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


def test_indecision_is_what_the_divergence_of_small_equal_errors_is_in_proportion_to():
    draw = np.random.default_rng(0)
    y = draw.normal(0, 3, (40, 6)).astype(np.float32)
    errors = draw.normal(0, 0.01, (3000, 1, 6)).astype(np.float32)
    divergences = np.mean([metrics.kl_div(y, y + error) for error in errors], axis=0)
    rates = divergences / metrics.indecision(y)
    np.testing.assert_allclose(rates, np.median(rates), rtol=0.2)
    p = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(metrics.indecision(p), metrics.indecision(y), rtol=1e-3, atol=1e-6)


def test_a_sure_model_is_not_exposed_and_one_that_knows_nothing_most():
    y = np.array([[90.0, 0, 0, 0], [0, 0, 0, 0], [5, 5, -90, -90]], np.float32)
    np.testing.assert_allclose(metrics.indecision(y), [0, 0.75, 0.5], atol=1e-6)
    measure = metrics.get("kl_div")
    boxes = np.zeros((3,), np.float32)  # without an axis of classes: not compared, so not counted
    np.testing.assert_allclose(metrics.exposures(measure, {"a": y, "b": boxes}), [0, 0.75, 0.5], atol=1e-6)
    np.testing.assert_allclose(metrics.exposures(measure, {"a": y, "b": y[[0, 0, 0]]}), [0, 0.375, 0.25], atol=1e-6)
    assert metrics.exposures(metrics.get("mse"), {"a": y}) is None


@given(scores)
def test_no_change_costs_nothing(y):
    for name in ERRORS:
        np.testing.assert_allclose(metrics.METRICS[name].compare(y, y), 0, atol=1e-12, err_msg=name)
    assert (metrics.sqnr(y, y) == np.inf).all()


@given(scores, scores)
def test_errors_are_never_negative_nor_nan(y, z):
    for name in ERRORS:
        values = metrics.METRICS[name].compare(y, z)
        assert values.dtype == np.float64 and values.shape == (3,) and (values >= 0).all(), name


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_output_that_is_not_finite_is_the_worst(bad):
    broken = Y.copy()
    broken[0, 0] = bad
    for name in ("mse", "kl_div", "max_abs"):
        assert metrics.METRICS[name].compare(Y, broken)[0] == np.inf, name
        assert np.isfinite(metrics.METRICS[name].compare(Y, broken)[1]), name
    assert metrics.sqnr(Y, broken)[0] == -np.inf
    assert metrics.cos(Y, broken)[0] == 1


def test_classes_are_asked_for_where_there_are_none():
    for name in ("kl_div", "top1", "top5"):
        with pytest.raises(InputError, match="classes"):
            metrics.METRICS[name].compare(np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float32))


def values(metric, reference, perturbed, labels=None):
    return metrics.values(metrics.get(metric), reference, perturbed, labels)


def spread(reference, perturbed):
    """Largest minus least difference."""
    return np.ptp(perturbed - reference, axis=1)


def test_a_plug_in_is_a_plain_function_of_one_value_a_sample():
    measure = metrics.get(spread)
    np.testing.assert_allclose(values(spread, {"y": Y}, {"y": Z})["y"], [1, 0])
    meaning = measure.meaning
    assert (meaning.name, meaning.text) == ("spread", "Largest minus least difference")
    assert meaning.direction == metrics.HIGHER and not meaning.is_error  # whether it goes below 0 nobody knows
    assert metrics.get(spread, "own.py:spread").meaning.name == "own.py:spread"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda y, z: z - y, r"shape \[2, 3\]"),
        (lambda y, z: 0.0, r"shape \[\]"),
        (lambda y, z: ["a", "b"], "could not convert"),
        (lambda y: y, "positional argument"),
        (lambda y, z: np.array([0, -np.inf]), "-inf"),
    ],
)
def test_a_plug_in_that_gives_anything_else_is_refused(function, words):
    with pytest.raises(InputError, match=words):
        values(function, {"y": Y}, {"y": Z})


def test_what_is_not_a_number_is_the_worst():
    assert values(lambda y, z: np.array([np.nan, 1.0]), {"y": Y}, {"y": Z})["y"].tolist() == [np.inf, 1]


def test_an_unknown_name_is_answered_with_near_ones():
    with pytest.raises(UsageError, match="kl_div"):
        metrics.get("kl_dv")


def test_only_a_lower_sqnr_is_worse_and_only_it_may_lie_below_0():
    assert [n for n, m in metrics.METRICS.items() if m.meaning.direction == metrics.LOWER] == ["sqnr"]
    assert not metrics.METRICS["sqnr"].meaning.is_error
    assert metrics.METRICS["sqnr"].meaning.worse(30.0) == -30.0
    assert metrics.METRICS["mse"].meaning.worse(30.0) == 30.0


def test_an_sqnr_without_noise_or_without_end_leaves_a_mean():
    broken = Z.copy()
    broken[0, 0] = np.nan
    assert values("sqnr", {"y": Y}, {"y": Y})["y"].tolist() == [200, 200]
    assert values("sqnr", {"y": Y}, {"y": broken})["y"].tolist() == [-200, 200]


def test_each_output_has_its_values_and_those_without_classes_are_left_out_where_needed():
    before, after = {"y": Y, "box": Y[:, :1]}, {"y": Z, "box": Z[:, :1]}
    assert set(values("mse", before, after)) == {"y", "box"}
    assert set(values("kl_div", before, after)) == {"y"}
    with pytest.raises(InputError, match="axis of classes"):
        values("kl_div", {"box": Y[:, :1]}, {"box": Z[:, :1]})
    with pytest.raises(InputError, match="float output"):
        values("mse", {}, {})


@pytest.mark.parametrize("metric", ["mse", "sqnr", "max_abs", "cos"])
def test_a_value_of_a_channel_is_that_of_its_slice(metric):
    draw = np.random.default_rng(0)
    y = draw.standard_normal((2, 3, 4, 5)).astype(np.float32)  # rank 4: channels on axis 1
    z = y + draw.standard_normal(y.shape).astype(np.float32)
    found = metrics.channel_values(metrics.get(metric), {"y": y}, {"y": z})["y"]
    assert found.shape == (2, 3)
    for channel in range(3):
        wanted = metrics.METRICS[metric].compare(y[:, channel], z[:, channel])
        np.testing.assert_allclose(found[:, channel], wanted, rtol=1e-12)


def test_channels_of_rank_2_and_3_lie_on_the_last_axis():
    found = metrics.channel_values(metrics.get("max_abs"), {"y": Y}, {"y": Z})["y"]
    np.testing.assert_allclose(found, np.abs(Z - Y))
    tokens = np.stack([Y, Y], axis=1)
    found = metrics.channel_values(metrics.get("max_abs"), {"y": tokens}, {"y": tokens + 1})["y"]
    np.testing.assert_allclose(found, np.ones((2, 3)))


def test_channels_are_refused_where_a_channel_alone_says_nothing():
    for metric in ("kl_div", "top1", "top5", "agreement"):
        with pytest.raises(UsageError, match="mse, sqnr, cos, max_abs"):
            metrics.channel_values(metrics.get(metric), {"y": Y}, {"y": Z})
    with pytest.raises(UsageError, match="a sign"):
        metrics.channel_values(metrics.get("cos"), {"y": Y}, {"y": Z})
    with pytest.raises(InputError, match="axis of classes"):
        metrics.channel_values(metrics.get("mse"), {"y": Y[:, :1]}, {"y": Z[:, :1]})


# --- tasks ----------------------------------------------------------------------------------


def test_a_task_loses_what_float_scores_more():
    labels = np.array([2, 2])
    # Float says 1 and 2, perturbed 2 and 2: the first sample is mended, so it has a loss of -1.
    assert values("accuracy", {"y": Y}, {"y": Z}, labels)[""].tolist() == [-1, 0]
    assert values("agreement", {"y": Y}, {"y": Z})[""].tolist() == [1, 0]
    np.testing.assert_allclose(values("fidelity", {"y": Y}, {"y": Z})[""], [1 / 3, 0])


def test_every_task_is_a_metric_under_one_name_that_nothing_else_has():
    found = metrics.of_tasks()
    assert set(found.values()) == set(tasks.names())
    assert not set(found) & {*metrics.METRICS, metrics.QUALITY}
    for name, task in found.items():
        measure = metrics.get(name)
        assert measure.compare is tasks.get(task) and measure.meaning.name == name
        assert measure.meaning.direction == metrics.HIGHER
        assert metrics.get(tasks.get(task)) == measure
