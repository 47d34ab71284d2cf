"""Runs `answer.py` here or on an emulated processor.

Haswell has AVX2 and no VNNI: onnxruntime takes there the kernels whose 16-bit pair sums saturate. qemu computes their
instructions exactly, so the numbers are those of the real processor; its times mean nothing.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from quantsieve.errors import InputError

EMULATOR = "qemu-x86_64"
PROCESSOR = "Haswell"
ANSWER = Path(__file__).with_name("answer.py")


def is_available() -> bool:
    return shutil.which(EMULATOR) is not None


def answers(folder: Path, emulated: bool, timeout_s: float = 300) -> dict[str, np.ndarray]:
    """What `answer.answer` gives for the folder, in a process of its own.

    Raises InputError without the emulator, and CalledProcessError or TimeoutExpired when the process fails.
    """
    if emulated and not is_available():
        raise InputError(f"{EMULATOR} on the path", "none", "Install it (Debian: package qemu-user).")
    made = folder / ("emulated.npz" if emulated else "native.npz")
    emulator = [EMULATOR, "-cpu", PROCESSOR] if emulated else []
    command = [*emulator, sys.executable, str(ANSWER), str(folder), str(made)]
    subprocess.run(command, check=True, timeout=timeout_s, capture_output=True)
    with np.load(made) as found:
        return {name: found[name] for name in found.files}
