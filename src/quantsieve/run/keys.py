"""Content keys: the only place that knows how a result gets its name.

Equal keys mean equal work: key = sha256 of stage, version, settings and the keys of the inputs. The first
input of every line is a model or an array, whose key is a hash of its bytes. Nothing here stores anything.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from quantsieve.errors import InputError, UnsupportedModel


def content_key(stage: str, version: int, settings: Mapping[str, object], inputs: Sequence[str]) -> str:
    """64 hex digits; equal for equal work, whatever the order of `settings`.

    settings: str, int, finite float, bool, None, lists, tuples and mappings of str. Raises TypeError for any
    other type and ValueError for nan and infinity, which have no canonical JSON.
    """
    work = [stage, version, _canonical(settings), list(inputs)]
    text = json.dumps(work, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_key(path: Path) -> str:
    """64 hex digits: sha256 of the file's bytes, read in pieces. Raises InputError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(
            "a file that can be read", f"{error.strerror} at {path}", "Check its path and permissions."
        ) from error


def array_key(array: np.ndarray) -> str:
    """64 hex digits; equal for equal dtype, shape and bytes, whatever the byte order and memory layout.

    array: any shape; bool, integer, float, complex or fixed-width text. -0.0 and 0.0 differ, as do two kinds
    of nan. Raises TypeError for objects and other types whose bytes do not say their value.
    """
    if array.dtype.kind not in "biufcSU":
        raise TypeError(f"an array of {array.dtype} has no content key")
    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    digest = hashlib.sha256(json.dumps([little.dtype.str, list(little.shape)]).encode())
    digest.update(little.reshape(-1).view(np.uint8).data if little.size else b"")
    return digest.hexdigest()


def model_key(path: Path) -> str:
    """64 hex digits over the bytes of an ONNX model and of every file of external data it names.

    The model itself is read into memory, external data in pieces; the file's name and folder do not count.
    Raises InputError when a file is missing, unreadable or shorter than a tensor says, or when a location
    leaves the model's folder; UnsupportedModel when the file is not ONNX.
    """
    key = file_key(path)
    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError, UnicodeDecodeError) as error:
        raise UnsupportedModel(
            "an ONNX model", f"{path.name}, which is not one ({error})", "Export it again."
        ) from error
    ends: dict[str, int] = {}
    for tensor in _external_tensors(model):
        info = ExternalDataInfo(tensor)
        end = (info.offset or 0) + (info.length or 0)
        ends[info.location] = max(end, ends.get(info.location, 0))
    external = {location: _external_key(path, location, ends[location]) for location in ends}
    return content_key("model", 1, {"external": external}, [key])


def _external_key(model: Path, location: str, end: int) -> str:
    pure = PurePosixPath(location)
    if not location or pure.is_absolute() or ".." in pure.parts:
        raise InputError(
            "external data inside the folder of the model",
            f"the location {location!r} in {model.name}",
            "Save the model again with external data beside it.",
        )
    path = model.parent / location
    if not path.is_file():
        raise InputError(
            f"the external data of {model.name} beside it",
            f"no file {location}",
            "Copy that file into the folder of the model, or export the model again.",
        )
    size = path.stat().st_size
    if size < end:
        raise InputError(
            f"{end} bytes of external data in {location} for {model.name}",
            f"{size} bytes",
            "The file is cut off or of another model: copy it again, or export the model again.",
        )
    return file_key(path)


def _external_tensors(message: Message) -> Iterator[onnx.TensorProto]:
    # Over the message fields of any kind, so that tensors in attributes, subgraphs, functions, sparse
    # initializers and whatever a later version of ONNX adds are all found.
    if isinstance(message, onnx.TensorProto):
        if uses_external_data(message):
            yield message
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for child in [value] if isinstance(value, Message) else value:
                yield from _external_tensors(child)


def _canonical(value: object) -> object:
    if isinstance(value, Mapping):
        # json would turn the key 1 into "1" and None into "null": two settings with one key.
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"settings have names of type str, not {odd[0]!r}")
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return value
