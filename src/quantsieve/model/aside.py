"""Large constants in files of a folder instead of in memory, so that copies of a model and sessions of it are cheap.

numpy reads such a constant through a memory map and onnxruntime maps the file too: its pages are the disk's cache, not
memory of this process. A model forgets the folder when it is copied by way of a proto; `copied` tells it again.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime

LARGE = 1 << 20  # bytes of a constant from which on it is kept in a file


def move_out(model: ir.Model, folder: Path) -> ir.Model:
    """The model with its large constants in `folder`, the others in memory. `model` itself gives its own away.

    Constants that lie in the folder already stay where they are.
    """
    large, small = [], []
    for value in _constants(model):
        if not _is_in(value, folder) and value.const_value.nbytes > LARGE:
            large.append(value)
        elif isinstance(value.const_value, ir.ExternalTensor) and not _is_in(value, folder):
            small.append(value)
    name = f"{secrets.token_hex(8)}.data"
    moved = ir.external_data.convert_tensors_to_external([v.const_value for v in large], folder, name) if large else []
    loaded = ir.external_data.convert_tensors_from_external([value.const_value for value in small])
    for value, tensor in zip((*large, *small), (*moved, *loaded), strict=True):
        value.const_value = tensor
    return copied(model)  # the proto that the model was read from would hold its bytes as long as any part is used


def copied(model: ir.Model) -> ir.Model:
    """A copy that shares no node; large constants stay in their folder."""
    return from_proto(ir.to_proto(model), folder_of(model))


def from_proto(proto: onnx.ModelProto, folder: Path | None) -> ir.Model:
    """The model of a proto whose external data, if it has some, lie in `folder`."""
    model = ir.from_proto(proto)
    if folder is not None:
        ir.external_data.set_base_dir(model.graph, folder)
    return model


def folder_of(model: ir.Model) -> Path | None:
    """Where the constants lie that are not in memory; None when all are."""
    found = (value.const_value for value in _constants(model))
    return next((Path(tensor.base_dir) for tensor in found if isinstance(tensor, ir.ExternalTensor)), None)


def save(model: ir.Model, path: Path) -> None:
    """Writes the model, its large constants into one file beside it that is named after it."""
    ir.save(model, path, external_data=f"{path.stem}.data", size_threshold_bytes=LARGE)


def open_session(model: ir.Model, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    """A session of the model on the CPU; large constants that are in files are mapped."""
    return open_proto(ir.to_proto(model), folder_of(model), options)


def open_proto(
    proto: onnx.ModelProto, folder: Path | None, options: onnxruntime.SessionOptions
) -> onnxruntime.InferenceSession:
    """As `open_session`, of a proto whose external data lie in `folder`."""
    if folder is None:
        return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    # onnxruntime finds external data beside the file only, and would copy weights to pack them.
    options.add_session_config_entry("session.disable_prepacking", "1")
    path = folder / f"{secrets.token_hex(8)}.onnx"
    path.write_bytes(proto.SerializeToString())
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    finally:
        path.unlink()


def _constants(model: ir.Model) -> Iterator[Any]:
    """Values that have a tensor of numbers."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype != ir.DataType.STRING:
                yield value


def _is_in(value: Any, folder: Path) -> bool:
    tensor = value.const_value
    return isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir) == folder
