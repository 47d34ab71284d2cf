"""One run, one table: measures what was asked for, keeps the rest of the earlier results, prints and writes
the table."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.quality import baselines, forerunner, ours
from benchmarks.quality.baselines import Workshop
from benchmarks.quality.records import Entry, Method, Row, load_row, row_path, save_row
from benchmarks.quality.table import OURS, markdown
from benchmarks.quality.zoo import DEFAULT_ZOO, MODELS, THREADS, ZooModel, open_model

from quantsieve.errors import QuantsieveError
from quantsieve.targets.ort import OrtCpu

KINDS = {"per-tensor": ("int8",), "all-int8": ("int8", "int8-channel")}
PARTS = ("first", "last", "forerunner", "ours")
RESULTS = Path(__file__).resolve().parent / "results"
MOST_K = 24  # values of k for each side
RECOMMEND = {"per-tensor": 0.96, "all-int8": 0.99}
RECOMMEND_MODEL = "efficientnet_lite0"
RECOMMEND_DROP = 0.02


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the benchmark; exits 1 with one paragraph when the zoo is not there."""
    options = _parser().parse_args(arguments)
    try:
        if options.recommend:
            _recommend(options.zoo)
            return
        for name in [] if options.table else options.models:
            _measure_model(name, options)
        rows = [row for name in MODELS for kind in KINDS if (row := load_row(options.out, name, kind)) is not None]
    except QuantsieveError as error:
        sys.exit(str(error))
    text = markdown(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS), help="which schemes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="methods to measure anew")
    parser.add_argument("--zoo", type=Path, default=DEFAULT_ZOO, help="folder of the trained models")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--cpu-limit", type=float, default=forerunner.CPU_LIMIT_S, help="of each forerunner, seconds")
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    parser.add_argument("--recommend", action="store_true", help="only the recommended models for a budget of 2 %%")
    return parser


def _measure_model(name: str, options: argparse.Namespace) -> None:
    model = open_model(name, options.zoo)
    model.warm()
    workshop: Workshop | None = None
    with tempfile.TemporaryDirectory(prefix="quantsieve-quality-") as folder:
        work = Path(folder)
        for kind in options.kinds:
            row = load_row(options.out, name, kind)
            if row is None or {"first", "last"} & set(options.only):
                workshop = workshop or baselines.open_workshop(model)
            if row is None:
                row = _new_row(model, kind, _full_int8(workshop, options.out, work))
            for part in options.only:
                for method, found in _measure(part, model, workshop, kind, options, work):
                    row = replace(row, methods={**row.methods, method: found})
                    save_row(row, options.out)
                    _progress(f"{name} {kind} {method}: {found.num_measured} models, {found.cpu_s:.0f} CPU s")


def _measure(
    part: str, model: ZooModel, workshop: Workshop | None, kind: str, options: argparse.Namespace, work: Path
) -> Iterator[tuple[str, Method]]:
    """(name, method) of everything that a part of the benchmark measures."""
    is_channel = kind != "per-tensor"
    if part == "ours":
        yield OURS, ours.tune_counted(model, options.zoo, KINDS[kind])
    elif part == "forerunner":
        ranking = forerunner.rank(model, is_channel, work)
        for direction in forerunner.DIRECTIONS:
            found = forerunner.measure(model, ranking, direction, is_channel, work, options.cpu_limit)
            yield f"forerunner, {direction}", found
    else:
        assert workshop is not None
        yield f"{part} k", baselines.keep_float(workshop, part, KINDS[kind][-1], work, MOST_K)


def _full_int8(workshop: Workshop | None, out: Path, work: Path) -> Entry:
    """Plain full int8 per tensor, the base of both kinds: measured once a model."""
    assert workshop is not None
    for kind in KINDS:
        if row_path(out, workshop.model.name, kind).is_file():
            row = load_row(out, workshop.model.name, kind)
            assert row is not None
            return row.full_int8
    return baselines.measure(workshop, workshop.first(0, "int8"), "full int8, plain", work)


def _new_row(model: ZooModel, kind: str, full: Entry) -> Row:
    environment = OrtCpu(threads=THREADS).environment()
    return Row(model.name, kind, len(model.final), model.float_bytes, full, environment)


def _recommend(zoo: Path) -> None:
    model = open_model(RECOMMEND_MODEL, zoo)
    for kind, wanted in RECOMMEND.items():
        found = ours.size_reduction_kept(model, zoo, KINDS[kind], RECOMMEND_DROP)
        if found is None:
            print(f"{model.name} {kind}: nothing recommended")
            continue
        loss, low, high = found["disagreement"]
        verdict = "met" if found["size_reduction_kept"] >= wanted and loss <= RECOMMEND_DROP else "NOT MET"
        print(
            f"{model.name} {kind}: keeps {100 * found['size_reduction_kept']:.1f} % of full int8's size reduction"
            f" ({found['origin']}), disagreement {100 * loss:.2f} % [{100 * low:.2f}, {100 * high:.2f}];"
            f" asked for {100 * wanted:.0f} % at {100 * RECOMMEND_DROP:.0f} %: {verdict}"
        )


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
