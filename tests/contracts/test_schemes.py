"""What every scheme promises, for every scheme that is found. A new file in schemes/ is under test at once."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, helper, numpy_helper

from quantsieve import schemes
from quantsieve.errors import UsageError
from quantsieve.model.execute import OWN_RANGE
from quantsieve.model.graph import Graph
from quantsieve.model.units import find_structure
from quantsieve.schemes._affine import BlockedWeight, activation_parameters, along_axis
from quantsieve.schemes._formats import Formats, integer_type

FORMATS = (
    Formats(),
    Formats(activation_type="s8"),
    Formats(activation_type="s8", symmetric_activations=True),
    Formats(weight_type="s7"),
    Formats(asymmetric_weights=True),
    Formats(weight_type="s7", asymmetric_weights=True),
)
# The schemes, and those of other weights that formats make of them.
MADE = tuple(dict.fromkeys(scheme.under(formats) for formats in FORMATS for scheme in schemes.discover()))
VARIANTS = tuple({(scheme.name, scheme.grid): scheme for scheme in reversed(MADE)}.values())
every_scheme = pytest.mark.parametrize("scheme", VARIANTS, ids=lambda s: f"{s.name}-{s.grid.least}..{s.grid.most}")

# Division and product round once each in float32, and |q| <= 127 (STYLE.md section 8).
HALF_STEP = 0.5 * (1 + 3.1e-5)
OPSET = 17
CHANNELS = 4
# By layer: op, attributes, shape of the input, shape of the weight, axis of the output channels.
KINDS = {
    "conv": ("Conv", {}, [1, 3, 8, 8], (CHANNELS, 3, 3, 3), 0),
    "up": ("ConvTranspose", {}, [1, 3, 8, 8], (3, CHANNELS, 2, 2), 1),
    "gemm": ("Gemm", {}, [2, CHANNELS], (CHANNELS, CHANNELS), 1),
    "gemm-t": ("Gemm", {"transB": 1}, [2, CHANNELS], (CHANNELS, CHANNELS), 0),
    "matmul": ("MatMul", {}, [2, CHANNELS], (CHANNELS, CHANNELS), 1),
}
every_kind = pytest.mark.parametrize("kind", KINDS)

magnitudes = st.sampled_from([1e-38, 1e-6, 1e-2, 1.0, 1e3])
input_scales = st.sampled_from([np.float32(1e-4), np.float32(0.02), np.float32(3.0)])
FRACTIONS = st.floats(-1, 1, width=32) | st.just(0.0)


def layer_of(kind):
    """The layer that the real model of that kind has, found as everywhere else."""
    op_type, attributes, read, shape, _ = KINDS[kind]
    weight = numpy_helper.from_array(np.ones(shape, np.float32), "w")
    bias = numpy_helper.from_array(np.ones(CHANNELS, np.float32), "b")
    inputs = ["x", "w"] if op_type == "MatMul" else ["x", "w", "b"]
    graph = helper.make_graph(
        [helper.make_node(op_type, inputs, ["y"], name=kind, **attributes)],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, read)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [weight, bias],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    (layer,) = find_structure(Graph(ir.from_proto(model))).layers
    return layer


LAYERS = {kind: layer_of(kind) for kind in KINDS}


def taken_by(scheme, kind):
    if scheme.refusal(LAYERS[kind], OPSET) is not None:
        pytest.skip("the scheme does not take it")


@st.composite
def weights(draw, kind):
    shape = KINDS[kind][3]
    return draw(arrays(np.float32, shape, elements=FRACTIONS)) * np.float32(draw(magnitudes))


def channel(array, axis, index):
    return np.take(array, index, axis=axis)


@pytest.mark.parametrize("scheme", MADE, ids=lambda s: f"{s.name}-{s.activation}")
def test_a_scheme_describes_itself(scheme):
    assert scheme.name
    assert scheme.name != schemes.FLOAT
    assert scheme.version >= 1
    assert scheme.description
    assert schemes.get(scheme.name).name == scheme.name
    assert scheme.activation in (None, *OWN_RANGE) or np.dtype(integer_type(scheme.activation)).kind in "ui"
    assert scheme.runs_as


def test_names_are_unique_and_sorted_by_their_modules():
    assert len(set(schemes.names())) == len(schemes.names())
    assert {"int8", "int8-channel"} <= set(schemes.names())


def test_an_unknown_scheme_is_a_usage_error_that_names_the_known_ones():
    with pytest.raises(UsageError, match=r"int8, int8-channel.*'int7'"):
        schemes.get("int7")


@every_scheme
@every_kind
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_weight_moves_by_at_most_half_its_scale(scheme, kind, data):
    taken_by(scheme, kind)
    layer, weight = LAYERS[kind], data.draw(weights(kind))
    made = scheme.quantize(layer, weight, None, np.float32(0.02)).weight
    step = made.steps()
    assert made.scale.dtype == np.float32
    assert np.all(made.scale > 0)
    assert np.all(np.abs(weight.astype(np.float64) - made.dequantized()) <= HALF_STEP * step.astype(np.float64))


@every_scheme
@every_kind
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_the_bound_holds_for_the_raised_scale_too_when_the_bias_needs_one(scheme, kind, data):
    taken_by(scheme, kind)
    layer, weight = LAYERS[kind], data.draw(weights(kind))
    bias = data.draw(arrays(np.float32, CHANNELS, elements=FRACTIONS)) * np.float32(5)
    made = scheme.quantize(layer, weight, bias, data.draw(input_scales)).weight
    step = made.steps()
    assert np.all(np.abs(weight.astype(np.float64) - made.dequantized()) <= HALF_STEP * step.astype(np.float64))


@every_scheme
@every_kind
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_zero_weights_and_zero_biases_stay_exactly_zero(scheme, kind, data):
    taken_by(scheme, kind)
    weight = data.draw(weights(kind))
    bias = data.draw(arrays(np.float32, CHANNELS, elements=FRACTIONS))
    made, made_bias = scheme.quantize(LAYERS[kind], weight, bias, np.float32(0.02)).dequantized()
    assert np.all(made[weight == 0] == 0)
    assert np.all(made_bias[bias == 0] == 0)


@every_scheme
@every_kind
def test_scales_differ_along_the_output_channels_or_not_at_all(scheme, kind):
    axis = KINDS[kind][4]
    taken_by(scheme, kind)
    weight = np.random.default_rng(0).uniform(-1, 1, KINDS[kind][3]).astype(np.float32)
    factors = np.asarray([1, 10, 100, 1000], np.float32)
    weight *= along_axis(factors, axis, weight.ndim)
    made = scheme.quantize(LAYERS[kind], weight, None, np.float32(0.02)).weight
    if isinstance(made, BlockedWeight):
        assert made.axis != axis
        assert made.scale.shape == (CHANNELS, 1)
        peaks = [np.abs(channel(weight, axis, i)).max() for i in range(CHANNELS)]
        np.testing.assert_allclose(made.scale[:, 0], np.asarray(peaks) / 7, rtol=1e-6)
        return
    if scheme.scale_axis(LAYERS[kind]) is None:
        assert made.axis is None
        assert made.scale.shape == ()
        np.testing.assert_allclose(made.scale, span(scheme.grid, weight), rtol=1e-6)
    else:
        assert made.axis == axis
        spans = [span(scheme.grid, channel(weight, axis, i)) for i in range(CHANNELS)]
        np.testing.assert_allclose(made.scale, spans, rtol=1e-6)


def span(grid, weights):
    """Of one scale: the range that it has to hold over that of the integers."""
    if grid.is_symmetric:
        return np.abs(weights).max() / grid.most
    return (max(0, weights.max()) - min(0, weights.min())) / (grid.most - grid.least)


@every_scheme
@every_kind
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_weights_stay_on_their_grid_and_use_it_to_its_ends(scheme, kind, data):
    taken_by(scheme, kind)
    made = scheme.quantize(LAYERS[kind], data.draw(weights(kind)), None, np.float32(0.02)).weight
    if isinstance(made, BlockedWeight):
        assert np.abs(made.values).max() <= 7
        return
    assert scheme.grid.least <= made.values.min()
    assert made.values.max() <= scheme.grid.most
    if made.axis is None and made.dequantized().any():
        zero = 0 if made.zero_point is None else int(made.zero_point)
        least, most = min(int(made.values.min()), zero), max(int(made.values.max()), zero)
        if scheme.grid.is_symmetric:
            assert max(-least, most) == scheme.grid.most
        else:  # the ends of the range are the ends of the grid, but for a rounded zero point
            assert most - least >= scheme.grid.most - scheme.grid.least - 1


@pytest.mark.parametrize("formats", [f for f in FORMATS if f.weight_type == "s7"])
def test_two_products_of_half_range_weights_fit_16_signed_bits(formats):
    """What kernels without VNNI add them in (RUNTIME.md section 3)."""
    for grid in (formats.weights, formats.products):
        assert 2 * 255 * max(-grid.least, grid.most) <= 2**15 - 1


@every_scheme
def test_symmetric_weights_have_no_zero_point_and_others_one_a_scale(scheme):
    weight = np.random.default_rng(1).normal(1, 1, KINDS["gemm"][3]).astype(np.float32)
    made = scheme.quantize(LAYERS["gemm"], weight, None, np.float32(0.02)).weight
    if isinstance(made, BlockedWeight) or scheme.grid.is_symmetric:
        assert getattr(made, "zero_point", None) is None
    else:
        assert made.zero_point.dtype == np.int8
        assert made.zero_point.shape == made.scale.shape
        assert (made.zero_point != 0).any()


def dequantize_with_onnxruntime(values, scale, zero_point, axis):
    elem = helper.np_dtype_to_tensor_dtype(values.dtype)
    graph = helper.make_graph(
        [helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **({"axis": axis} if axis is not None else {}))],
        "back",
        [helper.make_tensor_value_info("q", elem, values.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(scale), "s"), numpy_helper.from_array(np.asarray(zero_point), "z")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"q": values})[0]


@every_scheme
@every_kind
def test_signed_and_unsigned_integers_stand_for_the_same_numbers_in_onnxruntime(scheme, kind):
    weight = np.random.default_rng(1).normal(size=KINDS[kind][3]).astype(np.float32)
    taken_by(scheme, kind)
    weight.reshape(-1)[:2] = 10, -10  # both ends of the range
    made = scheme.quantize(LAYERS[kind], weight, None, np.float32(0.02)).weight
    if isinstance(made, BlockedWeight):
        pytest.skip("has no zero points; packed, see test_writing_formats.py")
    for is_unsigned in (False, True):
        values, zero_point = made.stored(is_unsigned)
        assert values.dtype == zero_point.dtype == (np.uint8 if is_unsigned else np.int8)
        back = dequantize_with_onnxruntime(values, made.scale, zero_point, made.axis)
        np.testing.assert_array_equal(back, made.dequantized())


@every_scheme
@every_kind
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_bias_fits_int32_with_room_for_the_sum_it_is_added_to(scheme, kind, data):
    taken_by(scheme, kind)
    weight = data.draw(weights(kind))
    bias = data.draw(arrays(np.float32, CHANNELS, elements=FRACTIONS)) * np.float32(5)
    input_scale = data.draw(input_scales)
    made = scheme.quantize(LAYERS[kind], weight, bias, input_scale)
    if scheme.activation in (None, *OWN_RANGE):  # it stays float
        np.testing.assert_array_equal(made.bias, bias)
        return
    assert made.bias.values.dtype == np.int32
    # 2**30 is asked for; the float32 scales that ensure it are rounded, by 2**-24 each.
    assert np.abs(made.bias.values.astype(np.int64)).max() <= 2**30 * (1 + 2**-21)
    # Half a step, and 24 bits of the product back in float32.
    limit = made.bias.scale.astype(np.float64) / 2 + np.abs(bias) * 2.0**-22
    assert np.all(np.abs(made.bias.dequantized().astype(np.float64) - bias) <= limit)


@every_scheme
@every_kind
def test_weights_near_one_millionth_do_not_lose_a_bias_of_five(scheme, kind):
    """onnxruntime's own quantizer overflows int32 here and the output is lost (RUNTIME.md section 1)."""
    taken_by(scheme, kind)
    weight = np.random.default_rng(2).uniform(-1e-6, 1e-6, KINDS[kind][3]).astype(np.float32)
    bias = np.full(CHANNELS, 5, np.float32)
    made = scheme.quantize(LAYERS[kind], weight, bias, np.float32(0.02))
    np.testing.assert_allclose(made.dequantized()[1], bias, rtol=1e-6)
    if scheme.activation not in (None, *OWN_RANGE):  # what the integer kernel assumes
        np.testing.assert_allclose(made.bias.scale, made.weight.scale * np.float32(0.02), rtol=1e-6)


