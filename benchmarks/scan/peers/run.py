"""The command line: the samples of each model, a process for each runner, then the tables of all results."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
from benchmarks.quality.zoo import DEFAULT_ZOO, MODELS, open_model
from benchmarks.scan.bench import NUM_SAMPLES
from benchmarks.scan.measure import environment
from benchmarks.scan.peers.environments import PEERS, Failed, python_of, run_script
from benchmarks.scan.peers.table import Row, by_layer, table

RESULTS = Path(__file__).resolve().parents[1] / "results" / "peers"
DEFAULT_MODELS = ("efficientnet_lite0", "mobilenetv2_cifar10")
_OWN = ("ours", "plain")  # runners in this environment
_PATIENCE_S = 600  # of wall time, for reading, calibrating and a busy machine; beside three times the limit


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, keeps a JSON a model, prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scan.peers", description=__doc__)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--models", nargs="+", default=DEFAULT_MODELS, choices=MODELS, metavar="MODEL")
    parser.add_argument("--peers", nargs="*", default=names, choices=names, metavar="PEER", help=" ".join(names))
    parser.add_argument("--limit", type=float, default=200, help="processor seconds of probes of a row")
    parser.add_argument("--environments", type=Path, help="folder that keeps the peers' environments; default: none is")
    parser.add_argument("--zoo", type=Path, default=DEFAULT_ZOO)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the tables of the results")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.table:
        with ExitStack() as stack:
            made = options.environments or stack.enter_context(tempfile.TemporaryDirectory(prefix="quantsieve-peers-"))
            for model in options.models:
                rows = []
                for row in measure(model, options.zoo, Path(made), options.peers, options.limit):
                    rows.append(row)
                    save(options.out / f"{model}.json", rows, options.limit)
    text = "\n".join(f"## {model}\n\n{table(rows)}" for model, rows in load_rows(options.out).items())
    (options.out / "table.md").write_text(text, encoding="utf-8")
    print(text, end="")


def save(path: Path, rows: Sequence[Row], limit_s: float) -> None:
    """The rows so far, for a run that is broken off."""
    document = {
        "schema": 1,
        "environment": environment(),
        "load": os.getloadavg(),
        "limit_s": limit_s,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure(model: str, zoo: Path, environments: Path, peers: Sequence[str], limit_s: float) -> Iterator[Row]:
    """One runner after the other; a peer that fails is a row that says why."""
    with tempfile.TemporaryDirectory(prefix="quantsieve-scan-") as folder:
        samples, out = Path(folder) / "samples.npz", Path(folder) / "out.json"
        path = write_samples(model, zoo, samples)
        call = [path.resolve(), samples, out, str(limit_s)]
        nodes: dict[str, list[str]] = {}
        for script in _OWN:
            print(f"{model}: {script}", file=sys.stderr)
            run_script(Path(sys.executable), script, call, 9 * limit_s + _PATIENCE_S, is_own=True)
            records = json.loads(out.read_text(encoding="utf-8"))
            for name, record in records.items():
                nodes = nodes or record["nodes"]
                yield row_of(name, record, {})
        for peer in PEERS:
            for script in peer.runners if peer.name in peers else ():
                print(f"{model}: {peer.name} {script}", file=sys.stderr)
                try:
                    run_script(python_of(peer, environments.resolve()), script, call, 3 * limit_s + _PATIENCE_S)
                except Failed as failed:
                    yield Row(f"{peer.name}, {script}", failure=str(failed))
                    continue
                for name, record in json.loads(out.read_text(encoding="utf-8")).items():
                    yield row_of(name, record, nodes)


def write_samples(model: str, zoo: Path, path: Path) -> Path:
    """The model's file; into `path` the samples of calibration and of the scores, as `runners/harness.py` reads."""
    opened = open_model(model, zoo)
    parts = {
        "calibration": [opened.calibration.feed(i) for i in range(NUM_SAMPLES)],
        "samples": [opened.evaluation.feed(int(i)) for i in opened.search[:NUM_SAMPLES]],
    }
    name = opened.input_name
    arrays = {f"{part}/{name}": np.concatenate([feed[name] for feed in found]) for part, found in parts.items()}
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return opened.path


def row_of(name: str, record: dict, nodes: dict[str, list[str]]) -> Row:
    """nodes: by layer, where the record's scores are of nodes; {} where they are of layers."""
    known = {key: value for key, value in record.items() if key in {each.name for each in fields(Row)}}
    return Row(name=name, **{**known, "scores": by_layer(record["scores"], nodes) if nodes else record["scores"]})


def load_rows(folder: Path) -> dict[str, list[Row]]:
    """By model, the rows that were measured, in the order of MODELS."""
    paths = {model: folder / f"{model}.json" for model in MODELS}
    return {
        model: [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
        for model, path in paths.items()
        if path.is_file()
    }
