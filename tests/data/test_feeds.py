import numpy as np
import pytest
from onnxruntime.quantization import CalibrationDataReader

from quantsieve.data import InputSpec, open_samples
from quantsieve.data.feeds import FeedSamples
from quantsieve.errors import InputError

X = InputSpec("x", "float32", ("batch", 2))
FIXED = InputSpec("x", "float32", (3, 2))


class Reader(CalibrationDataReader):
    """Reuses one buffer for all feeds, as careless readers do."""

    def __init__(self, num_feeds, rows=1):
        self.num_feeds, self.buffer = num_feeds, np.zeros((rows, 2), np.float32)
        self.position = 0

    def get_next(self):
        if self.position == self.num_feeds:
            return None
        self.buffer[:] = self.position
        self.position += 1
        return {"x": self.buffer}


class RewindableReader(Reader):
    def rewind(self):
        self.position = 0


def values(samples):
    return [float(samples.feed(i)["x"][0, 0]) for i in range(len(samples))]


def test_a_reader_is_read_to_its_end_and_its_buffer_copied():
    samples = open_samples(Reader(4), [X])
    assert values(samples) == [0, 1, 2, 3]
    assert samples.labels is None


def test_a_reader_that_rewinds_is_read_whole_and_left_at_its_start():
    reader = RewindableReader(3)
    reader.get_next()
    assert values(open_samples(reader, [X])) == [0, 1, 2]
    assert reader.position == 0


def test_a_reader_that_was_read_before_is_refused():
    reader = Reader(1)
    reader.get_next()
    with pytest.raises(InputError, match="at least one feed, found none"):
        open_samples(reader, [X])


def test_a_generator_of_feeds_can_be_read_again_and_again():
    samples = open_samples(({"x": np.full((1, 2), i, np.float32)} for i in range(3)), [X])
    assert values(samples) == values(samples) == [0, 1, 2]


def test_batches_are_cut_into_single_samples_where_the_batch_is_dynamic():
    feeds = [{"x": np.arange(6, dtype=np.float32).reshape(3, 2)}, {"x": np.array([[9, 9]], np.float32)}]
    samples = open_samples(feeds, [X])
    assert values(samples) == [0, 2, 4, 9]
    assert samples.feed(1)["x"].shape == (1, 2)


def test_feeds_of_a_fixed_batch_stay_whole():
    samples = open_samples([{"x": np.zeros((3, 2), np.float32)}] * 2, [FIXED])
    assert (len(samples), samples.feed(0)["x"].shape, samples.notes) == (2, (3, 2), ())


def test_feeds_whose_first_axes_are_no_common_batch_stay_whole_with_a_note():
    inputs = [
        InputSpec("boxes", "float32", ("num_boxes", 4)),
        InputSpec("points", "float32", ("num_points", 2)),
    ]
    feed = {"boxes": np.zeros((3, 4), np.float32), "points": np.zeros((3, 2), np.float32)}
    samples = open_samples([feed], inputs)
    assert len(samples) == 1
    assert "taken whole" in samples.notes[0]


def test_one_note_tells_of_a_cast_in_many_feeds():
    samples = open_samples([{"x": np.zeros((1, 2))}] * 5, [X])
    assert samples.notes == ("'x' was cast from float64 to float32",)
    assert samples.feed(0)["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({"z": np.zeros((1, 2), np.float32)}, "'z' in feed 1 of feeds"),
        ({"x": np.zeros((1, 3), np.float32)}, r"shape \[1, 3\] in feed 1 of feeds"),
        ({"x": np.zeros((0, 2), np.float32)}, r"shape \[0, 2\] in feed 1"),
        ({"x": np.zeros((1, 2), np.int64)}, "an array of int64"),
        (np.zeros((1, 2), np.float32), "found ndarray as feed 1"),
    ],
)
def test_a_feed_that_does_not_fit_is_refused_with_its_number(feed, message):
    with pytest.raises(InputError, match=message):
        open_samples([{"x": np.zeros((1, 2), np.float32)}, feed], [X])


def test_feeds_beyond_the_memory_limit_are_refused():
    feeds = ({"x": np.zeros((1, 2), np.float32)} for _ in range(1000))
    with pytest.raises(InputError, match="more in the first 3 of feeds"):
        FeedSamples(feeds, [X], max_bytes=16)
    assert sum(1 for _ in feeds) == 997  # it stopped at once


def test_the_fingerprint_is_of_the_samples_and_not_of_how_they_were_batched():
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    whole = open_samples([{"x": rows}], [X])
    single = open_samples([{"x": rows[i : i + 1]} for i in range(3)], [X])
    assert whole.fingerprint() == single.fingerprint()
    assert whole.fingerprint() != open_samples([{"x": rows[::-1]}], [X]).fingerprint()
