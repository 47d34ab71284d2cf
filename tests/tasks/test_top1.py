import numpy as np
import pytest

from quantsieve import tasks
from quantsieve.errors import InputError

TOP1 = tasks.get("top1")
LOGITS = np.float32([[1, 3, 2], [5, 4, 0], [0, 0, 1]])


def score(outputs, labels):
    return TOP1.score(outputs, outputs, np.array(labels)).tolist()


def test_a_sample_counts_when_its_highest_score_is_the_label():
    assert score({"y": LOGITS}, [1, 1, 2]) == [1, 0, 1]


def test_equal_scores_go_to_the_first_class():
    assert score({"y": np.zeros((2, 3), np.float32)}, [0, 1]) == [1, 0]


def test_axes_of_size_one_are_looked_through():
    assert score({"y": LOGITS.reshape(3, 3, 1, 1)}, [1, 1, 2]) == [1, 0, 1]


def test_the_first_output_of_rank_two_is_the_classes():
    maps, ids = np.zeros((3, 4, 4), np.float32), np.zeros((3, 7), np.int64)
    assert score({"maps": maps, "ids": ids, "y": LOGITS, "other": -LOGITS}, [1, 1, 2]) == [1, 0, 1]


def test_an_output_named_logits_comes_before_an_embedding():
    assert score({"embedding": -LOGITS, "logits": LOGITS}, [1, 1, 2]) == [1, 0, 1]


def test_the_candidate_is_scored_and_not_the_float_model():
    assert TOP1.score({"y": -LOGITS}, {"y": LOGITS}, np.array([1, 0, 2])).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 3], "labels from 0 to 2, the classes of output 'y', found 3"),
        ([-1, 9, 1], "found -1 and 1 more outside"),
        ([0, 1], "3 labels, found labels of shape"),
    ],
)
def test_labels_that_are_no_classes_of_the_model_are_refused(labels, message):
    with pytest.raises(InputError, match=message):
        TOP1.check({"y": LOGITS}, np.array(labels))


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 4, 5)])
def test_outputs_without_one_decision_a_sample_are_refused(shape):
    with pytest.raises(InputError, match=r"a float output \[n, classes\], found 'y' float32"):
        TOP1.check({"y": np.zeros(shape, np.float32)}, np.zeros(3, np.int64))