@every_scheme
@every_kind
def test_a_layer_with_weights_is_taken_at_the_opset_of_prepared_models(scheme, kind):
    reason = scheme.refusal(LAYERS[kind], 13)
    if scheme.name in ("dynamic8", "w4") and kind in ("conv", "up"):
        assert reason is not None and "takes MatMul and Gemm" in reason
    else:
        assert reason is None


@every_scheme
def test_what_a_layer_refuses_its_schemes_refuse_with_the_same_reason(scheme):
    layer = replace(LAYERS["conv"], refusal="its weight is empty")
    assert scheme.refusal(layer, OPSET) == "its weight is empty"


@every_scheme
def test_an_opset_without_the_operators_is_refused_with_both_numbers(scheme):
    reason = scheme.refusal(LAYERS["gemm"], 9)
    if scheme.name == "w4":  # its operator is onnxruntime's own, at every opset
        assert reason is None
        return
    assert reason is not None
    assert scheme.name in reason
    assert "9" in reason


def test_a_layer_without_weights_is_taken_by_int8_and_refused_by_int8_channel_with_a_reason():
    layer = replace(LAYERS["conv"], op_type="Add", weight=None, bias=None, channel_axis=None)
    assert schemes.get("int8").refusal(layer, OPSET) is None
    assert schemes.get("int8-channel").refusal(layer, OPSET) == "Add has no weights to scale per channel"


