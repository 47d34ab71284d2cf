import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from quantsieve.data import InputSpec, Preprocess
from quantsieve.errors import InputError

NCHW = InputSpec("x", "float32", ("batch", 3, "h", "w"))
NUMBERS = st.floats(-1e6, 1e6, allow_nan=False).filter(lambda number: number != 0)
SIZES = st.tuples(st.integers(1, 4096), st.integers(1, 4096))
ANY = st.builds(
    Preprocess,
    mean=st.lists(NUMBERS, min_size=1, max_size=3).map(tuple),
    std=st.lists(NUMBERS, min_size=1, max_size=3).map(tuple),
    scale=NUMBERS,
    resize=st.none() | SIZES,
    crop=st.none() | SIZES,
    pad=st.none() | NUMBERS,
    layout=st.sampled_from([None, "nchw", "nhwc"]),
    color=st.sampled_from([None, "rgb", "bgr", "gray"]),
    interpolation=st.sampled_from(["nearest", "bilinear", "bicubic"]),
)


def image(height=4, width=6, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def spec(*shape, dtype="float32"):
    return InputSpec("x", dtype, shape)


@given(preprocess=ANY)
def test_toml_text_reads_back_to_an_equal_object(preprocess, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "preprocess.toml"
    path.write_text(preprocess.to_toml())
    assert Preprocess.from_toml(path) == preprocess


def test_a_short_side_survives_the_round_trip_as_one(tmp_path):
    preprocess = Preprocess(resize=256, crop=(224, 224))
    (tmp_path / "p.toml").write_text(preprocess.to_toml())
    assert Preprocess.from_toml(tmp_path / "p.toml") == preprocess


def test_texts_of_the_command_line_mean_what_toml_values_mean():
    texts = {
        "mean": "127",
        "std": "58.4,57.1, 57.4",
        "resize": "256",
        "crop": "224",
        "color": "BGR",
        "pad": None,
    }
    values = {"mean": 127, "std": [58.4, 57.1, 57.4], "resize": 256, "crop": [224, 224], "color": "bgr"}
    assert Preprocess.from_values(texts) == Preprocess.from_values(values)
    assert Preprocess.from_values({"resize": "32x100"}).resize == (32, 100)
    assert Preprocess.from_values({"crop": 7}).crop == (7, 7)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mena": 1}, "Did you mean 'mean'"),
        ({"mean": "a"}, "numbers such as 127"),
        ({"mean": True}, "numbers such as 127"),
        ({"std": "0"}, "std and scale other than 0"),
        ({"mean": "nan"}, "finite numbers"),
        ({"resize": "32x"}, "a short side such as 256"),
        ({"resize": "0"}, "sizes of at least 1 for resize"),
        ({"resize": 25.5}, "a short side such as 256"),
        ({"crop": "1x2x3"}, "a size such as 224"),
        ({"crop": [3, -1]}, "sizes of at least 1 for crop"),
        ({"layout": "nhcw"}, "layout nchw, nhwc, found 'nhcw'.*Did you mean"),
        ({"color": "red"}, "color rgb, bgr, gray"),
        ({"interpolation": "bicubik"}, "Did you mean 'bicubic'"),
        ({"color": 3}, "a name for color"),
        ({"pad": 114, "resize": 416}, "exact size HxW to pad to"),
        ({"mean": []}, "at least one value"),
    ],
)
def test_values_that_make_no_sense_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        Preprocess.from_values(values)


def test_a_bad_toml_file_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"absent.toml"):
        Preprocess.from_toml(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("mean = [1,")
    with pytest.raises(InputError, match=r"bad.toml"):
        Preprocess.from_toml(tmp_path / "bad.toml")
    (tmp_path / "name.toml").write_text("means = 1")
    with pytest.raises(InputError, match=r"'means' in name.toml"):
        Preprocess.from_toml(tmp_path / "name.toml")


def test_pixels_are_normalised_a_channel():
    picture = image()
    mean, std = np.float32([1, 2, 3]), np.float32([10, 20, 30])
    found = Preprocess(mean=(1, 2, 3), std=(10, 20, 30)).apply(picture, NCHW)
    expected = ((np.asarray(picture, np.float32) - mean) / std).transpose(2, 0, 1)[None]
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, expected)


