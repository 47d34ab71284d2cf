"""Scans made by hand for tests of what reads them."""

from collections.abc import Sequence

from quantsieve.sensitivity.ranking import Refused, Score
from quantsieve.sensitivity.scan_document import ScanResult


def score(layer: str, value: float, scheme: str = "int8", **others: object) -> Score:
    facts: dict[str, object] = {
        "op_type": "Conv", "nodes": (layer, f"{layer}/Relu"), "block": None, "params": 10, "bytes": 40, "macs": 100,
        "low": value / 2, "high": value * 2, "tie": None, "weights": value / 4, "weights_corrected": value / 8,
        "tensors": {"x": value * 3 / 4},
    }  # fmt: skip
    return Score(layer=layer, scheme=scheme, value=value, **{**facts, **others})  # type: ignore[arg-type]


def scan(rows: Sequence[Score], schemes: tuple[str, ...] = ("int8",), **others: object) -> ScanResult:
    facts: dict[str, object] = {
        "model_file": "m.onnx", "model_key": "ab" * 32, "num_samples": 8, "seed": 0, "activation": "uint8",
        "calibration_samples": 24, "refused": (Refused("soft", "Softmax", "no int8 scheme for Softmax"),),
        "notes": ("a note",),
    }  # fmt: skip
    layers = tuple(sorted(rows, key=lambda row: -row.value))
    return ScanResult(schemes=schemes, layers=layers, **{**facts, **others})  # type: ignore[arg-type]


def scan_of(values: Sequence[float], **others: object) -> ScanResult:
    """Layers l0, l1, ... with these scores under int8."""
    return scan([score(f"l{i}", value) for i, value in enumerate(values)], **others)
