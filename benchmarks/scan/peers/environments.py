"""The peers, and the virtual environment that each is installed in."""

import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

RUNNERS = Path(__file__).resolve().parent / "runners"


class Failed(Exception):
    """A peer that could not be installed or did not run; holds the reason in a line."""


@dataclass(frozen=True, slots=True)
class Peer:
    """name: of the environment. packages: pinned; one call of pip a line, as torch has to be there before what needs
    it asks for a larger build. runners: scripts in `runners/`."""

    name: str
    packages: tuple[tuple[str, ...], ...]
    runners: tuple[str, ...]


_ORT = "onnxruntime==1.32.0"
_ONE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_TORCH = ("torch==2.13.0",)
PEERS = (
    Peer("onnxsim", (("onnxsim==0.8.1", _ORT),), ("onnxsim_weights", "onnxsim_nodes")),
    Peer("aimet-onnx", (_TORCH, ("aimet-onnx==2.42.0", _ORT)), ("aimet_layers",)),
    Peer("nncf", (("nncf==3.4.0", "onnx", _ORT),), ("nncf_control",)),
    Peer("amd-quark", (_TORCH, ("amd-quark==0.13", _ORT)), ("quark_mixing",)),
    Peer("esp-ppq", (_TORCH, ("esp-ppq==1.3.12", _ORT)), ("esp_ppq_layers",)),
    Peer("onnxruntime", (("onnx", _ORT, "sympy"),), ("ort_debug",)),
)


def python_of(peer: Peer, folder: Path) -> Path:
    """The interpreter of the peer's environment in `folder`, which is made when it is not there.

    Raises Failed when pip does not install it.
    """
    home = folder / peer.name
    python, done = home / "bin" / "python", home / "installed.txt"
    wanted = "\n".join(" ".join(line) for line in peer.packages) + "\n"
    if not done.is_file() or done.read_text(encoding="utf-8") != wanted:
        venv.create(home, with_pip=True, clear=True)
        for line in peer.packages:
            _run([python, "-m", "pip", "install", "--quiet", *line], "pip", 1800, {})
        done.write_text(wanted, encoding="utf-8")
    return python


def run_script(python: Path, script: str, arguments: list[Path | str], timeout_s: float, is_own: bool = False) -> None:
    """A runner of this folder in an interpreter, with one thread. is_own: it may import Quantsieve and its benchmarks.

    Raises Failed when it does not end well in time.
    """
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry) if is_own else ""
    _run([python, RUNNERS / f"{script}.py", *arguments], script, timeout_s, _ONE | {"PYTHONPATH": path})


def _run(command: list[Path | str], name: str, timeout_s: float, more: Mapping[str, str]) -> None:
    with TemporaryDirectory(prefix="quantsieve-peer-") as folder:  # some peers leave files where they run
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, cwd=folder, env=os.environ | more
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{name} did not end within {timeout_s:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise Failed(f"{name}: {lines[-1][:200]} (exit {done.returncode})")
