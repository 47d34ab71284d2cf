import numpy as np
import pytest

from quantsieve.data import InputSpec, open_samples
from quantsieve.data.arrays import ArraySamples, from_arrays
from quantsieve.errors import InputError

IDS = InputSpec("input_ids", "int64", ("batch", "seq"))
MASK = InputSpec("attention_mask", "int64", ("batch", "seq"))
X = InputSpec("x", "float32", ("batch", 3, 4, 4))


def ids(num_samples=5, dtype=np.int64):
    return np.arange(num_samples * 6, dtype=dtype).reshape(num_samples, 6)


def test_an_npz_feeds_arrays_by_name_and_labels(tmp_path):
    np.savez(tmp_path / "data.npz", input_ids=ids(), attention_mask=ids() % 2, labels=np.arange(5))
    samples = open_samples(tmp_path / "data.npz", [IDS, MASK])
    assert (len(samples), samples.name, samples.notes) == (5, "data.npz", ())
    assert samples.labels.tolist() == [0, 1, 2, 3, 4]
    assert samples.labels.dtype == np.int64
    assert not samples.labels.flags.writeable
    feed = samples.feed(2)
    np.testing.assert_array_equal(feed["input_ids"], ids()[2:3])
    np.testing.assert_array_equal(feed["attention_mask"], ids()[2:3] % 2)


def test_an_npy_feeds_the_only_input_of_a_model(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((3, 3, 4, 4), np.float32))
    samples = open_samples(str(tmp_path / "x.npy"), [X])
    assert len(samples) == 3
    assert samples.labels is None
    assert samples.feed(0)["x"].shape == (1, 3, 4, 4)


def test_an_npy_is_refused_for_a_model_with_two_inputs(tmp_path):
    np.save(tmp_path / "x.npy", ids())
    with pytest.raises(InputError, match=r"npz file with arrays for the inputs 'input_ids', 'attention_mask'"):
        open_samples(tmp_path / "x.npy", [IDS, MASK])


def test_an_unnamed_array_of_savez_feeds_the_only_input(tmp_path):
    np.savez(tmp_path / "x.npz", np.ones((3, 3, 4, 4), np.float32))
    assert len(open_samples(tmp_path / "x.npz", [X])) == 3


@pytest.mark.parametrize("key", ["labels", "label", "y"])
def test_labels_lie_under_any_of_three_names(key):
    assert from_arrays({"input_ids": ids(), key: np.arange(5)}, [IDS]).labels.tolist() == [0, 1, 2, 3, 4]


def test_an_input_named_y_is_an_input_and_no_label():
    spec = InputSpec("y", "float32", ("batch",))
    samples = from_arrays({"y": np.ones(4, np.float32)}, [spec])
    assert samples.labels is None
    assert samples.feed(0)["y"].shape == (1,)


def test_a_column_of_labels_and_whole_floats_are_labels():
    samples = from_arrays({"input_ids": ids(), "y": np.arange(5.0).reshape(5, 1)}, [IDS])
    assert samples.labels.tolist() == [0, 1, 2, 3, 4]
    assert samples.notes == ("labels were cast from float64 to int64",)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.eye(5), r"labels of shape \(5, 5\)"),
        (np.arange(4), r"5 labels, one a sample, found labels of shape \(4,\)"),
        (np.full(5, 0.5), "whole numbers as labels"),
        (np.array(list("abcde")), "whole numbers as labels"),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused(labels, message):
    with pytest.raises(InputError, match=message):
        from_arrays({"input_ids": ids(), "labels": labels}, [IDS])


def test_a_wrong_name_is_refused_with_the_nearest_one():
    with pytest.raises(InputError, match=r"Expected arrays named 'input_ids', found 'inputs_id'.*mean 'input_ids'"):
        from_arrays({"inputs_id": ids()}, [IDS])


def test_a_missing_array_is_named():
    with pytest.raises(InputError, match="No array 'attention_mask'"):
        from_arrays({"input_ids": ids()}, [IDS, MASK])


def test_misspelt_labels_are_refused_rather_than_dropped():
    with pytest.raises(InputError, match="'lables'"):
        from_arrays({"input_ids": ids(), "lables": np.arange(5)}, [IDS])


@pytest.mark.parametrize(
    ("found", "wanted"), [("float64", "float32"), ("int32", "int64"), ("uint8", "float32"), ("bool", "int64")]
)
def test_casts_that_keep_the_values_are_done_with_a_note(found, wanted):
    spec = InputSpec("x", wanted, ("batch", 2))
    samples = from_arrays({"x": np.ones((3, 2), found)}, [spec])
    assert samples.feed(0)["x"].dtype == np.dtype(wanted)
    assert samples.notes == (f"'x' was cast from {found} to {wanted}",)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [("int64", "int32"), ("float32", "int64"), ("int64", "float32"), ("float32", "uint8"), ("int64", "str")],
)
def test_casts_that_could_change_values_are_refused(found, wanted):
    with pytest.raises(InputError, match=f"of {wanted}.*found an array of {found}"):
        from_arrays({"x": np.ones((3, 2), found)}, [InputSpec("x", wanted, ("batch", 2))])


