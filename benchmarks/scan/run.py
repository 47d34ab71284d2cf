"""The command line of the benchmark: one process a model, then the table of all results."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.quality.zoo import DEFAULT_ZOO
from benchmarks.scan.bench import MODELS
from benchmarks.scan.measure import Row

RESULTS = Path(__file__).resolve().parent / "results"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, keeps a JSON a model, prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scan", description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, metavar="MODEL", help=" ".join(MODELS))
    parser.add_argument("--zoo", type=Path, default=DEFAULT_ZOO)
    parser.add_argument("--sources", type=int, help="most sources of the first loop; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table of the results")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for model in () if options.table else options.models:
        command = [sys.executable, "-m", "benchmarks.scan.measure", model, str(options.out / f"{model}.json")]
        command += ["--zoo", str(options.zoo)]
        command += ["--sources", str(options.sources)] if options.sources else []
        subprocess.run(command, check=True)
    text = table(load_rows(options.out))
    (options.out / "table.md").write_text(text, encoding="utf-8")
    print(text, end="")


def load_rows(folder: Path) -> list[Row]:
    """The rows that were measured, in the order of MODELS."""
    paths = [folder / f"{model}.json" for model in MODELS]
    rows = [json.loads(path.read_text(encoding="utf-8"))["row"] for path in paths if path.is_file()]
    return [Row(**{**row, "wall_s": tuple(row["wall_s"])}) for row in rows]


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line a model, ending in a newline."""
    lines = [
        "| model | samples (batch) | sources | layers | FPE | scan | FPE a source | FPE a layer | wall, 1 / 2 workers "
        "| peak growth | a file a source | a calibration a layer | price gap | layer ranks | top 10 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    cells = [
        row.model + (" (layer by layer)" if row.refusal else ""),
        f"{row.num_samples} ({row.batch})",
        str(row.num_sources),
        str(row.num_layers),
        f"{row.fpe_ms:.1f} ms",
        f"{row.scan_s:.2f} s",
        f"**{row.scan_fpe_per_source:.2f}**",
        f"{row.scan_fpe_per_layer:.2f}",
        f"{row.wall_s[0]:.2f} / {row.wall_s[1]:.2f} s",
        f"{row.peak_growth_mb:.0f} MB",
        f"{row.whole_s / row.fpe_s / row.num_sources:.2f} FPE a source",
        f"{row.requantized_s / row.fpe_s / row.num_layers:.1f} FPE a layer",
        f"{row.price_gap:.0e}",
        f"{row.rank:.4f}",
        f"{10 * row.top_overlap:.0f} of 10",
    ]
    return "| " + " | ".join(cells) + " |"
