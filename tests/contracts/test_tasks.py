"""What every task promises, for every task that is found. A new file in tasks/ is under test at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantsieve import tasks
from quantsieve.errors import InputError, ShapeMismatch, UsageError

every_task = pytest.mark.parametrize("task", tasks.discover(), ids=tasks.names())
NUM_CLASSES = 5
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([np.nan, np.inf, -np.inf, 0.0])


def reference(num_samples=6, seed=0):
    return {"logits": np.random.default_rng(seed).normal(size=(num_samples, NUM_CLASSES)).astype(np.float32)}


def labels_of(outputs):
    return outputs["logits"].argmax(axis=1).astype(np.int64)


@every_task
def test_a_task_describes_itself(task):
    assert task.name in tasks.names()
    assert task.description
    assert task.higher_is_better is True
    assert isinstance(task.needs_labels, bool)
    assert task.version >= 1
    assert tasks.get(task.name) is task


def test_names_are_unique_and_include_the_three_basic_tasks():
    assert len(set(tasks.names())) == len(tasks.names())
    assert {"agreement", "fidelity", "top1"} <= set(tasks.names())


def test_an_unknown_name_is_a_usage_error_with_the_nearest_one():
    with pytest.raises(UsageError, match=r"'top_1'.*Use one of these: top1"):
        tasks.get("top_1")


@every_task
def test_the_float_model_itself_scores_one_everywhere(task):
    outputs = reference()
    labels = labels_of(outputs)
    task.check(outputs, labels)
    scores = task.score(outputs, outputs, labels)
    assert scores.dtype == np.float64
    np.testing.assert_array_equal(scores, np.ones(6))


@every_task
@given(values=st.lists(FLOATS, min_size=3 * NUM_CLASSES, max_size=3 * NUM_CLASSES))
def test_scores_lie_between_zero_and_one_whatever_a_candidate_puts_out(task, values):
    outputs = {"logits": np.array(values, dtype=np.float32).reshape(3, NUM_CLASSES)}
    scores = task.score(outputs, reference(3), labels_of(reference(3)))
    assert scores.shape == (3,)
    assert np.all((scores >= 0) & (scores <= 1))


@every_task
def test_a_sample_with_nan_scores_zero_and_leaves_the_others_alone(task):
    expected = reference()
    candidate = {"logits": expected["logits"].copy()}
    candidate["logits"][2, labels_of(expected)[2]] = np.nan
    candidate["logits"][4, (labels_of(expected)[4] + 1) % NUM_CLASSES] = np.nan
    scores = task.score(candidate, expected, labels_of(expected))
    np.testing.assert_array_equal(scores, [1, 1, 0, 1, 0, 1])


@every_task
def test_an_inverted_model_scores_below_the_float_model(task):
    expected = reference()
    scores = task.score({"logits": -expected["logits"]}, expected, labels_of(expected))
    assert np.all(scores < 1)


@every_task
def test_scores_of_a_batch_are_those_of_its_samples(task):
    expected, candidate = reference(seed=0), reference(seed=1)
    labels = labels_of(expected)
    whole = task.score(candidate, expected, labels)
    single = [
        task.score(
            {"logits": candidate["logits"][i : i + 1]},
            {"logits": expected["logits"][i : i + 1]},
            labels[i : i + 1],
        )
        for i in range(6)
    ]
    np.testing.assert_array_equal(whole, np.concatenate(single))


@every_task
def test_outputs_of_another_shape_or_name_are_refused(task):
    expected = reference()
    labels = labels_of(expected)
    with pytest.raises(ShapeMismatch, match=r"'logits' of shape \(6, 5\), found \(6, 4\)"):
        task.score({"logits": expected["logits"][:, :4]}, expected, labels)
    with pytest.raises(ShapeMismatch, match="an output 'logits', found scores"):
        task.score({"scores": expected["logits"]}, expected, labels)


@every_task
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_float_model_without_finite_outputs_is_refused(task, value):
    outputs = reference()
    labels = labels_of(outputs)
    outputs["logits"][3, 1] = value
    with pytest.raises(InputError, match="on 1 of 6 samples, first on number 3"):
        task.check(outputs, labels)


@every_task
def test_a_model_without_float_outputs_is_refused(task):
    outputs = {"ids": np.zeros((6, 3), np.int64)}
    with pytest.raises(InputError, match="at least one float output"):
        task.check(outputs, np.zeros(6, np.int64))


@every_task
def test_labels_are_asked_for_exactly_by_tasks_that_need_them(task):
    outputs = reference()
    if task.needs_labels:
        with pytest.raises(InputError, match="labels for the task"):
            task.check(outputs, None)
    else:
        task.check(outputs, None)
        assert task.score(outputs, outputs, None).shape == (6,)


@every_task
def test_float16_outputs_are_scored_in_double_precision(task):
    outputs = {"logits": reference()["logits"].astype(np.float16)}
    labels = labels_of(outputs)
    np.testing.assert_array_equal(task.score(outputs, outputs, labels), np.ones(6))
