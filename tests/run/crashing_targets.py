"""A runtime that dies on some files, for tests of whole runs. Workers import this module by its name."""

import ctypes
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx

from quantsieve.targets.base import Audit, Feeds, Predict, Saturation, Timing
from quantsieve.targets.ort import OrtCpu


def num_rounded(path: Path) -> int:
    """Activations that the file rounds."""
    return sum(node.op_type == "QuantizeLinear" for node in onnx.load(path).graph.node)


@dataclass(frozen=True)
class Crashing:
    """onnxruntime, but for files that round more than `limit` activations: they end the process at `stage`."""

    limit: int
    stage: str
    threads: int = 1
    name: ClassVar[str] = "crashing"

    def environment(self) -> dict[str, str]:
        return {**OrtCpu(self.threads).environment(), "crashes": f"{self.stage} above {self.limit}"}

    def load(self, path: Path) -> Predict:
        predict = OrtCpu(self.threads).load(path)
        if num_rounded(path) <= self.limit:
            return predict
        if self.stage == "load":
            ctypes.string_at(0)  # reads address 0
        return _crash

    def latency(self, paths: Sequence[Path], feeds: Sequence[Feeds], timing: Timing) -> tuple[tuple[float, ...], ...]:
        return OrtCpu(self.threads).latency(paths, feeds, timing)

    def audit(self, path: Path) -> Audit:
        return OrtCpu(self.threads).audit(path)

    def probe_saturation(self) -> Saturation:
        return OrtCpu(self.threads).probe_saturation()

    def close(self) -> None:
        pass


def _crash(feeds: Feeds) -> dict[str, np.ndarray]:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("a process that outlives its own segmentation fault")
