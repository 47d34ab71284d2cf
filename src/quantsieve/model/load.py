"""Reading a user's ONNX file: every way in which it can be broken becomes one clear error.

The file is opened for reading only. A protobuf message ends at 2 GiB, and so does what Quantsieve takes for now.
"""

from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError

from quantsieve.errors import InputError, UnsupportedModel

MAX_BYTES = 2**31 - 2**20  # of a protobuf message, with room for nodes and names


def load_model(path: Path) -> ir.Model:
    """The model in `path`, with the weights of external files in memory. Raises as `open_model`."""
    model = open_model(path)
    return ir.external_data.load_to_model(model)


def open_model(path: Path) -> ir.Model:
    """The model in `path`; weights of external files are checked to be there and stay in them.

    Raises InputError when the file is missing or not ONNX or its external data are missing or cut off,
    UnsupportedModel when it holds no graph or weighs 2 GiB or more.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError("an ONNX file", f"no file at {path}", "Check the path of the model.")
    try:
        model = ir.load(path)
        _check_size(model, path)
        _check_external(model)
    except (DecodeError, ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            "an ONNX file",
            f"{path.name}, which cannot be read as one ({type(error).__name__}: {_first_line(error)})",
            "Export the model again, or check that the file was downloaded whole.",
        ) from error
    except OSError as error:
        raise InputError(
            "a readable ONNX file with its external data beside it",
            f"{path.name}: {_first_line(error)}",
            "Keep the external data files in the folder that the model names.",
        ) from error
    if not model.graph.outputs:
        raise UnsupportedModel(
            "an ONNX file with a graph that has outputs",
            f"{path.name}, whose graph has none",
            "Check that this is a model and was downloaded whole.",
        )
    return model


def file_bytes(path: Path) -> int:
    """Bytes of the model's file and of every file of external data it names. Raises InputError."""
    path = Path(path)
    try:
        model = ir.load(path)
        places = {tensor.path for tensor in _external_tensors(model)}
        return path.stat().st_size + sum(Path(place).stat().st_size for place in places)
    except (OSError, DecodeError, ValueError) as error:
        raise InputError("a readable ONNX file", f"{path.name}: {_first_line(error)}", "Check its files.") from error


def _check_size(model: ir.Model, path: Path) -> None:
    size_bytes = sum(tensor.nbytes for tensor in _external_tensors(model))
    if size_bytes > MAX_BYTES:
        raise UnsupportedModel(
            "a model of less than 2 GiB",
            f"{size_bytes / 2**30:.1f} GiB of external data in {path.name}",
            "Split the model, or quantize its largest part alone.",
        )


def _check_external(model: ir.Model) -> None:
    for tensor in _external_tensors(model):
        have = Path(tensor.path).stat().st_size
        if have < (tensor.offset or 0) + tensor.nbytes:
            raise OSError(f"{tensor.location} holds {have} bytes, which are too few for {tensor.name}")


def _external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Each external initializer of the graph and its subgraphs."""
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else "no further text"
