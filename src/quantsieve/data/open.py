"""One door to all sources of samples: looks at what it is given and opens it with the right module."""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path

import numpy as np

from quantsieve.data.arrays import ArraySamples, from_arrays, open_npy, open_npz
from quantsieve.data.feeds import FeedSamples, from_reader
from quantsieve.data.folder import FolderSamples
from quantsieve.data.preprocess import Preprocess
from quantsieve.data.samples import InputSpec, Samples
from quantsieve.errors import InputError

_SOURCES = "a folder of images, a .npz or .npy file, a dict of arrays, a calibration data reader or a list of feeds"


def open_samples(
    source: object,
    inputs: Sequence[InputSpec],
    *,
    preprocess: Preprocess | None = None,
    skip_bad: bool = False,
    class_names: Sequence[str] | None = None,
) -> Samples:
    """The samples in `source`, whatever it is.

    source: a path to a folder, `.npz` or `.npy`; arrays by input name (an array alone for a model with one
    input); a reader with `get_next`; an iterable of feeds; or samples that are open already.
    preprocess, skip_bad and class_names are for folders of images; preprocess is refused elsewhere, where it
    would change nothing. Raises InputError when the source is absent, unknown, or does not fit the inputs.
    """
    if isinstance(source, str | PathLike):
        path = Path(source)
        if path.is_dir():
            return FolderSamples(path, inputs, preprocess=preprocess, skip_bad=skip_bad, class_names=class_names)
        _refuse(preprocess, path.name)
        return _open_file(path, inputs)
    _refuse(preprocess, type(source).__name__)
    if isinstance(source, Samples):
        return source
    return _from_object(source, inputs)


def _refuse(preprocess: Preprocess | None, origin: str) -> None:
    if preprocess is not None:
        raise InputError(
            "a folder of images to preprocess",
            origin,
            "Drop the preprocessing options: arrays are fed as they are.",
        )


def _open_file(path: Path, inputs: Sequence[InputSpec]) -> ArraySamples:
    if not path.exists():
        raise InputError(_SOURCES, f"no file or folder {path}", "Correct the path.")
    if path.suffix == ".npz":
        return open_npz(path, inputs)
    if path.suffix == ".npy":
        return open_npy(path, inputs)
    raise InputError(_SOURCES, f"the file {path.name}", "Give its folder, or convert it to .npz.")


def _from_object(source: object, inputs: Sequence[InputSpec]) -> ArraySamples | FeedSamples:
    if isinstance(source, Mapping):
        return from_arrays(source, inputs)
    if isinstance(source, np.ndarray):
        return from_arrays({"arr_0": source}, inputs)
    if hasattr(source, "get_next"):
        return from_reader(source, inputs)
    if isinstance(source, Iterable):
        return FeedSamples(source, inputs)
    raise InputError(_SOURCES, f"an object of type {type(source).__name__}", "Pass one of these.")