def test_the_scale_comes_before_mean_and_std():
    picture = image()
    found = Preprocess(scale=1 / 255, mean=(0.5,), std=(0.25,)).apply(picture, NCHW)
    expected = (np.asarray(picture, np.float64) / 255 - 0.5) / 0.25
    # float32 arithmetic on values up to 2: three roundings of at most 2^-24 relative, times 1 / std.
    np.testing.assert_allclose(found[0].transpose(1, 2, 0), expected, rtol=0, atol=3 * 4 * 2**-24)


def test_bgr_turns_the_channels_before_mean_is_taken():
    picture = image()
    found = Preprocess(color="bgr", mean=(1, 2, 3)).apply(picture, NCHW)
    np.testing.assert_array_equal(found[0, 0], np.asarray(picture, np.float32)[:, :, 2] - 1)


def test_the_layout_follows_the_channels_of_the_input():
    assert Preprocess().apply(image(), spec(1, 3, 4, 6)).shape == (1, 3, 4, 6)
    assert Preprocess().apply(image(), spec(1, 4, 6, 3)).shape == (1, 4, 6, 3)
    assert Preprocess().apply(image(), spec("b", 4, 6, 1)).shape == (1, 4, 6, 1)
    nhwc = Preprocess().apply(image(), spec(1, "h", "w", 3))
    np.testing.assert_array_equal(nhwc[0], np.asarray(image()))


def test_a_guessed_layout_is_told_and_a_given_one_is_not():
    assert "nhwc" in Preprocess().resolved(spec(1, 4, 6, 3))[1][0]
    assert "assumed" in Preprocess().resolved(spec(1, "c", "h", "w"))[1][0]
    assert Preprocess(layout="nhwc").resolved(spec(1, 4, 6, 3))[1] == ()


def test_one_channel_takes_gray():
    found = Preprocess().apply(image(), spec(1, 1, 4, 6))
    np.testing.assert_array_equal(found[0, 0], np.asarray(image().convert("L")))


def test_without_resize_the_fixed_size_of_the_model_is_taken():
    assert Preprocess().apply(image(40, 60), spec(1, 3, 7, 9)).shape == (1, 3, 7, 9)
    assert Preprocess().apply(image(40, 60), NCHW).shape == (1, 3, 40, 60)


@given(height=st.integers(1, 90), width=st.integers(1, 90), short=st.integers(1, 40))
def test_a_short_side_keeps_the_aspect(height, width, short):
    found = Preprocess(resize=short).apply(image(height, width), NCHW).shape[2:]
    assert min(found) == short
    # The long side is cut to an integer, so at most one pixel is lost.
    assert 0 <= short * max(height, width) / min(height, width) - max(found) < 1


def test_the_crop_is_in_the_middle_with_the_smaller_margin_first():
    pixels = np.arange(5 * 8, dtype=np.uint8).reshape(5, 8)
    found = Preprocess(crop=(2, 3)).apply(Image.fromarray(pixels), spec(1, 1, "h", "w"))
    np.testing.assert_array_equal(found[0, 0], pixels[1:3, 2:5])


def test_a_crop_alone_cuts_to_the_size_of_the_model_without_resizing():
    pixels = np.arange(5 * 8, dtype=np.uint8).reshape(5, 8)
    found = Preprocess(crop=(2, 3)).apply(Image.fromarray(pixels), spec(1, 1, 2, 3))
    np.testing.assert_array_equal(found[0, 0], pixels[1:3, 2:5])


def test_the_interpolation_is_the_one_asked_for():
    picture = image(8, 8)
    sampled = Preprocess(resize=(4, 4), interpolation="nearest").apply(picture, NCHW)
    assert set(np.unique(sampled)) <= set(np.unique(np.asarray(picture)))
    kinds = [Preprocess(resize=(5, 5), interpolation=name).apply(picture, NCHW) for name in ("bilinear", "bicubic")]
    assert not np.array_equal(*kinds)


