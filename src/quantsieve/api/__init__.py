"""The Python door: each command of the same name is a thin call of one of these functions.

Data may be a path (folder of images, .npz, .npy), arrays by input name, an onnxruntime CalibrationDataReader, or an
iterable of feeds. Models are paths; the file is never changed.
"""

from quantsieve.api._model import EvaluationResult, evaluate, inspect, quantize
from quantsieve.api._run import TuneResult, demo, export, report, tune
from quantsieve.api._scan import pick, read_scan, scan
from quantsieve.sensitivity.pick import PickResult
from quantsieve.sensitivity.scan_document import ScanResult

__all__ = [
    "EvaluationResult", "PickResult", "ScanResult", "TuneResult", "demo", "evaluate", "export", "inspect", "pick",
    "quantize", "read_scan", "report", "scan", "tune",
]  # fmt: skip
