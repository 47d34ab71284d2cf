"""Reading a user's ONNX file: every way in which it can be broken becomes one clear error.

The file is opened for reading only. External data stay memory maps (onnx-ir), so a large model costs no memory here.
"""

from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError

from quantsieve.errors import InputError, UnsupportedModel


def load_model(path: Path) -> ir.Model:
    """The model in `path`, weights in external files memory-mapped.

    Raises InputError when the file is missing or not ONNX, UnsupportedModel when it holds no graph.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError("an ONNX file", f"no file at {path}", "Check the path of the model.")
    try:
        model = ir.load(path)
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


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else "no further text"
