"""Outputs of all model files of a folder for the arrays of `feeds.npz` there, written to the file of the
second argument.

Run as a script, under an emulator too: it needs onnxruntime and numpy alone. Sessions have onnxruntime's default
options but for one thread. A file NAME.onnx takes the array NAME, or `x` where there is none.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime


def answer(folder: Path) -> dict[str, np.ndarray]:
    """The first output of each model by the file's stem."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    found = {}
    with np.load(folder / "feeds.npz") as feeds:
        for path in sorted(folder.glob("*.onnx")):
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            feed = feeds[path.stem] if path.stem in feeds.files else feeds["x"]
            found[path.stem] = session.run(None, {session.get_inputs()[0].name: feed})[0]
    return found


if __name__ == "__main__":
    np.savez(sys.argv[2], **answer(Path(sys.argv[1])))