def test_padding_keeps_the_aspect_and_fills_bottom_and_right():
    white = Image.new("RGB", (10, 5), (255, 255, 255))
    found = Preprocess(resize=(8, 8), pad=114).apply(white, NCHW)[0, 0]
    np.testing.assert_array_equal(found[:4], 255)
    np.testing.assert_array_equal(found[4:], 114)


def test_padding_with_the_mean_becomes_zero():
    found = Preprocess(pad=127.5, mean=(127.5,), std=(127.5,)).apply(image(4, 4), spec(1, 3, 4, 8))
    np.testing.assert_array_equal(found[..., 4:], 0)
    assert np.abs(found[..., :4]).min() > 0


def test_uint8_inputs_take_raw_pixels_only():
    uint8 = spec(1, "h", "w", 3, dtype="uint8")
    found = Preprocess().apply(image(), uint8)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found[0], np.asarray(image()))
    with pytest.raises(InputError, match="raw pixels"):
        Preprocess(mean=(127.0,)).apply(image(), uint8)


def test_int8_inputs_take_shifted_pixels_and_refuse_those_beyond():
    int8 = spec(1, "h", "w", 3, dtype="int8")
    found = Preprocess(mean=(128.0,)).apply(image(), int8)
    np.testing.assert_array_equal(found[0], np.asarray(image()).astype(np.int16) - 128)
    with pytest.raises(InputError, match=r"within -128\.\.127.*found 0\.\.255"):
        Preprocess().apply(image(), int8)


def test_integer_inputs_are_rounded_half_to_even():
    gray = Image.fromarray(np.array([[1, 3, 5, 6]], dtype=np.uint8))
    found = Preprocess(std=(2.0,)).apply(gray, spec(1, 1, "h", "w", dtype="int32"))
    np.testing.assert_array_equal(found[0, 0, 0], [0, 2, 2, 3])


def test_float16_inputs_take_float16():
    assert Preprocess().apply(image(), spec(1, 3, "h", "w", dtype="float16")).dtype == np.float16


def test_sixteen_bit_gray_is_scaled_and_not_clipped():
    deep = Image.fromarray(np.array([[0, 32768], [65535, 256]], dtype=np.uint16))
    found = Preprocess().apply(deep, spec(1, 1, "h", "w"))
    np.testing.assert_array_equal(found[0, 0], [[0, 128], [255, 1]])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_every_common_mode_becomes_three_channels(mode):
    assert Preprocess().apply(image().convert(mode), NCHW).shape == (1, 3, 4, 6)


@pytest.mark.parametrize(
    ("preprocess", "shape", "message"),
    [
        (Preprocess(resize=16), (1, 3, 16, 16), r"\[1, 3, 16, 16\], found \[1, 3, 16, 24\]"),
        (Preprocess(crop=(5, 5)), (1, 3, "h", "w"), "at least 5x5 pixels to crop from, found 4x6"),
        (Preprocess(), (2, 3, 4, 6), r"\[2, 3, 4, 6\], found \[1, 3, 4, 6\]"),
        (Preprocess(color="gray"), (1, 3, 4, 6), r"found \[1, 1, 4, 6\]"),
        (Preprocess(), (1, 784), "an input of 4 axes"),
        (Preprocess(), (1, 4, 6, 6), "1 or 3 channels"),
        (Preprocess(mean=(1, 2)), (1, 3, 4, 6), "1 or 3 values for mean, found 2"),
        (Preprocess(std=(1, 2, 3)), (1, 1, 4, 6), "1 or 1 values for std, found 3"),
        (Preprocess(pad=0), (1, 3, "h", "w"), "exact size HxW to pad to"),
    ],
)
def test_an_image_that_cannot_fit_the_input_is_refused(preprocess, shape, message):
    with pytest.raises(InputError, match=message):
        preprocess.apply(image(), spec(*shape))


def test_images_are_refused_for_an_input_of_strings():
    with pytest.raises(InputError, match="an input of numbers for images"):
        Preprocess().apply(image(), spec(1, 3, 4, 6, dtype="str"))
