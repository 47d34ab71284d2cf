"""Scores of a user's own: what they are called with, what counts, and what is refused with what to do."""

import numpy as np
import pytest

from quantsieve import api, tasks
from quantsieve.errors import InputError
from quantsieve.evaluation import Measured
from quantsieve.reports.document import report_document

OUTPUTS = {"logits": np.array([[1.0, 2.0], [3.0, 1.0], [0.0, 5.0]], np.float32)}


def right(outputs, reference, labels):
    """Share of right classes. And more text."""
    return outputs["logits"].argmax(axis=1) == labels


def write(path, body):
    path.write_text(f'import numpy as np\n\n\ndef score(outputs, reference, labels):\n    "A score."\n    {body}\n')
    return f"{path}:score"


def test_a_function_of_a_file_is_a_task_named_as_it_was_asked_for(tmp_path):
    name = write(tmp_path / "mine.py", "return np.full(len(labels), 0.25)")
    task = tasks.get(name)
    assert (task.name, task.description) == (name, "A score")
    np.testing.assert_array_equal(task.score(OUTPUTS, OUTPUTS, np.zeros(3, np.int64)), [0.25] * 3)


def test_it_sees_outputs_reference_and_labels():
    seen = []
    task = tasks.get(tasks.task_name(lambda *given: seen.append(given) or np.ones(3)))
    labels = np.array([0, 1, 1])
    other = {"logits": OUTPUTS["logits"] + 1}
    task.score(other, OUTPUTS, labels)
    assert seen == [(other, OUTPUTS, labels)]


def test_other_code_is_another_version(tmp_path):
    first = tasks.get(write(tmp_path / "a.py", "return np.ones(len(labels))")).version
    assert tasks.get(write(tmp_path / "b.py", "return np.zeros(len(labels))")).version != first
    assert tasks.get(write(tmp_path / "c.py", "return np.ones(len(labels))")).version == first


def test_a_sample_that_is_no_number_scores_nothing_whatever_the_function_says():
    task = tasks.get(tasks.task_name(lambda outputs, reference, labels: np.array([1.0, 1.0, np.nan])))
    broken = {"logits": np.where(np.arange(3)[:, None] == 1, np.nan, OUTPUTS["logits"])}
    np.testing.assert_array_equal(task.score(broken, OUTPUTS, None), [1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return np.ones((3, 1))", r"\(3, 1\)"),
        ("return 1.0", r"shape \(\)"),
        ("return np.array([0.0, 1.5, 1.0])", "1.5"),
        ("return np.array([0.0, -1.0, 1.0])", "-1"),
        ("return outputs['nothing']", "KeyError: 'nothing'"),
        ("return ['a', 'b', 'c']", "ValueError"),
    ],
)
def test_what_is_not_a_score_a_sample_is_refused(tmp_path, body, found):
    task = tasks.get(write(tmp_path / "bad.py", body))
    with pytest.raises(InputError, match=rf"{found}.*one number from 0 to 1 a sample"):
        task.check(OUTPUTS, np.zeros(3, np.int64))


@pytest.mark.parametrize("name", ["nowhere.py:score", "json:nothing", "json:__name__"])
def test_no_such_function_is_told(name):
    with pytest.raises(InputError, match=r"file\.py:function"):
        tasks.get(name)


def test_tune_takes_a_function_and_keeps_its_name_and_text(small_model, small_data, tmp_path):
    found = api.tune(small_model, small_data, tmp_path / "run", samples=8, max_trials=1, metric=right)
    plain = api.tune(small_model, small_data, tmp_path / "plain", samples=8, max_trials=1, metric="top1")
    assert found.summary.metric == f"{__name__}:right"
    assert found.summary.metric_text == "Share of right classes. And more text"
    ours, theirs = ({c.id: c.final for c in run.candidates if isinstance(c.final, Measured)} for run in (found, plain))
    assert set(ours) == set(theirs)
    for id, outcome in ours.items():
        np.testing.assert_array_equal(outcome.scores, theirs[id].scores)


def test_changed_code_is_measured_anew_in_the_same_run(small_model, small_data, tmp_path):
    name = write(tmp_path / "mine.py", "return np.full(len(labels), 0.25)")
    options = {"samples": 8, "max_trials": 1, "metric": name}
    assert api.tune(small_model, small_data, tmp_path / "run", **options).summary.candidates[0].final.score == 0.25
    write(tmp_path / "mine.py", "return np.full(len(labels), 0.75)")
    tasks._function.load_task.cache_clear()  # as in a new process
    assert api.tune(small_model, small_data, tmp_path / "run", **options).summary.candidates[0].final.score == 0.75


def test_evaluate_and_the_report_tell_it(small_model, small_data, tmp_path):
    name = write(tmp_path / "mine.py", "return np.full(len(labels), 0.5)")
    found = api.evaluate(small_model, [small_model], small_data, metric=name)
    assert found.metric == name
    assert next(iter(found.outcomes.values())).score == 0.5
    run = api.tune(small_model, small_data, tmp_path / "run", samples=8, max_trials=1, metric=name)
    assert report_document(run.summary)["task"]["description"] == "A score"
