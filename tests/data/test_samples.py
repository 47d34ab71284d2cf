import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantsieve.data import Cached, InputSpec, Samples, SyntheticSamples, batches
from quantsieve.data.feeds import FeedSamples

X = InputSpec("x", "float32", ("batch", "width"))


def samples_of_widths(widths):
    return FeedSamples([{"x": np.full((1, width), i, np.float32)} for i, width in enumerate(widths)], [X])


class Counting:
    """Samples that count how often each was read."""

    def __init__(self, samples):
        self._samples = samples
        self.name, self.labels, self.notes = samples.name, samples.labels, samples.notes
        self.reads = [0] * len(samples)

    def __len__(self):
        return len(self._samples)

    def feed(self, index):
        self.reads[index] += 1
        return self._samples.feed(index)

    def fingerprint(self):
        return self._samples.fingerprint()


def test_every_source_answers_the_samples_protocol():
    samples = samples_of_widths([3])
    assert isinstance(samples, Samples)
    assert isinstance(Cached(samples, 0), Samples)
    assert isinstance(SyntheticSamples([X], 1), Samples)


def test_an_input_spec_reads_as_a_person_would_write_it():
    assert str(InputSpec("ids", "int64", ("batch", 128, None))) == "input 'ids' of int64 [batch, 128, ?]"


@given(widths=st.lists(st.integers(1, 3), max_size=12), limit=st.integers(1, 5))
def test_batches_hold_every_sample_once_in_order_and_join_equal_shapes_only(widths, limit):
    samples = samples_of_widths([1, *widths])
    seen = []
    for indices, feed in batches(samples, range(len(samples)), limit):
        assert 1 <= len(indices) <= limit
        assert indices.dtype == np.int64
        assert len({[1, *widths][i] for i in indices}) == 1
        np.testing.assert_array_equal(feed["x"][:, 0], indices)
        seen += indices.tolist()
    assert seen == list(range(len(samples)))


def test_batches_are_as_full_as_the_limit_allows():
    counts = [len(indices) for indices, _ in batches(samples_of_widths([2] * 7), range(7), 3)]
    assert counts == [3, 3, 1]


def test_batches_follow_the_order_of_the_indices():
    (indices, feed), *rest = batches(samples_of_widths([2] * 4), np.array([3, 0, 2]), 8)
    assert not rest
    assert indices.tolist() == [3, 0, 2]
    np.testing.assert_array_equal(feed["x"][:, 0], [3, 0, 2])


def test_samples_with_a_scalar_input_come_alone():
    spec = InputSpec("threshold", "float32", ())
    samples = FeedSamples([{"threshold": np.float32(0.5)}] * 3, [spec])
    assert [len(indices) for indices, _ in batches(samples, range(3), 8)] == [1, 1, 1]


def test_a_batch_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="limit of 0"):
        next(batches(samples_of_widths([2]), [0], 0))


def test_the_cache_reads_a_sample_once_while_it_fits():
    counting = Counting(samples_of_widths([4, 4, 4]))
    cached = Cached(counting, max_bytes=2 * 4 * 4)
    for _ in range(3):
        for index in range(3):
            np.testing.assert_array_equal(cached.feed(index)["x"], np.full((1, 4), index, np.float32))
    assert counting.reads == [1, 1, 3]
    assert cached.kept_bytes == 2 * 4 * 4


def test_the_cache_is_the_same_samples_for_a_report():
    samples = SyntheticSamples([InputSpec("x", "float32", (1, 2))], 3)
    cached = Cached(samples, 1000)
    assert (cached.name, cached.notes, len(cached)) == (samples.name, samples.notes, 3)
    assert cached.fingerprint() == samples.fingerprint()


def test_cached_arrays_refuse_writes_and_names_may_be_dropped():
    cached = Cached(samples_of_widths([2]), 1000)
    feed = cached.feed(0)
    with pytest.raises(ValueError, match="read-only"):
        feed["x"][0, 0] = 7
    del feed["x"]
    assert "x" in cached.feed(0)


def test_strings_count_towards_the_cache_limit():
    spec = InputSpec("text", "str", ("batch",))
    samples = FeedSamples([{"text": np.array(["a" * 10_000], dtype=object)}], [spec])
    cached = Cached(samples, max_bytes=1000)
    cached.feed(0)
    assert cached.kept_bytes == 0


def test_an_index_outside_is_refused_by_every_source():
    for samples in (samples_of_widths([2]), SyntheticSamples([X], 1)):
        for index in (-1, 1):
            with pytest.raises(IndexError, match="of 1"):
                samples.feed(index)


def test_onnxruntime_takes_read_only_feeds(doubling_session):
    samples = SyntheticSamples([InputSpec("x", "float32", ("batch", 3))], 2)
    for _, feed in batches(Cached(samples, 1000), [0, 1], 1):
        assert not feed["x"].flags.writeable
        np.testing.assert_array_equal(doubling_session.run(None, feed)[0], 2 * feed["x"])
