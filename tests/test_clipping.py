"""Ranges by percentile, entropy and squared error: each against a slow way that holds all values at once."""

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from quantsieve import calibrate as calibrating
from quantsieve.calibrate import ClippedRange, Range, calibrate
from quantsieve.clipping import HALF, METHODS, MINMAX, Histogram, Method, clipped, rounding_errors
from quantsieve.errors import UsageError
from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.units import find_structure
from quantsieve.run.codec import decode, encode
from quantsieve.run.spec import Settings
from small_network import LAYERS

CLIPPING = METHODS[1:]
DRAWS = {
    "normal": lambda draw, n: draw.standard_normal(n),
    "after Relu": lambda draw, n: np.maximum(draw.standard_normal(n), 0),
    "heavy tails": lambda draw, n: draw.standard_t(2, n),
    "one side heavy": lambda draw, n: np.exp(1.5 * draw.standard_normal(n)) - 0.3,
    "hard swish": lambda draw, n: (lambda x: x * np.clip(x / 6 + 0.5, 0, 1))(3 * draw.standard_normal(n)),
    "negative": lambda draw, n: -np.abs(draw.standard_t(3, n)),
    "far from zero": lambda draw, n: 50 + draw.standard_normal(n),
}
HEAVY = ("heavy tails", "one side heavy", "negative")


def drawn(name: str, count: int = 20_000) -> np.ndarray:
    return DRAWS[name](np.random.default_rng(len(name)), count).astype(np.float32)


def histogram_of(*batches: np.ndarray) -> Histogram:
    found = Histogram()
    for batch in batches:
        if batch.size:
            found.add(batch, float(batch.min()), float(batch.max()))
    return found


def ends(values: np.ndarray, method: Method, histogram: Histogram | None = None) -> tuple[float, float]:
    return clipped(histogram or histogram_of(values), float(values.min()), float(values.max()), method)


def squared_error(values: np.ndarray, low: float, high: float) -> float:
    """Mean over all values of the squared error of uint8 rounding, in float64."""
    form = Range(low, high, 0).affine("uint8")
    scale, zero = float(form.scale), form.zero_point
    wide = values.astype(np.float64)
    rounded = (np.clip(np.rint(wide / scale) + zero, 0, 255) - zero) * scale
    return float(np.square(wide - rounded).mean())


def any_floats(least: int = 1):
    elements = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return arrays.arrays(np.float32, st.integers(least, 40), elements=elements)


# --- the histogram ------------------------------------------------------------------------------------------


@given(any_floats())
def test_every_value_is_in_the_bin_of_its_magnitude_and_zeros_in_none(values):
    found = histogram_of(values)
    for side, part in zip(found.sides(), (-values[values < 0], values[values > 0]), strict=True):
        bins = np.floor(part.astype(np.float64) / found.width).astype(int)
        assert side.tolist() == np.bincount(bins, minlength=HALF).tolist()


@given(any_floats(), st.randoms(use_true_random=False))
def test_neither_order_nor_batches_change_the_counts(values, random):
    whole, order = histogram_of(values), random.sample(range(len(values)), len(values))
    cuts = sorted(random.choices(range(len(values) + 1), k=3))
    split = histogram_of(*np.split(values[order], cuts))
    assert [side.tolist() for side in whole.sides()] == [side.tolist() for side in split.sides()]
    assert whole.width == split.width


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("method", CLIPPING)
def test_a_range_is_the_same_however_samples_are_batched(name, method):
    values = drawn(name)
    batched = histogram_of(*np.split(values, [1, 2, 100, 9000]))
    assert ends(values, Method(method), batched) == ends(values, Method(method))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_histogram_takes_floats_of_any_width_and_shape(kind):
    values = drawn("normal", 1200).astype(kind).reshape(3, 20, 20)
    negative, positive = histogram_of(values[:, ::2]).sides()
    assert negative.sum() + positive.sum() == np.count_nonzero(values[:, ::2])


def test_memory_does_not_grow_with_values_or_their_range():
    few, many = histogram_of(np.float32([1])), histogram_of(drawn("heavy tails", 200_000), np.float32([1e30, -1e-30]))
    assert few._counts.nbytes == many._counts.nbytes == 8 * (2 * HALF - 1)


# --- each method against the slow way ----------------------------------------------------------------------------


