"""What `quantsieve demo` works on: a small trained network that plain int8 ruins, and labelled data for it.

`model.onnx`: a MobileNetV2-like classifier of handwritten digits, `input` float32 [batch, 1, 16, 16] of
pixels 0..16, `logits` float32 [batch, 10]. `data.npz`: `input` float32 [1500, 1, 16, 16] and `labels` int64
[1500], images of scikit-learn's digits that the network never saw, in the order of their writers: shuffle
before a split. Three of the network's blocks have channels of very uneven range, put there on purpose;
`scripts/train_demo.py` made both files and says how. This package only knows where they lie.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent


def model_path() -> Path:
    """Where the float model lies; it carries its description, source and licence as metadata."""
    return _FOLDER / "model.onnx"


def data_path() -> Path:
    """Where the labelled samples lie: arrays `input` and `labels`, first axis the sample."""
    return _FOLDER / "data.npz"
