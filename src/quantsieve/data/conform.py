"""Whether an array is what a graph input takes: its name, dtype and shape.

Casts that keep every value are made, with a note; float64 to float32 as well, since that is how numpy users
hand over float data. All others are refused: rounding or wrapping silently would look like a bad model.
"""

import difflib
from collections.abc import Collection, Sequence

import numpy as np

from quantsieve.data.samples import InputSpec
from quantsieve.errors import InputError


def numpy_dtype(spec: InputSpec) -> np.dtype:
    """The dtype of feeds for this input; object for 'str'. Raises InputError for types that numpy lacks."""
    if spec.dtype == "str":
        return np.dtype(object)
    try:
        return np.dtype(spec.dtype)
    except TypeError as error:
        raise InputError(
            "an input type that numpy has", f"{spec}", "Put a Cast from float32 in front of the model."
        ) from error


def nearest(name: str, known: Collection[str]) -> str:
    """' Did you mean 'x'?' for the closest known name, or nothing when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def check_names(found: Collection[str], inputs: Sequence[InputSpec], origin: str) -> None:
    """Raises InputError unless the names are exactly the inputs' names."""
    known = [spec.name for spec in inputs]
    unknown = [name for name in found if name not in known]
    missing = [name for name in known if name not in found]
    if not unknown and not missing:
        return
    hint = nearest(unknown[0], missing or known) if unknown else f" No array '{missing[0]}'."
    raise InputError(
        "arrays named " + ", ".join(f"'{name}'" for name in known),
        (", ".join(f"'{name}'" for name in found) or "none") + f" in {origin}",
        f"Name each array after the input it feeds.{hint}",
    )


def fits(shape: Sequence[int], spec: InputSpec) -> bool:
    """Whether a feed of this shape passes the input's fixed sizes."""
    return len(shape) == len(spec.shape) and all(
        not isinstance(size, int) or size == found for size, found in zip(spec.shape, shape, strict=True)
    )


def cast_note(array: np.ndarray, spec: InputSpec) -> str | None:
    """None when the dtype is right, a note when it is cast without loss, InputError when neither.

    array: all values to be cast: float64 beyond the range of float32 is refused.
    """
    wanted = numpy_dtype(spec)
    if spec.dtype == "str":
        if array.dtype.kind == "U" or (
            array.dtype.kind == "O" and all(isinstance(text, str) for text in array.reshape(-1))
        ):
            return None
    elif array.dtype == wanted:
        return None
    elif array.dtype == np.float64 and wanted == np.float32:
        _check_float32_range(array, spec)
        return f"'{spec.name}' was cast from float64 to float32"
    elif array.dtype.kind in "biuf" and np.can_cast(array.dtype, wanted, "safe"):
        return f"'{spec.name}' was cast from {array.dtype} to {wanted}"
    raise InputError(
        f"{spec}",
        f"an array of {array.dtype}",
        f"Convert it where you know what the values mean, for example with array.astype('{spec.dtype}').",
    )


def _check_float32_range(array: np.ndarray, spec: InputSpec) -> None:
    limit = float(np.finfo(np.float32).max)
    for row in array if array.ndim else (array,):
        beyond = np.isfinite(row) & (np.abs(row) > limit)
        if beyond.any():
            value = float(np.asarray(row)[beyond].flat[0])
            raise InputError(f"values within float32 for {spec}", f"{value:g}", "Scale the data.")


def as_feed(array: np.ndarray, spec: InputSpec) -> np.ndarray:
    """The array in the input's dtype, as new memory or a view; call `cast_note` first."""
    return array.astype(numpy_dtype(spec), copy=False)
