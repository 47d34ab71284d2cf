"""From a decoded image to what the model takes: resize, crop, normalise, order the axes.

A pixel p in 0..255 becomes (p * scale - mean) / std, with mean and std in the model's channel order. What is
not given follows from the graph input: its fixed height and width, its channel count and where the channels
lie. Resizing is Pillow's, which smooths when it shrinks. The orientation tag of photos is not applied, alpha
is dropped: so do the evaluation pipelines whose published scores people compare with.
"""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from quantsieve.data._options import parse_option
from quantsieve.data.conform import fits, nearest, numpy_dtype
from quantsieve.data.samples import InputSpec, read_only
from quantsieve.errors import InputError

_LAYOUTS = ("nchw", "nhwc")
_COLORS = ("rgb", "bgr", "gray")
_INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
Size = tuple[int, int]  # height, width


@dataclass(frozen=True, slots=True)
class Preprocess:
    """How images become feeds.

    mean, std: one value for all channels, or one a channel. scale: factor on the pixel before them, for
    example 1/255. resize: int for the short side, (height, width) for exactly that, None to follow the model.
    crop: centre crop (height, width). pad: with an exact resize, keep the aspect, put the image top left and
    fill the rest with this pixel value. layout: 'nchw' or 'nhwc'; color: 'rgb', 'bgr' or 'gray'; None to
    follow the model. Raises InputError for values that make no sense.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 1.0
    resize: int | Size | None = None
    crop: Size | None = None
    pad: float | None = None
    layout: str | None = None
    color: str | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        numbers = (*self.mean, *self.std, self.scale, 0.0 if self.pad is None else self.pad)
        if not all(math.isfinite(number) for number in numbers):
            raise InputError("finite numbers for mean, std, scale and pad", f"{numbers}", "Correct them.")
        if 0 in self.std or self.scale == 0:
            raise InputError("std and scale other than 0", f"std {self.std}, scale {self.scale}", "Correct them.")
        if not self.mean or not self.std:
            raise InputError("at least one value for mean and for std", "none", "Drop the option or give a value.")
        for key, size in (("resize", self.resize), ("crop", self.crop)):
            sides = size if isinstance(size, tuple) else (size,)
            if size is not None and any(side is None or side < 1 for side in sides):
                raise InputError(f"sizes of at least 1 for {key}", f"{size}", "Correct it.")
        _check_choice("layout", self.layout, _LAYOUTS)
        _check_choice("color", self.color, _COLORS)
        _check_choice("interpolation", self.interpolation, tuple(_INTERPOLATIONS))
        if self.pad is not None and isinstance(self.resize, int):
            raise InputError("an exact size HxW to pad to", f"resize {self.resize}", "Give --resize HxW.")

    @classmethod
    def from_values(cls, values: Mapping[str, object], origin: str = "the options") -> "Preprocess":
        """From option names and values: numbers, lists, or texts such as '127,127,127' and '32x100'.

        None counts as not given. Raises InputError for unknown names and values of the wrong kind.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        parsed: dict[str, object] = {}
        for key, value in values.items():
            if key not in known:
                raise InputError(
                    "preprocessing options " + ", ".join(known),
                    f"'{key}' in {origin}",
                    f"Correct the name.{nearest(key, known)}",
                )
            if value is not None:
                parsed[key] = parse_option(key, value, origin)
        return cls(**parsed)  # type: ignore[arg-type]

    @classmethod
    def from_toml(cls, path: Path) -> "Preprocess":
        """The preprocessing in a TOML file of option names and values. Raises InputError if it has none."""
        try:
            text = path.read_text(encoding="utf-8")
            values = tomllib.loads(text)
        except OSError as error:
            raise InputError(
                "a TOML file with preprocessing options", f"{path} ({error.strerror})", "Correct the path."
            ) from error
        except ValueError as error:
            raise InputError("valid TOML", f"{path.name}: {error}", "Correct the line.") from error
        return cls.from_values(values, path.name)

    def to_toml(self) -> str:
        """TOML text that `from_toml` reads back to an equal object; options that are None are left out."""
        lines = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                shown = f'"{value}"' if isinstance(value, str) else repr(value)
                if isinstance(value, tuple):
                    shown = f"[{', '.join(repr(item) for item in value)}]"
                lines.append(f"{field.name} = {shown}\n")
        return "".join(lines)

    def resolved(self, spec: InputSpec) -> tuple["Preprocess", tuple[str, ...]]:
        """The same with what follows from the graph input filled in, and notes on what was guessed.

        Raises InputError when the input takes no images or contradicts the options.
        """
        if len(spec.shape) != 4:
            raise InputError(
                "an input of 4 axes, [batch, channels, height, width] or [batch, height, width, channels]",
                f"{spec}",
                "Feed this model from a .npz file.",
            )
        layout, notes = (self.layout, []) if self.layout else _guess_layout(spec)
        channels = spec.shape[1 if layout == "nchw" else 3]
        color = self.color or ("gray" if channels == 1 else "rgb")
        height, width = spec.shape[2:] if layout == "nchw" else spec.shape[1:3]
        resize, crop = self.resize, self.crop
        if resize is None and crop is None and isinstance(height, int) and isinstance(width, int):
            resize = (height, width)
        if self.pad is not None and not isinstance(resize, tuple):
            raise InputError("an exact size HxW to pad to", "none", "Give --resize HxW.")
        full = dataclasses.replace(self, layout=layout, color=color, resize=resize, crop=crop)
        full._check_values(spec)
        return full, tuple(notes)

    def _check_values(self, spec: InputSpec) -> None:
        """Raises InputError when mean or std do not match the channels, or pixels leave the dtype."""
        num_channels = 1 if self.color == "gray" else 3
        for key, given in (("mean", self.mean), ("std", self.std)):
            if len(given) not in (1, num_channels):
                raise InputError(
                    f"1 or {num_channels} values for {key}",
                    f"{len(given)}",
                    "Give one for all or one a channel.",
                )
        dtype = numpy_dtype(spec)
        if dtype.kind == "f":
            return
        if dtype.kind not in "iu":
            raise InputError("an input of numbers for images", f"{spec}", "Feed this model from a .npz file.")
        if dtype == np.uint8 and not self._is_identity():
            raise InputError(
                f"raw pixels for {spec}",
                f"mean {self.mean}, std {self.std}, scale {self.scale}",
                "Drop these options.",
            )
        ends = self._normalised(np.array([[[0.0] * num_channels, [255.0] * num_channels]], dtype=np.float32))
        limits = np.iinfo(dtype)
        if ends.min() < limits.min or ends.max() > limits.max:
            raise InputError(
                f"pixels within {limits.min}..{limits.max} for {spec}",
                f"{ends.min():g}..{ends.max():g} after mean, std and scale",
                "Correct these options; int8 inputs mostly want mean 128.",
            )

    def _is_identity(self) -> bool:
        return set(self.mean) == {0.0} and set(self.std) == {1.0} and self.scale == 1.0

    def check(self, size: Size, spec: InputSpec, origin: str) -> None:
        """Raises InputError when an image of this (height, width) does not end in the input's shape."""
        full, _ = self.resolved(spec)
        height, width = full._resized(size)
        if full.crop is not None:
            if full.crop[0] > height or full.crop[1] > width:
                raise InputError(
                    f"at least {full.crop[0]}x{full.crop[1]} pixels to crop from",
                    f"{height}x{width} from {origin}",
                    "Give a larger --resize or a smaller --crop.",
                )
            height, width = full.crop
        shape = full._shape(height, width)
        if not fits(shape, spec):
            raise InputError(
                f"{spec}",
                f"[{', '.join(map(str, shape))}] from {origin}",
                "Correct --resize, --crop, --color or --layout.",
            )

    def apply(self, image: Image.Image, spec: InputSpec) -> np.ndarray:
        """The image as the graph input takes it: [1, C, H, W] or [1, H, W, C], the input's dtype, read-only.

        float32 arithmetic; integer inputs are rounded half to even. Raises InputError when it does not fit.
        """
        full, _ = self.resolved(spec)
        self.check((image.height, image.width), spec, "the image")
        pixels = full._pixels(_eight_bit(image).convert("L" if full.color == "gray" else "RGB"))
        if full.color == "bgr":
            pixels = pixels[:, :, ::-1]
        dtype = numpy_dtype(spec)
        values = full._normalised(pixels)
        values = values.astype(dtype) if dtype.kind == "f" else np.rint(values).astype(dtype)
        if full.layout == "nchw":
            values = values.transpose(2, 0, 1)
        return read_only(values[np.newaxis])

    def _resized(self, size: Size) -> Size:
        """(height, width) of the canvas after resizing."""
        if self.resize is None:
            return size
        if isinstance(self.resize, tuple):
            return self.resize
        height, width = size
        # The long side is cut to an integer, as torchvision does.
        if height <= width:
            return self.resize, max(1, int(self.resize * width / height))
        return max(1, int(self.resize * height / width)), self.resize

    def _pixels(self, image: Image.Image) -> np.ndarray:
        """float32 [H, W, C] of pixel values after resize, padding and crop."""
        canvas = self._resized((image.height, image.width))
        inner = canvas
        if self.pad is not None:
            ratio = min(canvas[0] / image.height, canvas[1] / image.width)
            inner = tuple(  # type: ignore[assignment]
                max(1, min(limit, round(side * ratio)))
                for limit, side in zip(canvas, (image.height, image.width), strict=True)
            )
        if inner != (image.height, image.width):
            image = image.resize((inner[1], inner[0]), _INTERPOLATIONS[self.interpolation])
        pixels = np.asarray(image, dtype=np.float32).reshape(*inner, -1)
        if inner != canvas:
            filled = np.full((*canvas, pixels.shape[2]), self.pad, dtype=np.float32)
            filled[: inner[0], : inner[1]] = pixels
            pixels = filled
        if self.crop is not None:
            # An odd margin puts the smaller half first; rounding moves the crop by a pixel, which cost
            # 0.5 points of top-1 on 600 images of an EfficientNet.
            top, left = (canvas[0] - self.crop[0]) // 2, (canvas[1] - self.crop[1]) // 2
            pixels = pixels[top : top + self.crop[0], left : left + self.crop[1]]
        return pixels

    def _normalised(self, pixels: np.ndarray) -> np.ndarray:
        mean, std = np.array(self.mean, dtype=np.float32), np.array(self.std, dtype=np.float32)
        return (pixels * np.float32(self.scale) - mean) / std

    def _shape(self, height: int, width: int) -> tuple[int, ...]:
        channels = 1 if self.color == "gray" else 3
        return (1, channels, height, width) if self.layout == "nchw" else (1, height, width, channels)


def _guess_layout(spec: InputSpec) -> tuple[str, list[str]]:
    if spec.shape[1] in (1, 3):
        return "nchw", [f"layout nchw was taken from the {spec.shape[1]} channels on axis 1 of '{spec.name}'"]
    if spec.shape[3] in (1, 3):
        return "nhwc", [f"layout nhwc was taken from the {spec.shape[3]} channels on axis 3 of '{spec.name}'"]
    if not isinstance(spec.shape[1], int):
        return "nchw", [f"layout nchw was assumed: '{spec.name}' does not say where its channels lie"]
    raise InputError("1 or 3 channels on axis 1 or 3", f"{spec}", "Give --layout, or feed the model from a .npz file.")


def _eight_bit(image: Image.Image) -> Image.Image:
    """16-bit gray as 8-bit gray: Pillow's own conversion clips at 255 instead of scaling."""
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        return Image.fromarray(np.clip(values >> 8, 0, 255).astype(np.uint8))
    return image


def _check_choice(key: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise InputError(f"{key} " + ", ".join(choices), f"'{value}'", f"Correct it.{nearest(value, choices)}")
