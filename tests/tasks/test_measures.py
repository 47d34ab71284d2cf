import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantsieve.errors import InputError, ShapeMismatch
from quantsieve.tasks import disagreement, logit_mse, output_variance, sqnr_db

SEEDS = st.integers(0, 2**32 - 1)


def outputs(seed, num_samples=8):
    generator = np.random.default_rng(seed)
    return {
        "a": generator.normal(3, 2, (num_samples, 5)).astype(np.float32),
        "b": generator.normal(0, 100, (num_samples, 2, 3)).astype(np.float32),
        "ids": generator.integers(0, 9, (num_samples, 4)),
    }


def test_the_variance_of_an_output_is_over_all_elements():
    reference = outputs(0)
    found = output_variance(reference)
    assert found == {name: pytest.approx(np.var(reference[name].astype(np.float64))) for name in ("a", "b")}


def test_constant_outputs_have_a_unit_to_measure_by():
    constant = {"tens": np.full((1000, 3), 0.1), "zeros": np.zeros((4, 3), np.float32)}
    assert output_variance(constant) == {"tens": pytest.approx(0.01), "zeros": 1.0}


def test_logit_mse_is_the_mean_square_over_the_variance_averaged_over_outputs():
    reference = outputs(0)
    candidate = {"a": reference["a"] + 1, "b": reference["b"] * 1, "ids": reference["ids"] + 5}
    found = logit_mse(candidate, reference, {"a": 4.0, "b": 7.0})
    # Adding 1 in float32 rounds by 2^-22 at most for values below 16, so its square is off by 2^-21 relative.
    np.testing.assert_allclose(found, np.full(8, (1 / 4 + 0) / 2), rtol=2**-20)


@given(seed=SEEDS)
def test_logit_mse_of_a_constant_guess_at_the_mean_is_one(seed):
    reference = {"y": np.random.default_rng(seed).normal(5, 3, (50, 7))}
    guess = {"y": np.full((50, 7), reference["y"].mean())}
    assert logit_mse(guess, reference, output_variance(reference)).mean() == pytest.approx(1)


@given(seed=SEEDS, factor=st.floats(1e-3, 1e3))
def test_logit_mse_does_not_depend_on_the_scale_of_the_outputs(seed, factor):
    reference = {"y": np.random.default_rng(seed).normal(size=(6, 4))}
    candidate = {"y": reference["y"] + 0.1}
    scaled = ({"y": candidate["y"] * factor}, {"y": reference["y"] * factor})
    np.testing.assert_allclose(
        logit_mse(*scaled, output_variance(scaled[1])),
        logit_mse(candidate, reference, output_variance(reference)),
        rtol=1e-9,
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_sample_that_is_not_finite_is_infinitely_far(value):
    reference = outputs(0)
    candidate = {name: array.copy() for name, array in reference.items()}
    candidate["b"][3, 0, 1] = value
    found = logit_mse(candidate, reference, output_variance(reference))
    assert found[3] == np.inf
    assert np.all(np.delete(found, 3) == 0)


def test_measures_refuse_outputs_that_do_not_match():
    reference = outputs(0)
    with pytest.raises(ShapeMismatch, match="output 'b'"):
        logit_mse({**reference, "b": reference["b"][:, :1]}, reference, output_variance(reference))
    with pytest.raises(ShapeMismatch, match=r"\(2,\), found \(3,\)"):
        sqnr_db(np.ones(2), np.ones(3))
    with pytest.raises(InputError, match="'ids' of int64"):
        output_variance({"ids": reference["ids"]})


@given(seed=SEEDS)
def test_disagreement_and_agreement_add_up_to_one(seed):
    first, second = outputs(seed), outputs(seed + 1)
    same = first["a"].argmax(axis=1) == second["a"].argmax(axis=1)
    np.testing.assert_array_equal(disagreement(second, first), 1.0 - same)


def test_sqnr_is_ten_decibel_a_power_of_ten():
    signal = np.full(1000, 10, np.float32)
    assert sqnr_db(signal, signal + 1) == pytest.approx(20)
    assert sqnr_db(signal, np.zeros(1000, np.float32)) == 0


def test_sqnr_at_its_ends():
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    assert sqnr_db(ones, ones) == np.inf
    assert sqnr_db(zeros, zeros) == np.inf
    assert sqnr_db(zeros, ones) == -np.inf
    assert sqnr_db(ones, np.float32([1, np.nan, 1])) == -np.inf
    assert sqnr_db(ones, np.float32([1, np.inf, 1])) == -np.inf


def test_sqnr_sums_in_double_precision():
    # In float32 the sum of squares of 1e20 overflows.
    signal = np.full(4, 1e20, np.float32)
    assert sqnr_db(signal, signal * np.float32(1.1)) == pytest.approx(20, abs=1e-4)