@pytest.mark.parametrize("percentile", [50, 99, 99.9, 99.99, 100])
@pytest.mark.parametrize("name", DRAWS)
def test_a_percentile_is_that_of_the_values_of_each_side_within_a_bin(name, percentile):
    values, histogram = drawn(name), histogram_of(drawn(name))
    low, high = ends(values, Method("percentile", percentile), histogram)
    for found, side in ((-low, -values[values < 0]), (high, values[values > 0])):
        wanted = np.quantile(side, percentile / 100, method="inverted_cdf") if side.size else 0.0
        assert abs(found - wanted) <= histogram.width
    if percentile == 100:
        assert (low, high) == (min(float(values.min()), 0.0), max(float(values.max()), 0.0))


@pytest.mark.parametrize("name", DRAWS)
def test_entropy_finds_the_limit_that_a_loop_over_all_limits_finds(name):
    values = drawn(name)
    width = histogram_of(values).width
    magnitudes = np.abs(values[values != 0]).astype(np.float64)
    counts = np.histogram(magnitudes, bins=width * np.arange(HALF + 1))[0]
    levels = 128 if values.min() < 0 < values.max() else 256
    best, least = 0, math.inf
    for limit in range(levels, int(np.flatnonzero(counts)[-1]) + 2):
        if counts[:limit].sum() < 0.99 * counts.sum():
            continue
        reference = counts[:limit].astype(np.float64)
        level = np.arange(limit) * levels // limit
        filled = reference > 0
        bins = np.bincount(level, filled, levels)
        means = np.bincount(level, reference, levels) / np.maximum(bins, 1)
        candidate = np.where(filled, means[level], 0.0)
        reference[-1] += counts[limit:].sum()
        p, q = reference / reference.sum(), candidate / candidate.sum()
        if (p[q == 0] > 0).any():
            continue
        divergence = float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum())
        if divergence < least - 1e-12:
            best, least = limit, divergence
    low, high = ends(values, Method("entropy"))
    assert low == max(min(float(values.min()), 0.0), -best * width)
    assert high == min(max(float(values.max()), 0.0), best * width)


@pytest.mark.parametrize("name", DRAWS)
def test_the_error_told_from_the_histogram_is_that_of_the_values(name):
    values, histogram = drawn(name), histogram_of(drawn(name))
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    for share in (1.0, 0.6, 0.2, 0.05):
        told = rounding_errors(*histogram.sides(), histogram.width, [(low * share, high * share)])[0]
        told *= histogram.width**2 / len(values)
        assert told == pytest.approx(squared_error(values, low * share, high * share), rel=0.05)


@pytest.mark.parametrize("name", DRAWS)
def test_mse_is_as_good_as_the_best_of_all_pairs_of_ends(name):
    values = drawn(name)
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    shares = np.geomspace(1 / 64, 1, 40)
    pairs = {(low * a, high * b) for a in shares for b in shares}
    least = min(squared_error(values, *pair) for pair in pairs)
    assert squared_error(values, *ends(values, Method("mse"))) <= 1.03 * least


@pytest.mark.parametrize("name", DRAWS)
def test_the_error_of_mse_is_never_above_that_of_minmax_and_below_it_where_tails_are_heavy(name):
    values = drawn(name)
    whole, narrow = (squared_error(values, *ends(values, Method(method))) for method in ("minmax", "mse"))
    assert narrow < whole if name in HEAVY else narrow <= whole


def test_mse_takes_the_best_uniform_range_of_many_normal_values():
    """+-3.9 deviations for 256 levels, as the classic tables of uniform quantizers have it, not +-4.9."""
    low, high = ends(drawn("normal", 400_000), Method("mse"))
    assert (-low, high) == pytest.approx((3.92, 3.92), abs=0.12)


# --- every method -------------------------------------------------------------------------------------------


@settings(deadline=None)
@pytest.mark.parametrize("method", METHODS)
@given(any_floats())
def test_a_range_lies_within_that_of_the_values_with_zero_inside(method, values):
    low, high = ends(values, Method(method))
    assert min(float(values.min()), 0.0) <= low <= 0.0 <= high <= max(float(values.max()), 0.0)


@settings(deadline=None)
@pytest.mark.parametrize("method", METHODS)
@given(any_floats())
def test_the_zero_point_of_what_is_never_negative_is_0(method, values):
    low, high = ends(np.abs(values), Method(method))
    assert Range(low, high, 0).affine("uint8").zero_point == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("constant", [5.0, -0.3, 1e-38, 3.4e38])
def test_a_constant_keeps_its_value_as_the_end(method, constant):
    values = np.full(100, constant, np.float32)
    low, high = ends(values, Method(method))
    width = histogram_of(values).width
    assert (low, high) == pytest.approx((min(constant, 0), max(constant, 0)), rel=1e-6, abs=width)


@pytest.mark.parametrize("method", METHODS)
def test_zeros_alone_have_a_range_of_nothing(method):
    assert ends(np.zeros((2, 3), np.float32), Method(method)) == (0.0, 0.0)