bounds = st.floats(-1e6, 1e6, width=32)
FORMS = ("uint8", "int8", "uint16", "uint8-symmetric", "int8-symmetric")
every_form = pytest.mark.parametrize("form", FORMS)


def limits(form):
    """Least and largest integer that values of the form become."""
    found = np.iinfo(integer_type(form))
    return found.min + form.endswith("symmetric"), found.max


@every_form
@given(first=bounds, second=bounds)
def test_activations_of_a_range_hold_zero_exactly_and_move_by_half_a_step(form, first, second):
    low, high = min(first, second), max(first, second)
    scale, zero_point = activation_parameters(low, high, form)
    least, most = limits(form)
    assert scale.dtype == np.float32
    assert scale > 0
    assert least <= zero_point <= most
    assert (np.clip(np.rint(0 / scale) + zero_point, least, most) - zero_point) * scale == 0
    values = np.linspace(low, high, 50).astype(np.float32)
    rounded = (np.clip(np.rint(values / scale) + zero_point, least, most) - zero_point) * scale
    # The zero point is rounded, so at the ends up to half a step more is cut off; |q| is below the number of steps, and
    # two roundings are of float32.
    steps = 0.5 if form.endswith("symmetric") or not low < 0 < high else 1
    limit = float(scale) * (steps + (most - least) * 2.0**-22)
    assert np.all(np.abs(values.astype(np.float64) - rounded) <= limit)


@every_form
@given(first=st.floats(0, 1e6, width=32), second=st.floats(0, 1e6, width=32))
def test_the_zero_point_is_the_least_value_when_nothing_is_negative_and_the_middle_in_symmetric_forms(
    form, first, second
):
    _, zero_point = activation_parameters(min(first, second), max(first, second), form)
    found = np.iinfo(integer_type(form))
    assert zero_point == ((found.min + found.max + 1) // 2 if form.endswith("symmetric") else found.min)


@given(bounds, bounds)
def test_signed_and_unsigned_activations_hold_the_same_numbers(first, second):
    low, high = min(first, second), max(first, second)
    for end in ("", "-symmetric"):
        signed, unsigned = (activation_parameters(low, high, kind + end) for kind in ("int8", "uint8"))
        assert signed[0] == unsigned[0]
        assert signed[1] + 128 == unsigned[1]


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (0.0, 1e-40), (-1e-40, 1e-41)])
def test_a_range_too_small_for_a_scale_gets_the_scale_one(low, high):
    assert activation_parameters(low, high) == (np.float32(1), 0)
    assert activation_parameters(low, high, "int8") == (np.float32(1), -128)
    assert activation_parameters(low, high, "int8-symmetric") == (np.float32(1), 0)
