"""Selective post-training quantization of ONNX models: measure every layer, solve, build, run, compare.

The public names are those of `quantsieve.api`; they are imported when they are first used, so that `import quantsieve`
and the command line's help stay quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantsieve.api import (
        EvaluationResult,
        PickResult,
        ScanResult,
        TuneResult,
        demo,
        evaluate,
        export,
        inspect,
        pick,
        quantize,
        read_scan,
        report,
        scan,
        tune,
    )

__all__ = [
    "EvaluationResult",
    "PickResult",
    "ScanResult",
    "TuneResult",
    "demo",
    "evaluate",
    "export",
    "inspect",
    "pick",
    "quantize",
    "read_scan",
    "report",
    "scan",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("quantsieve.api"), name)
    raise AttributeError(f"module 'quantsieve' has no attribute {name!r}")
