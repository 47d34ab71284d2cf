"""Writes the files, runs them on both processors, prints one table."""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from benchmarks.saturation.emulate import PROCESSOR, answers

from quantsieve import example
from quantsieve.calibrate import calibrate
from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare
from quantsieve.model.units import find_structure
from quantsieve.plan import find_options, full_plan
from quantsieve.schemes import discover
from quantsieve.schemes._static import by_name
from quantsieve.simulate import Simulation
from quantsieve.targets.saturation import EXACT, PROBED_OPS, probe_input, saturation_model
from quantsieve.tasks import logit_mse, output_variance
from quantsieve.weights import NO_CORRECTIONS, Ingredients
from quantsieve.writing import FLOAT_PLAN, write_plan

CALIBRATION = 100  # samples; those that are measured come behind them
MEASURED = 200
SCHEMES = ("int8", "int8-channel")
WEIGHT_TYPES: Mapping[str, type[np.int8] | type[np.uint8]] = {"s8": np.int8, "u8": np.uint8}


@dataclass(frozen=True, slots=True)
class Row:
    """One file on one processor. mse: relative squared error of the logits, by sample's mean; 1 is their variance."""

    processor: str
    scheme: str
    weight_type: str
    probe: float  # returned over exact sum, the worst of the probed operators
    simulated_mse: float
    measured_mse: float

    @property
    def ratio(self) -> float:
        return self.measured_mse / self.simulated_mse


def measure(folder: Path) -> tuple[Row, ...]:
    """All rows; files and answers lie in `folder` afterwards. Raises as `emulate.answers` does."""
    simulated = _write(folder)
    rows = []
    for processor, emulated in (("this one", False), (PROCESSOR, True)):
        found = answers(folder, emulated)
        for scheme, outputs in simulated.items():
            for kind in WEIGHT_TYPES:
                probe = min(float(found[f"probe-{op}-{kind}"].min()) / EXACT for op in PROBED_OPS)
                floats = found["float"]
                mse = _mse(outputs, floats), _mse(found[f"{scheme}-{kind}"], floats)
                rows.append(Row(processor, scheme, kind, probe, *mse))
    return tuple(rows)


def _write(folder: Path) -> dict[str, np.ndarray]:
    """Writes probes, float model and quantized files with their feeds; returns the simulated outputs by scheme."""
    with np.load(example.data_path()) as data:
        images = data["input"][: CALIBRATION + MEASURED]
    feeds = {"x": images[CALIBRATION:]}
    for op in PROBED_OPS:
        for kind, dtype in WEIGHT_TYPES.items():
            onnx.save(saturation_model(op, dtype), folder / f"probe-{op}-{kind}.onnx")
            feeds[f"probe-{op}-{kind}"] = probe_input(op)
    np.savez(folder / "feeds.npz", **feeds)
    first = {"input": images[:2]}
    model, _ = prepare(load_model(example.model_path()), [first], example.model_path().stat().st_size)
    graph = Graph(model)
    structure = find_structure(graph)
    executor = Executor(graph, structure)
    calibration = calibrate(executor, [({"input": images[:CALIBRATION]}, CALIBRATION)])
    options = find_options(graph, structure, calibration, discover())
    simulated = {}
    for kind in WEIGHT_TYPES:
        parts = Ingredients(graph, structure, calibration, NO_CORRECTIONS, by_name(discover()), kind)
        onnx.save(write_plan(parts, FLOAT_PLAN), folder / "float.onnx")
        for scheme in SCHEMES:
            plan = full_plan(options, scheme)
            onnx.save(write_plan(parts, plan), folder / f"{scheme}-{kind}.onnx")
            values = Simulation(executor, parts, plan).run({"input": feeds["x"]})
            simulated[scheme] = values[graph.outputs[0].name].numpy().copy()
    return simulated


def _mse(outputs: np.ndarray, floats: np.ndarray) -> float:
    reference = {"y": floats}
    return float(logit_mse({"y": outputs}, reference, output_variance(reference)).mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the benchmark."""
    argparse.ArgumentParser(prog="python -m benchmarks.saturation", description=__doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    print("| processor | scheme | weights | probe | simulated MSE | measured MSE | ratio |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        figures = f"{row.probe:.3f} | {row.simulated_mse:.5f} | {row.measured_mse:.5f} | {row.ratio:.2f}"
        print(f"| {row.processor} | {row.scheme} | {row.weight_type} | {figures} |")
