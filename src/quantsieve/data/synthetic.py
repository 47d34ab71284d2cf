"""Made-up samples for a first look: random inputs of the right shapes and types.

Random inputs meet other activation ranges than real ones, so scores on them only point a direction. Each
sample depends on the seed and its number alone, not on the order of reading.
"""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from quantsieve.data.conform import nearest, numpy_dtype
from quantsieve.data.samples import Feed, InputSpec, check_index, content_digest, read_only
from quantsieve.errors import InputError, UsageError

DEFAULT_SIZE = 16
WARNING = "synthetic samples: random inputs, so scores and ranges only point a direction; decide on real data"


class SyntheticSamples:
    """Random feeds: floats normal, integers 0..9 (masks 0..1, uint8 images 0..255), booleans, strings."""

    synthetic = True
    labels: np.ndarray | None = None
    notes: tuple[str, ...] = (WARNING,)

    def __init__(
        self,
        inputs: Sequence[InputSpec],
        num_samples: int,
        seed: int = 0,
        sizes: Mapping[str, int] | None = None,
    ):
        """sizes: sizes of symbolic axes by name; others are 1 on axis 0 (the batch) and 16 elsewhere.

        Raises UsageError for a count below 1 or a seed below 0, InputError for sizes below 1, names that no input
        has, and types that cannot be made up.
        """
        if num_samples < 1:
            raise UsageError("at least one synthetic sample", f"{num_samples}", "Give a larger number.")
        if seed < 0:
            raise UsageError("a seed of 0 or more", f"{seed}", "Give another --seed.")
        self.name = f"{num_samples} synthetic samples"
        self._inputs = tuple(inputs)
        self._num_samples = num_samples
        self._seed = seed
        self._shapes = _shapes(inputs, sizes or {})
        for spec in inputs:
            if numpy_dtype(spec).kind not in "biufO":
                raise InputError("inputs of numbers, booleans or strings", f"{spec}", "Give real samples.")

    def __len__(self) -> int:
        return self._num_samples

    def feed(self, index: int) -> Feed:
        check_index(index, self._num_samples)
        return {spec.name: read_only(self._array(spec, index)) for spec in self._inputs}

    def _array(self, spec: InputSpec, index: int) -> np.ndarray:
        # The name is part of the seed, so that inputs of one shape differ and their order does not matter.
        generator = np.random.default_rng([self._seed, index, zlib.crc32(spec.name.encode())])
        return _random_array(generator, spec, self._shapes[spec.name])

    def fingerprint(self) -> str:
        parts = ["synthetic", str(self._num_samples), str(self._seed)]
        for spec in sorted(self._inputs, key=lambda spec: spec.name):
            parts += [spec.name, spec.dtype, str(self._shapes[spec.name])]
        return content_digest(parts)


def _shapes(inputs: Sequence[InputSpec], sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    symbols = {size for spec in inputs for size in spec.shape if isinstance(size, str)}
    for name, size in sizes.items():
        if name not in symbols:
            raise InputError(
                "the name of a symbolic axis (" + (", ".join(sorted(symbols)) or "the model has none") + ")",
                f"'{name}'",
                f"Correct the name or drop it.{nearest(name, symbols)}",
            )
        if size < 1:
            raise InputError(f"a size of at least 1 for axis '{name}'", f"{size}", "Give a larger size.")
    return {spec.name: tuple(_size(size, axis, sizes) for axis, size in enumerate(spec.shape)) for spec in inputs}


def _size(size: int | str | None, axis: int, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    default = 1 if axis == 0 else DEFAULT_SIZE
    return default if size is None else sizes.get(size, default)


def _random_array(generator: np.random.Generator, spec: InputSpec, shape: tuple[int, ...]) -> np.ndarray:
    dtype = numpy_dtype(spec)
    if dtype.kind == "f":
        return np.asarray(generator.standard_normal(shape)).astype(dtype)
    if dtype.kind == "b":
        return np.asarray(generator.integers(0, 2, shape)).astype(dtype)
    if dtype.kind == "O":
        numbers = np.asarray(generator.integers(0, 10, shape))
        return np.array([f"text {number}" for number in numbers.reshape(-1)], dtype=object).reshape(shape)
    if "mask" in spec.name.lower():
        mask = np.asarray(generator.integers(0, 2, shape)).astype(dtype)
        # An attention mask of zeros only makes Softmax divide 0 by 0 in some exports.
        if mask.ndim:
            mask[..., 0] = 1
        return mask
    is_image = dtype == np.uint8 and len(shape) == 4
    return np.asarray(generator.integers(0, 256 if is_image else 10, shape)).astype(dtype)
