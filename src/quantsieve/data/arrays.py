"""Samples in arrays: `.npz`, `.npy`, or a dict of arrays by input name. Axis 0 counts the samples.

An array of the input's rank holds one row a sample, and each feed keeps a leading axis of 1. An array of one
rank more holds whole feeds, for inputs without a batch axis or with a fixed batch above 1. Labels lie under
'labels', 'label' or 'y', unless an input has that name. The arrays are not copied: whoever changes them
changes the samples.
"""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from quantsieve.data.conform import as_feed, cast_note, check_names, fits
from quantsieve.data.samples import Feed, InputSpec, check_index, content_digest, read_only
from quantsieve.errors import InputError

LABEL_NAMES = ("labels", "label", "y")


class ArraySamples:
    """Feeds cut from arrays of [n, ...], one array an input."""

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        inputs: Sequence[InputSpec],
        *,
        labels: object = None,
        name: str = "arrays",
    ):
        """labels: int [n] or [n, 1], or None. Raises InputError when something does not fit the inputs."""
        check_names(arrays, inputs, name)
        notes = []
        for spec in inputs:
            _check_shape(arrays[spec.name], spec)
            notes.append(cast_note(arrays[spec.name], spec))
        self._inputs = tuple(inputs)
        self._arrays = dict(arrays)
        self._num_samples = _common_length(arrays, name)
        self._digest: str | None = None
        self.name = name
        self.labels, label_note = _labels(labels, self._num_samples)
        self.notes: tuple[str, ...] = tuple(note for note in (*notes, label_note) if note)

    def __len__(self) -> int:
        return self._num_samples

    def feed(self, index: int) -> Feed:
        check_index(index, self._num_samples)
        return {spec.name: read_only(as_feed(self._row(spec, index), spec)) for spec in self._inputs}

    def _row(self, spec: InputSpec, index: int) -> np.ndarray:
        array = self._arrays[spec.name]
        if array.ndim == len(spec.shape):
            return array[index : index + 1]
        return np.asarray(array[index])

    def fingerprint(self) -> str:
        if self._digest is None:
            parts: list[str | np.ndarray] = ["arrays"]
            for spec in sorted(self._inputs, key=lambda spec: spec.name):
                parts += [spec.name, spec.dtype, str(len(spec.shape)), self._arrays[spec.name]]
            parts += ["no labels"] if self.labels is None else ["labels", self.labels]
            self._digest = content_digest(parts)
        return self._digest


def from_arrays(arrays: Mapping[str, object], inputs: Sequence[InputSpec], *, name: str = "arrays") -> ArraySamples:
    """Samples of a dict of arrays by input name, with labels under one of LABEL_NAMES if there are any.

    Raises InputError when names, dtypes, shapes or counts do not fit the inputs.
    """
    found = {key: np.asarray(value) for key, value in arrays.items()}
    input_names = {spec.name for spec in inputs}
    labels = None
    for key in LABEL_NAMES:
        if key in found and key not in input_names:
            labels = found.pop(key)
            break
    # numpy.savez(path, array) names its only array arr_0: nobody chose that name.
    if len(inputs) == 1 and list(found) == ["arr_0"]:
        found = {inputs[0].name: found["arr_0"]}
    return ArraySamples(found, inputs, labels=labels, name=name)


def open_npz(path: Path, inputs: Sequence[InputSpec]) -> ArraySamples:
    """Samples of a `.npz` file. Raises InputError when it cannot be read or does not fit."""
    try:
        # Opened here, because numpy forgets to close a file that is no archive.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _unreadable(path, "a .npz file of plain arrays", error) from error
    return from_arrays(arrays, inputs, name=path.name)


def open_npy(path: Path, inputs: Sequence[InputSpec]) -> ArraySamples:
    """Samples of a `.npy` file, memory-mapped, for one-input models. Raises InputError as `open_npz`."""
    if len(inputs) != 1:
        names = ", ".join(f"'{spec.name}'" for spec in inputs)
        raise InputError(
            f"a .npz file with arrays for the inputs {names}",
            f"the single array {path.name}",
            "Save all of them with numpy.savez.",
        )
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _unreadable(path, "a .npy file of one plain array", error) from error
    if not isinstance(array, np.ndarray):
        raise InputError("a .npy file of one plain array", f"an archive in {path.name}", "Rename it to .npz.")
    return ArraySamples({inputs[0].name: array}, inputs, name=path.name)


def _unreadable(path: Path, expected: str, error: Exception) -> InputError:
    return InputError(
        expected, f"{path.name}, which numpy cannot read ({error})", "Write it anew, without object arrays."
    )


def _check_shape(array: np.ndarray, spec: InputSpec) -> None:
    if array.ndim == len(spec.shape) and array.ndim > 0:
        if fits((1, *array.shape[1:]), spec):
            return
    elif array.ndim == len(spec.shape) + 1 and fits(array.shape[1:], spec):
        return
    wanted = ["n", *("?" if size is None else str(size) for size in spec.shape[1:])]
    batch = spec.shape[0] if spec.shape else None
    if isinstance(batch, int) and batch != 1:
        wanted.insert(1, str(batch))
    raise InputError(
        f"an array of [{', '.join(wanted)}] for {spec}",
        f"one of {list(array.shape)}",
        "Axis 0 counts the samples; bring the others into the model's order.",
    )


def _common_length(arrays: Mapping[str, np.ndarray], name: str) -> int:
    lengths = {key: len(array) for key, array in arrays.items()}
    if not lengths or min(lengths.values()) == 0:
        raise InputError("at least one sample", f"none in {name}", "Give arrays with rows on axis 0.")
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} in '{key}'" for key, count in lengths.items())
        raise InputError("the same number of samples in all arrays", counts, "Cut them to one length.")
    return next(iter(lengths.values()))


def _labels(labels: object, num_samples: int) -> tuple[np.ndarray | None, str | None]:
    if labels is None:
        return None, None
    array = np.asarray(labels)
    if array.shape not in {(num_samples,), (num_samples, 1)}:
        raise InputError(
            f"{num_samples} labels, one a sample",
            f"labels of shape {array.shape}",
            "Give class numbers, not scores.",
        )
    flat = array.reshape(-1)
    if flat.dtype.kind in "iu":
        return read_only(flat.astype(np.int64)), None
    if flat.dtype.kind == "f" and np.all(np.isfinite(flat)) and np.all(flat == np.rint(flat)):
        return read_only(flat.astype(np.int64)), f"labels were cast from {flat.dtype} to int64"
    raise InputError("whole numbers as labels", f"an array of {flat.dtype}", "Number the classes from 0.")
