import numpy as np
import pytest

from quantsieve.data import InputSpec, SyntheticSamples
from quantsieve.errors import InputError, UsageError

IDS = InputSpec("input_ids", "int64", ("batch", "seq"))
MASK = InputSpec("attention_mask", "int64", ("batch", "seq"))


def test_symbolic_axes_get_their_size_by_name_and_the_batch_is_one():
    image = InputSpec("x", "float32", ("N", 3, "h", None))
    samples = SyntheticSamples([IDS, MASK, image], 2, sizes={"seq": 7})
    shapes = {name: array.shape for name, array in samples.feed(0).items()}
    assert shapes == {"input_ids": (1, 7), "attention_mask": (1, 7), "x": (1, 3, 16, 16)}


def test_values_suit_their_types():
    specs = [
        IDS,
        MASK,
        InputSpec("f", "float16", (1, 1000)),
        InputSpec("b", "bool", (1, 100)),
        InputSpec("s", "str", (1, 100)),
        InputSpec("image", "uint8", (1, 16, 16, 3)),
    ]
    feed = SyntheticSamples(specs, 1, sizes={"seq": 200}).feed(0)
    assert set(np.unique(feed["input_ids"])) == set(range(10))
    assert set(np.unique(feed["attention_mask"])) == {0, 1}
    assert feed["f"].dtype == np.float16
    # Standard normal: the mean of 1000 values deviates by 1/sqrt(1000) = 0.03, so 5 deviations are 0.16.
    assert abs(feed["f"].astype(np.float64).mean()) < 0.16
    assert feed["f"].astype(np.float64).std() == pytest.approx(1, abs=0.12)
    assert feed["b"].dtype == np.bool_
    assert set(np.unique(feed["b"])) == {False, True}
    assert feed["s"].dtype == object
    assert all(isinstance(text, str) for text in feed["s"].flat)
    assert feed["image"].max() > 200


def test_a_mask_never_hides_everything():
    samples = SyntheticSamples([InputSpec("mask", "int64", (1, 1))], 20)
    assert all(samples.feed(i)["mask"][0, 0] == 1 for i in range(20))


def test_inputs_without_axes_are_made_too():
    specs = [InputSpec("t", "float32", ()), InputSpec("mask", "int64", ())]
    assert {array.shape for array in SyntheticSamples(specs, 1).feed(0).values()} == {()}


def test_a_sample_depends_on_the_seed_and_its_number_only():
    inputs = [InputSpec("x", "float32", (1, 4))]
    samples = SyntheticSamples(inputs, 3, seed=5)
    last = samples.feed(2)["x"]
    np.testing.assert_array_equal(SyntheticSamples(inputs, 9, seed=5).feed(2)["x"], last)
    assert not np.array_equal(samples.feed(1)["x"], last)
    assert not np.array_equal(SyntheticSamples(inputs, 3, seed=6).feed(2)["x"], last)


def test_inputs_of_equal_shape_get_different_values():
    feed = SyntheticSamples([InputSpec("a", "float32", (1, 4)), InputSpec("b", "float32", (1, 4))], 1).feed(0)
    assert not np.array_equal(feed["a"], feed["b"])


def test_synthetic_samples_say_that_they_are():
    samples = SyntheticSamples([IDS], 1)
    assert samples.synthetic
    assert "synthetic" in samples.notes[0]


def test_the_fingerprint_tells_seeds_and_sizes_apart():
    made = [
        SyntheticSamples([IDS], 4),
        SyntheticSamples([IDS], 4, seed=1),
        SyntheticSamples([IDS], 5),
        SyntheticSamples([IDS], 4, sizes={"seq": 3}),
    ]
    assert len({samples.fingerprint() for samples in made}) == 4
    assert SyntheticSamples([IDS], 4).fingerprint() == made[0].fingerprint()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_samples": 0}, UsageError, "at least one synthetic sample"),
        ({"num_samples": 1, "seed": -1}, UsageError, "seed of 0 or more"),
        ({"num_samples": 1, "sizes": {"sequ": 3}}, InputError, "Did you mean 'seq'"),
        ({"num_samples": 1, "sizes": {"seq": 0}}, InputError, "at least 1 for axis 'seq'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        SyntheticSamples([IDS], **arguments)


@pytest.mark.parametrize("dtype", ["complex64", "bfloat16x"])
def test_types_that_cannot_be_made_up_are_refused(dtype):
    with pytest.raises(InputError, match=dtype):
        SyntheticSamples([InputSpec("x", dtype, (1, 2))], 1)