@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_a_mask_of_the_most_negative_number_stays_in_the_range(method):
    values = np.concatenate([drawn("normal"), np.full(2000, np.finfo(np.float32).min)])
    assert ends(values, Method(method))[0] < -3e38


@given(any_floats(), st.sampled_from(CLIPPING))
@settings(deadline=None)
def test_shifting_the_unit_by_a_power_of_two_shifts_the_range(values, method):
    assume(1e-20 < np.abs(values).max() < 1e30)
    values = np.where(np.abs(values) < 1e-20, np.float32(0), values)
    assert tuple(4 * end for end in ends(values, Method(method))) == ends(4 * values, Method(method))


# --- names, facts and settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "percentile", "words"),
    [
        ("max", 99.99, "minmax, percentile, entropy, mse, found 'max'"),
        ("percentile", 0, "found 0"),
        ("percentile", 100.5, "found 100.5"),
        ("percentile", math.nan, "found nan"),
        ("mse", 99, "one with mse"),
    ],
)
def test_what_is_no_method_is_refused_in_one_paragraph(name, percentile, words):
    for made in (Method, lambda name, share: Settings(calibration_method=name, percentile=share)):
        with pytest.raises(UsageError, match=words):
            made(name, percentile)


def test_settings_of_minmax_are_stored_as_before_there_were_other_methods():
    assert not Settings().document().keys() & {"calibration_method", "percentile"}
    assert Settings(calibration_method="mse").document()["calibration_method"] == "mse"
    other = Settings(calibration_method="percentile", percentile=99).document()
    assert (other["calibration_method"], other["percentile"]) == ("percentile", 99)


@pytest.fixture(scope="module")
def executor(small_model):
    graph = Graph(ir.from_proto(onnx.shape_inference.infer_shapes(onnx.load(small_model))))
    return Executor(graph, find_structure(graph))


def calibrated(executor, samples, method, batch=5):
    parts = np.split(samples, range(batch, len(samples), batch))
    return calibrate(executor, [({"x": part}, len(part)) for part in parts], method=method)


def images(count=23):
    draw = np.random.default_rng(3)
    return (draw.standard_t(3, (count, 3, 8, 8)) / 2).astype(np.float32)


@pytest.mark.parametrize("method", [Method("percentile", 99), Method("entropy"), Method("mse")])
def test_facts_keep_both_ranges_and_8_bits_take_the_narrower(executor, method):
    whole, narrow = (calibrated(executor, images(), ranges) for ranges in (MINMAX, method))
    assert len(whole.ranges) > len(LAYERS)
    for root, full in whole.ranges.items():
        found = narrow.ranges[root]
        assert isinstance(found, ClippedRange) and type(full) is Range
        assert (found.low, found.high, found.non_finite) == (full.low, full.high, full.non_finite)
        assert [found.affine(form) for form in ("uint16", "dynamic")] == [
            full.affine(form) for form in ("uint16", "dynamic")
        ]
        assert found.affine("uint8") == Range(found.clipped_low, found.clipped_high, 0).affine("uint8")
    assert narrow.ranges["x"].affine("uint8").scale < whole.ranges["x"].affine("uint8").scale
    again = decode(*encode(narrow), calibrating.Calibration)
    assert again.ranges == narrow.ranges
    for name, mean in whole.mean_inputs.items():
        np.testing.assert_array_equal(narrow.mean_inputs[name], mean)


def test_facts_of_minmax_are_stored_as_before_there_were_other_methods(executor):
    document, _ = encode(calibrated(executor, images(), MINMAX))
    for row in document["ranges"].values():
        assert row.keys() == {"$fact", "low", "high", "non_finite"} and row["$fact"] == "Range"


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_with_values_that_are_not_finite_is_refused_as_ever(executor, method):
    samples = images()
    samples[3, 0, 0, 0], samples[4, 1, 1, 1] = -np.inf, np.nan
    collector = calibrating.Collector(executor, None, Method(method))
    collector.add({"x": samples}, len(samples))
    found = calibrating.Calibration({"x": collector._ranges["x"].range(Method(method))}, {}, {}, 23, ())
    assert found.refusal("x") == "x holds 2 values that are NaN or infinite"
    finite = samples[np.isfinite(samples)]
    assert (found.ranges["x"].low, found.ranges["x"].high) == (finite.min(), finite.max())
    nothing = calibrating.Collector(executor, None, Method(method))
    nothing.add({"x": np.full_like(samples, np.inf)}, len(samples))
    assert nothing._ranges["x"].range(Method(method)).non_finite == samples.size