def test_float64_beyond_float32_is_refused_with_the_value():
    with pytest.raises(InputError, match="found 1e\\+300"):
        from_arrays({"x": np.array([[1.0], [1e300]])}, [InputSpec("x", "float32", ("batch", 1))])


def test_infinite_float64_may_be_cast():
    samples = from_arrays({"x": np.array([[-np.inf]])}, [InputSpec("x", "float32", ("batch", 1))])
    assert samples.feed(0)["x"][0, 0] == -np.inf


def test_a_wrong_shape_is_refused_with_the_expected_one():
    with pytest.raises(InputError, match=r"\[n, 3, 4, 4\] for input 'x'.*found one of \[5, 4, 4, 3\]"):
        from_arrays({"x": np.ones((5, 4, 4, 3), np.float32)}, [X])


def test_a_fixed_batch_of_one_keeps_the_leading_axis():
    spec = InputSpec("x", "float32", (1, 2))
    samples = from_arrays({"x": np.arange(8, dtype=np.float32).reshape(4, 2)}, [spec])
    np.testing.assert_array_equal(samples.feed(3)["x"], [[6, 7]])


def test_a_fixed_batch_above_one_takes_whole_feeds():
    spec = InputSpec("x", "float32", (4, 2))
    samples = from_arrays({"x": np.zeros((5, 4, 2), np.float32)}, [spec])
    assert (len(samples), samples.feed(0)["x"].shape) == (5, (4, 2))
    with pytest.raises(InputError, match=r"\[n, 4, 2\]"):
        from_arrays({"x": np.zeros((8, 2), np.float32)}, [spec])


def test_an_input_without_axes_takes_one_value_a_sample():
    samples = from_arrays({"t": np.arange(3, dtype=np.float32)}, [InputSpec("t", "float32", ())])
    assert samples.feed(2)["t"].shape == ()
    assert samples.feed(2)["t"] == 2


def test_strings_are_fed_as_objects(tmp_path):
    np.savez(tmp_path / "text.npz", text=np.array([["good"], ["bad film"]]))
    feed = open_samples(tmp_path / "text.npz", [InputSpec("text", "str", ("batch", 1))]).feed(1)
    assert feed["text"].dtype == object
    assert feed["text"].tolist() == [["bad film"]]


def test_arrays_of_different_lengths_are_refused_with_the_counts():
    with pytest.raises(InputError, match="5 in 'input_ids', 4 in 'attention_mask'"):
        from_arrays({"input_ids": ids(5), "attention_mask": ids(4)}, [IDS, MASK])


def test_no_samples_are_refused():
    with pytest.raises(InputError, match="at least one sample"):
        from_arrays({"input_ids": ids(0)}, [IDS])


def test_broken_files_are_refused_by_name(tmp_path):
    for name in ("a.npz", "a.npy"):
        (tmp_path / name).write_bytes(b"this is no array file")
        with pytest.raises(InputError, match=name):
            open_samples(tmp_path / name, [X])


def test_pickled_objects_are_never_loaded(tmp_path):
    np.savez(tmp_path / "o.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(InputError, match="without object arrays"):
        open_samples(tmp_path / "o.npz", [X])


def test_a_truncated_npz_is_refused(tmp_path):
    np.savez(tmp_path / "t.npz", x=np.ones((9, 3, 4, 4), np.float32))
    data = (tmp_path / "t.npz").read_bytes()
    (tmp_path / "t.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"t.npz, which numpy cannot read"):
        open_samples(tmp_path / "t.npz", [X])


def test_the_fingerprint_follows_content_and_not_the_place(tmp_path):
    base = {"input_ids": ids(), "labels": np.arange(5)}
    np.savez(tmp_path / "a.npz", **base)
    (tmp_path / "sub").mkdir()
    np.savez(tmp_path / "sub" / "b.npz", **dict(reversed(base.items())))
    same = {
        open_samples(tmp_path / "a.npz", [IDS]).fingerprint(),
        open_samples(tmp_path / "sub" / "b.npz", [IDS]).fingerprint(),
        from_arrays(base, [IDS]).fingerprint(),
    }
    assert len(same) == 1
    changed = [
        from_arrays({**base, "input_ids": ids() + 1}, [IDS]).fingerprint(),
        from_arrays({**base, "labels": np.arange(5)[::-1]}, [IDS]).fingerprint(),
        from_arrays({"input_ids": ids()}, [IDS]).fingerprint(),
        from_arrays({**base, "input_ids": ids().astype(np.int32)}, [IDS]).fingerprint(),
    ]
    assert len(same | set(changed)) == 5
    assert all(len(digest) == 64 for digest in same)


def test_feeds_are_contiguous_and_refuse_writes():
    array = np.asfortranarray(np.random.default_rng(0).normal(size=(3, 3, 4, 4)).astype(np.float32))
    feed = ArraySamples({"x": array}, [X]).feed(1)["x"]
    np.testing.assert_array_equal(feed, array[1:2])
    assert feed.flags.c_contiguous
    assert not feed.flags.writeable
    assert array.flags.writeable
