"""Targets that misbehave, for the tests of isolation. Workers import this module by its name."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from quantsieve.targets.base import Audit, Feeds, Predict, Saturation, Timing
from quantsieve.targets.ort import OrtCpu


@dataclass(frozen=True)
class Fragile:
    """onnxruntime, except that `load` does what `how` says first."""

    how: str = "nothing"
    argument: str = ""
    name: ClassVar[str] = "fragile"

    def environment(self) -> dict[str, str]:
        return {"pid": str(os.getpid()), "temporary": os.environ["TMPDIR"], "session": str(os.getsid(0))}

    def load(self, path: Path) -> Predict:
        if self.how == "segfault":
            ctypes.string_at(0)
        elif self.how == "exit":
            os._exit(3)
        elif self.how == "print":
            print("a library talks on stdout")
            os.write(1, b"and its C code as well\n")
            print("and on stderr", file=sys.stderr)
        elif self.how == "talk and crash":
            os.write(2, b"last words\n")
            os.abort()
        elif self.how == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(self.argument).write_text(str(child.pid))
            time.sleep(600)
        elif self.how == "hang":
            time.sleep(600)
        elif self.how == "unpicklable":
            raise Unpicklable
        return OrtCpu().load(path)

    def latency(self, paths: Sequence[Path], feeds: Sequence[Feeds], timing: Timing) -> tuple[tuple[float, ...], ...]:
        return OrtCpu().latency(paths, feeds, timing)

    def audit(self, path: Path) -> Audit:
        return OrtCpu().audit(path)

    def probe_saturation(self) -> Saturation:
        return lambda: 0  # type: ignore[return-value]  # an answer that cannot be pickled

    def close(self) -> None:
        pass


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not this one")


class Unloadable:
    """A target that pickles, but takes some memory and then cannot be made again in the worker."""

    name = "unloadable"

    def __init__(self, size_bytes: int = 0):
        self.size_bytes = size_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return _refuse_to_exist, (self.size_bytes,)


def _refuse_to_exist(size_bytes: int) -> None:
    taken = np.empty(size_bytes, np.uint8)
    raise RuntimeError(f"the runtime is not installed here, with {taken.nbytes} bytes")
