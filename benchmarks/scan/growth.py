"""How the cost of a scan grows with the graph: `python -m benchmarks.scan.growth`.

One family of models, residual blocks of two convolutions with random weights, of 50 to 800 layers. Each is scanned
with the screen and exactly, in a process of its own; processor seconds, sessions of the scan included.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from benchmarks.scan.bench import NUM_SAMPLES, Batch, Bench, bench_of, float_session
from benchmarks.scan.measure import environment, scan, timed, top_overlap
from benchmarks.scan.run import RESULTS
from onnx import TensorProto, helper, numpy_helper
from scipy.stats import spearmanr

from quantsieve.schemes._static import by_name
from quantsieve.sensitivity.screen import Rows, screen_batch
from quantsieve.sensitivity.suffix import Prices, Probes
from quantsieve.weights import NO_CORRECTIONS

LAYERS = (50, 100, 200, 400, 800)
WIDTH, SIZE, CLASSES = 16, 8, 10
PASSES = 9


@dataclass(frozen=True, slots=True)
class Growth:
    """One model. *_s: processor seconds; *_mb: growth of the largest resident memory, exact after screened.
    rank: as the screen finds it on its checked sources; true_rank, row_rank: Spearman of all sources, of all layers."""

    layers: int
    num_sources: int
    fpe_ms: float
    exact_s: float
    screened_s: float
    num_exact: int
    rank: float | None
    true_rank: float
    row_rank: float
    top_overlap: float
    screened_mb: float
    exact_mb: float

    def per_source(self, seconds: float) -> float:
        """In passes of the float model."""
        return seconds * 1e3 / self.fpe_ms / self.num_sources


def stacked(layers: int, seed: int = 0) -> onnx.ModelProto:
    """x [n, 3, SIZE, SIZE] -> y [n, CLASSES]: a stem, blocks of two convolutions around an Add, a head.

    Channels differ in size, and so do blocks; branches shrink with the depth, so that no model's values explode.
    """
    draw = np.random.default_rng(seed)
    nodes, constants = [], []
    blocks = (layers - 2) // 2

    def conv(name: str, read: str, num_in: int, gain: float) -> str:
        spread = np.exp(0.6 * draw.standard_normal((WIDTH, 1, 1, 1)))
        weight = draw.standard_normal((WIDTH, num_in, 3, 3)) * spread * gain / np.sqrt(9 * num_in)
        bias = 0.1 * draw.standard_normal(WIDTH)
        constants.append(numpy_helper.from_array(weight.astype(np.float32), f"{name}_w"))
        constants.append(numpy_helper.from_array(bias.astype(np.float32), f"{name}_b"))
        nodes.append(helper.make_node("Conv", [read, f"{name}_w", f"{name}_b"], [name], name, pads=[1] * 4))
        return name

    def relu(read: str) -> str:
        nodes.append(helper.make_node("Relu", [read], [f"{read}_r"], f"{read}_relu"))
        return f"{read}_r"

    value = relu(conv("stem", "x", 3, 1.4))
    for index in range(blocks):
        branch = relu(conv(f"block{index}_a", value, WIDTH, 1.4))
        branch = conv(f"block{index}_b", branch, WIDTH, 2 / np.sqrt(blocks) * np.exp(0.5 * draw.standard_normal()))
        nodes.append(helper.make_node("Add", [branch, value], [f"block{index}"], f"block{index}_add"))
        value = relu(f"block{index}")
    nodes.append(helper.make_node("GlobalAveragePool", [value], ["pooled"], "pool"))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["flat"], "flatten"))
    head = draw.standard_normal((CLASSES, WIDTH)) / np.sqrt(WIDTH)
    constants.append(numpy_helper.from_array(head.astype(np.float32), "head_w"))
    nodes.append(helper.make_node("Gemm", ["flat", "head_w"], ["y"], "head", transB=1))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, SIZE, SIZE])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", CLASSES])]
    graph = helper.make_graph(nodes, "stacked", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def open_stacked(layers: int) -> Bench:
    draw = np.random.default_rng(1)

    def samples() -> list[Batch]:
        shape = (NUM_SAMPLES, 1, 3, SIZE, SIZE)
        images = draw.standard_normal(shape) * draw.uniform(0.3, 2, (NUM_SAMPLES, 1, 1, 1, 1))
        return [({"x": image.astype(np.float32)}, 1) for image in images]

    return bench_of(f"stacked {layers}", ir.from_proto(stacked(layers)), samples(), samples())


def measure_growth(layers: int) -> Growth:
    bench = open_stacked(layers)
    session = float_session(bench.proto)
    feeds = bench.batches[0][0]
    passes: list[float] = []

    def float_passes() -> None:
        passes.extend(timed(lambda: session.run(None, feeds))[1] for _ in range(PASSES))

    session.run(None, feeds)
    float_passes()
    executor, start = bench.executor(), _peak_mb()
    (screened, screened_s, _), between = timed(lambda: screen(bench)), _peak_mb()
    float_passes()
    exact, exact_s, _ = timed(lambda: scan(bench, executor))
    float_passes()
    end = _peak_mb()
    found, wanted = screened.mean(), exact.mean()
    scores = [np.asarray([prices[list(row)].sum() for row in rows_of(bench).sources]) for prices in (found, wanted)]
    assert screened.screening is not None
    return Growth(
        layers=layers,
        num_sources=len(bench.sources),
        fpe_ms=float(np.median(passes) * 1e3),
        exact_s=exact_s,
        screened_s=screened_s,
        num_exact=int(screened.is_exact.sum()),
        rank=screened.screening.rank,
        true_rank=float(spearmanr(found, wanted).statistic),
        row_rank=float(spearmanr(*scores).statistic),
        top_overlap=top_overlap(*scores),
        screened_mb=between - start,
        exact_mb=end - between,
    )


def screen(bench: Bench) -> Prices:
    """The screened scan of the only batch, with sessions of its own."""
    feeds, count = bench.batches[0]
    probes = Probes(bench.executor(), feeds, count, bench.calibration, NO_CORRECTIONS, by_name([bench.scheme]))
    return screen_batch(probes, bench.sources, rows_of(bench))


def rows_of(bench: Bench) -> Rows:
    index = {source: number for number, source in enumerate(bench.sources)}
    return Rows(tuple(tuple(index[source] for source in sources) for sources in bench.layer_sources().values()))


def table(rows: Sequence[Growth]) -> str:
    """Markdown, one line a model, ending in a newline."""
    lines = [
        "| layers | sources | FPE | exact | FPE a source | screened | FPE a source | share | priced exactly "
        "| rank, as checked | rank, all sources | rank, layers | top 10 | peak growth, screened / exact |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _line(row: Growth) -> str:
    cells = [
        str(row.layers),
        str(row.num_sources),
        f"{row.fpe_ms:.1f} ms",
        f"{row.exact_s:.1f} s",
        f"{row.per_source(row.exact_s):.2f}",
        f"{row.screened_s:.1f} s",
        f"**{row.per_source(row.screened_s):.3f}**",
        f"{100 * row.screened_s / row.exact_s:.0f} %",
        str(row.num_exact),
        "none" if row.rank is None else f"{row.rank:.3f}",
        f"{row.true_rank:.3f}",
        f"{row.row_rank:.3f}",
        f"{10 * row.top_overlap:.0f} of 10",
        f"{row.screened_mb:.0f} / {row.exact_mb:.0f} MB",
    ]
    return "| " + " | ".join(cells) + " |"


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, keeps a JSON, prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scan.growth", description=__doc__)
    parser.add_argument("--layers", nargs="+", type=int, default=LAYERS, metavar="N")
    parser.add_argument("--out", type=Path, default=RESULTS / "growth.json", help="file of the results")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)  # the child of one model
    options = parser.parse_args(arguments)
    if options.alone is not None:
        print(json.dumps(asdict(measure_growth(options.alone))))
        return
    rows = []
    for layers in options.layers:
        command = [sys.executable, "-m", "benchmarks.scan.growth", "--alone", str(layers)]
        rows.append(Growth(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)))
        document = {"schema": 1, "environment": environment(), "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(rows), end="")


if __name__ == "__main__":
    main()
