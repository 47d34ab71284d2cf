"""What memory a scan takes under a limit: `python -m benchmarks.scan.memory`.

A model of 1 GiB, Gemm and Relu over and over, weights in a file beside it, is scanned by the command line under one
limit after the other, each time in a process of its own that is watched from outside, all that it starts included.

Two peaks are told. `own` is what the limit speaks of: anonymous and shared pages (RssAnon + RssShmem), sampled. Mapped
weights are pages of a file, which the kernel keeps while nobody else wants the memory and drops when somebody does;
VmHWM counts them too, so it tells what the process took of a machine with memory to spare, not what it needs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
from benchmarks.scan.measure import environment
from benchmarks.scan.run import RESULTS
from onnx import TensorProto, helper

LIMITS = ("8G", "2G", "1G")
SIDE, LAYERS = 4096, 16
NUM_FILE, NUM_SAMPLES = 40, 8  # samples in the file, of which a scan keeps 8 for scores and 8 to calibrate on; scored
_ROWS = 512  # of a weight that are drawn at once
_PAUSE = 0.005  # seconds between two looks; 64 MiB take some 20 ms to fill
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Use:
    """One scan. *_bytes: peaks of the process and of what it started; wall_s, cpu_s: from its start to its end."""

    limit: str
    model_bytes: int
    own_bytes: int  # largest sum of RssAnon and RssShmem
    resident_bytes: int  # sum of VmHWM, file pages included
    wall_s: float
    cpu_s: float
    num_layers: int
    score_gap: float  # largest relative difference of a score from the same one under the first limit

    @property
    def aim_bytes(self) -> int:
        """One copy of the model and the limit, libraries included."""
        return self.model_bytes + num_bytes(self.limit)

    @property
    def is_met(self) -> bool:
        return self.own_bytes <= self.aim_bytes


def num_bytes(size: str) -> int:
    """Of a limit such as '512M'."""
    return int(size[:-1]) * _UNITS[size[-1]]


def write_model(folder: Path, side: int = SIDE, layers: int = LAYERS, seed: int = 0) -> Path:
    """x [n, side] -> y [n, side] in an empty folder, weights in a file beside the model; no weight is held whole.

    Weights have variance 2 / side, so that what Relu leaves keeps its size through all layers.
    """
    draw = np.random.default_rng(seed)
    nodes, constants, read = [], [], "x"
    with (folder / "weights").open("wb") as file:
        for index in range(layers):
            start = file.tell()
            for row in range(0, side, _ROWS):
                part = draw.standard_normal((min(_ROWS, side - row), side), dtype=np.float32)
                part *= np.float32((2 / side) ** 0.5)
                part.tofile(file)
            weight = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=(side, side))
            weight.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "weights"), ("offset", start), ("length", file.tell() - start)):
                weight.external_data.add(key=key, value=str(value))
            bias = 0.01 * draw.standard_normal(side, dtype=np.float32)
            constants += [weight, onnx.numpy_helper.from_array(bias, f"b{index}")]
            made = "y" if index == layers - 1 else f"r{index}"
            nodes.append(helper.make_node("Gemm", [read, f"w{index}", f"b{index}"], [f"g{index}"], f"gemm{index}"))
            nodes.append(helper.make_node("Relu", [f"g{index}"], [made], f"relu{index}"))
            read = made
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", side])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", side])]
    graph = helper.make_graph(nodes, "wide", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def write_samples(path: Path, side: int = SIDE, seed: int = 1) -> Path:
    draw = np.random.default_rng(seed)
    sizes = draw.uniform(0.3, 2, (NUM_FILE, 1)).astype(np.float32)
    np.savez(path, x=sizes * draw.standard_normal((NUM_FILE, side), dtype=np.float32))
    return path


def measure_limits(folder: Path, limits: Sequence[str], side: int = SIDE, layers: int = LAYERS) -> list[Use]:
    """One scan a limit, in their order. folder: an empty one, for model, samples and what the scans write."""
    model, data = write_model(folder, side, layers), write_samples(folder / "x.npz", side)
    size = sum(path.stat().st_size for path in (model, folder / "weights"))
    uses: list[Use] = []
    first: dict[str, float] = {}
    for limit in limits:
        out = folder / f"{limit}.json"
        command = [sys.executable, "-m", "quantsieve", "scan", str(model), "--data", str(data), "-o", str(out)]
        options = ["--samples", str(NUM_SAMPLES), "--memory-limit", limit, "--drift", "off"]
        own, resident, wall, cpu = watched([*command, *options])
        document = json.loads(out.read_text(encoding="utf-8"))
        rows = document["layers"]
        assert document["samples"] == NUM_SAMPLES
        scores = {f"{row['layer']} {row['scheme']}": row["score"] for row in rows}
        first = first or scores
        gap = max(abs(scores[name] / first[name] - 1) for name in first)
        uses.append(Use(limit, size, own, resident, wall, cpu, len({row["layer"] for row in rows}), gap))
    return uses


def watched(command: Sequence[str]) -> tuple[int, int, float, float]:
    """(own bytes, resident bytes, wall seconds, processor seconds) of a command, as in `Use`.

    Raises subprocess.CalledProcessError when it fails.
    """
    start = time.perf_counter()
    # What it prints would mix with the table; what goes wrong is told on the error stream.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    own, resident = 0, {}
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            break
        now = {pid: pages for pid in _family(process.pid) if (pages := _status(pid))}
        own = max(own, sum(pages["RssAnon"] + pages["RssShmem"] for pages in now.values()))
        resident |= {pid: pages["VmHWM"] for pid, pages in now.items()}
        time.sleep(_PAUSE)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    wall = time.perf_counter() - start
    return own, sum(resident.values()), wall, usage.ru_utime + usage.ru_stime


def _family(pid: int) -> list[int]:
    """A process and all that it started and that started by these."""
    found = [pid]
    for parent in found:
        with suppress(OSError):  # it ended meanwhile
            for path in Path(f"/proc/{parent}/task").glob("*/children"):
                found += map(int, path.read_text().split())
    return found


def _status(pid: int) -> dict[str, int]:
    """Bytes by name; empty for a process that has ended."""
    with suppress(OSError):
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {line[0][:-1]: int(line[1]) << 10 for line in lines if line[-1] == "kB"}
    return {}


def table(uses: Sequence[Use]) -> str:
    """Markdown, one line a limit, ending in a newline."""
    lines = [
        "| limit | model | aim: model + limit | own peak | met | VmHWM | wall | CPU | layers | score gap |",
        "|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    lines += [_line(use) for use in uses]
    return "\n".join(lines) + "\n"


def _line(use: Use) -> str:
    sizes = (use.model_bytes, use.aim_bytes, use.own_bytes)
    model, aim, own = (f"{size / (1 << 20):.0f} MiB" for size in sizes)
    cells = [
        use.limit,
        model,
        aim,
        f"**{own}**",
        "yes" if use.is_met else "no",
        f"{use.resident_bytes / (1 << 20):.0f} MiB",
        f"{use.wall_s:.0f} s",
        f"{use.cpu_s:.0f} s",
        str(use.num_layers),
        f"{use.score_gap:.0e}",
    ]
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, keeps a JSON, prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scan.memory", description=__doc__)
    parser.add_argument("--limits", nargs="+", default=LIMITS, metavar="SIZE", help="such as 512M or 4G")
    parser.add_argument("--side", type=int, default=SIDE, help="of every weight")
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="N")
    parser.add_argument("--out", type=Path, default=RESULTS / "memory.json", help="file of the results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="quantsieve-memory-") as folder:
        uses = measure_limits(Path(folder), options.limits, options.side, options.layers)
    document = {"schema": 1, "environment": environment(), "rows": [asdict(use) for use in uses]}
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(uses), end="")


if __name__ == "__main__":
    main()
