"""The command line: parses, calls `api`, prints. No arithmetic, nothing heavy imported before a command runs.

Results go to stdout, progress and warnings to stderr; `_door` turns errors into text and exit codes. Every
command is the Python function of the same name in `api`, with the same names of options.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantsieve import _door
from quantsieve import _options as opt
from quantsieve._door import Commands
from quantsieve.errors import InputError

if TYPE_CHECKING:
    from quantsieve.data import Preprocess


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"quantsieve {version('quantsieve')}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
def program() -> None:
    """Selective post-training quantization of ONNX models.

    Measure every layer, solve, build, run, compare. Start with `quantsieve demo`, then
    `quantsieve tune MODEL --data DATA`.
    """


@program.command()
@click.argument("model")
@click.option("-o", "--output", "run", metavar="RUN", help="Run folder.", show_default="quantsieve-run-<MODEL>")
@opt.source_options
@opt.image_options
@opt.calibrating_options
@opt.search_options
@opt.scan_option
@opt.selecting_options
@opt.metric_option
@opt.equalize_option
@opt.samples_option
@opt.screen_option
@opt.max_samples_option
@opt.threads_option
@opt.limit_option
@opt.memory_option
@opt.writing_options
@opt.output_options
def tune(
    model: str,
    run: str | None,
    source: opt.Source,
    images: opt.Images,
    calibrating: opt.Calibrating,
    search: opt.Search,
    scan: str | None,
    selecting: opt.Selecting,
    metric: str | None,
    equalize: str,
    samples: int,
    screen: str,
    max_samples: int | None,
    threads: int,
    limit_s: float,
    memory_limit: int | None,
    writing: opt.Writing,
    output: opt.Output,
) -> None:
    """Find the best quantized models of MODEL.

    Measures every layer, solves for the trade-offs, builds and runs them, and reports the front. Results go
    to the run folder; the same command goes on where it was stopped.
    """
    from quantsieve import _show, api
    from quantsieve._progress import watch

    folder = Path(run or f"quantsieve-run-{Path(model).stem}")
    try:
        with watch(output.quiet) as progress:
            result = api.tune(
                model,
                source.data,
                folder,
                synthetic=source.synthetic,
                calibration_data=source.calibration_data,
                calibration_method=calibrating.calibration_method,
                percentile=calibrating.percentile,
                preprocess=_preprocess(images),
                skip_bad=images.skip_bad,
                class_names=_class_names(images),
                scan=scan,
                nodes_to_exclude=selecting.nodes_to_exclude,
                nodes_to_quantize=selecting.nodes_to_quantize,
                op_types_to_exclude=selecting.op_types_to_exclude,
                op_types_to_quantize=selecting.op_types_to_quantize,
                schemes=search.schemes,
                metric=metric,
                max_drop=search.max_drop,
                confident=search.confident,
                seed=source.seed,
                threads=threads,
                workers=search.workers,
                timeout=search.timeout,
                max_trials=search.max_trials,
                weight_type=writing.weight_type,
                activation_type=writing.activation_type,
                symmetric_activations=writing.symmetric_activations,
                asymmetric_weights=writing.asymmetric_weights,
                file_format=writing.file_format,
                bias_correction=writing.bias_correction,
                equalize=equalize,
                samples=samples,
                screen=screen,
                max_samples=max_samples,
                limit_s=limit_s,
                memory_limit=memory_limit,
                progress=progress,
            )
    except KeyboardInterrupt:
        _show.interrupted(folder)
        raise
    _show.result(result, output)


@program.command()
@click.argument("model")
@opt.output_options
def inspect(model: str, output: opt.Output) -> None:
    """Show what MODEL is made of, layer by layer."""
    from quantsieve import _show, api

    _show.inspection(api.inspect(model), output)


@program.command()
@click.argument("model")
@click.option("-o", "--output", "path", metavar="FILE", help="Write scan.json to it.", show_default="none")
@opt.source_options
@opt.image_options
@opt.calibrating_options
@opt.selecting_options
@opt.schemes_option
@opt.scoring_options
@opt.screen_option
@opt.drift_option
@opt.workers_option
@opt.memory_option
@opt.writing_options
@opt.output_options
def scan(
    model: str,
    path: str | None,
    source: opt.Source,
    images: opt.Images,
    calibrating: opt.Calibrating,
    selecting: opt.Selecting,
    schemes: tuple[str, ...],
    scoring: opt.Scoring,
    screen: str,
    drift: str | int,
    workers: int,
    memory_limit: int | None,
    writing: opt.Writing,
    output: opt.Output,
) -> None:
    """Measure what quantizing each layer of MODEL costs."""
    from quantsieve import _show, api
    from quantsieve._progress import watch

    with watch(output.quiet) as progress:
        result = api.scan(
            model,
            source.data,
            synthetic=source.synthetic,
            calibration_data=source.calibration_data,
            calibration_method=calibrating.calibration_method,
            percentile=calibrating.percentile,
            preprocess=_preprocess(images),
            skip_bad=images.skip_bad,
            class_names=_class_names(images),
            nodes_to_exclude=selecting.nodes_to_exclude,
            nodes_to_quantize=selecting.nodes_to_quantize,
            op_types_to_exclude=selecting.op_types_to_exclude,
            op_types_to_quantize=selecting.op_types_to_quantize,
            schemes=schemes,
            seed=source.seed,
            mode=scoring.mode,
            metric=scoring.metric,
            per_output=scoring.per_output,
            per_channel=scoring.per_channel,
            combined_weights=scoring.combined_weights,
            samples=scoring.samples,
            screen=screen,
            drift=drift,
            workers=workers,
            memory_limit=memory_limit,
            weight_type=writing.weight_type,
            activation_type=writing.activation_type,
            symmetric_activations=writing.symmetric_activations,
            asymmetric_weights=writing.asymmetric_weights,
            file_format=writing.file_format,
            bias_correction=writing.bias_correction,
            output=path,
            progress=progress,
        )
    _show.scan(result, output)


@program.command()
@click.argument("scan")
@click.option("-o", "--output", "path", metavar="FILE", help="Write SCAN to it, marked anew.", show_default="none")
@opt.pick_options
@opt.output_options
def pick(scan: str, path: str | None, picking: opt.Picking, output: opt.Output) -> None:
    """Pick layers to keep float from the scores in SCAN."""
    from quantsieve import _show, api

    result = api.pick(
        scan,
        coverage=picking.coverage,
        threshold=picking.threshold,
        scheme=picking.scheme,
        blocks=picking.blocks,
        block_agg=picking.block_agg,
        max_layers=picking.max_layers,
        near=picking.near,
        output=path,
    )
    _show.pick(result, output, path)


@program.command()
@click.argument("model")
@click.option(
    "--plan",
    metavar="PLAN",
    default="int8",
    help="A plan.json, float, or a scheme for every layer that can have it.",
)
@click.option("-o", "--output", "path", metavar="FILE", help="The new model.", show_default="<MODEL>-quantized.onnx")
@opt.source_options
@opt.image_options
@opt.calibrating_options
@opt.scan_option
@opt.selecting_options
@opt.equalize_plan_option
@opt.writing_options
@opt.output_options
def quantize(
    model: str,
    plan: str,
    path: str | None,
    source: opt.Source,
    images: opt.Images,
    calibrating: opt.Calibrating,
    scan: str | None,
    selecting: opt.Selecting,
    equalize: str | None,
    writing: opt.Writing,
    output: opt.Output,
) -> None:
    """Write MODEL as a plan says."""
    from quantsieve import _show, api
    from quantsieve._progress import watch

    notes: list[str] = []
    with watch(output.quiet) as progress:
        written = api.quantize(
            model,
            plan,
            source.data,
            path or f"{Path(model).stem}-quantized.onnx",
            synthetic=source.synthetic,
            calibration_data=source.calibration_data,
            calibration_method=calibrating.calibration_method,
            percentile=calibrating.percentile,
            preprocess=_preprocess(images),
            skip_bad=images.skip_bad,
            class_names=_class_names(images),
            scan=scan,
            nodes_to_exclude=selecting.nodes_to_exclude,
            nodes_to_quantize=selecting.nodes_to_quantize,
            op_types_to_exclude=selecting.op_types_to_exclude,
            op_types_to_quantize=selecting.op_types_to_quantize,
            seed=source.seed,
            weight_type=writing.weight_type,
            activation_type=writing.activation_type,
            symmetric_activations=writing.symmetric_activations,
            asymmetric_weights=writing.asymmetric_weights,
            file_format=writing.file_format,
            bias_correction=writing.bias_correction,
            equalize=equalize,
            tell=notes.append,
            progress=progress,
        )
    _show.path("quantize", written, output, notes)


@program.command()
@click.argument("model")
@click.option(
    "--candidate",
    "candidates",
    metavar="FILE",
    multiple=True,
    required=True,
    help="A quantized model; repeatable.",
)
@opt.source_options
@opt.image_options
@opt.metric_option
@opt.threads_option
@opt.limit_option
@opt.output_options
def evaluate(
    model: str,
    candidates: tuple[str, ...],
    source: opt.Source,
    images: opt.Images,
    metric: str | None,
    threads: int,
    limit_s: float,
    output: opt.Output,
) -> None:
    """Compare quantized models with the float MODEL."""
    from quantsieve import _show, api
    from quantsieve._progress import watch

    with watch(output.quiet) as progress:
        result = api.evaluate(
            model,
            candidates,
            source.data,
            synthetic=source.synthetic,
            preprocess=_preprocess(images),
            skip_bad=images.skip_bad,
            class_names=_class_names(images),
            metric=metric,
            seed=source.seed,
            threads=threads,
            limit_s=limit_s,
            progress=progress,
        )
    _show.evaluation(result, output)


@program.command()
@click.argument("run")
@click.option("--top-k", type=click.IntRange(min=1), metavar="K", help="Only the K best.", show_default="the report")
@opt.output_options
def report(run: str, top_k: int | None, output: opt.Output) -> None:
    """Show the results in the run folder RUN and write them again."""
    from quantsieve import _show, api

    _show.result(api.report(run, top_k=top_k), output, top_k)


@program.command()
@click.argument("run")
@click.option("-o", "--output", "path", metavar="FILE", help="The copy.", show_default="<CANDIDATE>.onnx")
@click.option(
    "--candidate",
    metavar="NAME",
    default="recommended",
    help="An id of the report, or recommended, smallest, fastest, 'best quality'.",
)
@opt.output_options
def export(run: str, path: str | None, candidate: str, output: opt.Output) -> None:
    """Copy a model out of the run folder RUN."""
    from quantsieve import _show, api

    written = api.export(run, path or f"{candidate.replace(' ', '-')}.onnx", candidate=candidate)
    _show.path("export", written, output)


@program.command()
@click.option("-o", "--output", "run", metavar="RUN", default="quantsieve-run-demo", help="Run folder.")
@opt.output_options
def demo(run: str, output: opt.Output) -> None:
    """Tune a small trained model that comes along."""
    from quantsieve import _show, api
    from quantsieve._progress import watch

    folder = Path(run)
    try:
        with watch(output.quiet) as progress:
            result = api.demo(folder, progress=progress)
    except KeyboardInterrupt:
        _show.interrupted(folder)
        raise
    _show.result(result, output)


# --- from options to arguments ------------------------------------------------------------------------------


def _preprocess(images: opt.Images) -> "Preprocess | None":
    """Preprocessing from the file and the options; None when nothing was said."""
    from quantsieve.data import Preprocess

    given: dict[str, object] = dict(images.given())
    in_file: dict[str, object] = {}
    if images.preprocess is not None:
        in_file = dataclasses.asdict(Preprocess.from_toml(Path(images.preprocess)))
    try:
        return Preprocess.from_values({**in_file, **given}) if in_file or given else None
    except InputError as error:
        raise click.UsageError(str(error)) from error


def _class_names(images: opt.Images) -> tuple[str, ...] | None:
    if images.class_names is None:
        return None
    try:
        lines = Path(images.class_names).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "a text file with one class name a line",
            f"{images.class_names} ({error})",
            "Correct --class-names.",
        ) from error
    return tuple(line.strip() for line in lines if line.strip())


def main(args: Sequence[str] | None = None) -> int:
    """The exit code of the command in `args` (None: those of the process)."""
    return _door.run(program, sys.argv[1:] if args is None else args)


if __name__ == "__main__":
    sys.exit(main())
