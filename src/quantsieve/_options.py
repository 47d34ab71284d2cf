"""Options of the command line in groups: each group arrives at its command as one object.

Imports nothing but click: `--help` must answer at once. Names are those of the Python functions; a value is
checked here only as far as its own text goes (a number, a duration), everything else where it is used.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

Command = Callable[..., Any]
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


class Duration(click.ParamType):
    """Seconds from '90', '90s', '5m' or '1h'."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(value).strip().lower())
        if found is None or float(found[1]) == 0:
            self.fail(f"{value!r} is no duration such as 90, 90s, 5m or 1h.", param, ctx)
        return float(found[1]) * _SECONDS[found[2]]


class Size(click.ParamType):
    """Bytes from '2000000000', '512M' or '1.5G'; 1K is 1024."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(value).strip().lower())
        if found is None:
            self.fail(f"{value!r} is no size such as 2000000000, 512M or 4G.", param, ctx)
        return round(float(found[1]) * 1024 ** " kmgt".index(found[2] or " "))


class Names(click.ParamType):
    """A tuple of names from a text with commas."""

    name = "names"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(part.strip() for part in str(value).split(",") if part.strip()))
        if not names:
            self.fail("at least one name is needed.", param, ctx)
        return names


class Entries(click.ParamType):
    """A tuple of names from a text with commas; a text that begins with 're:' is one entry, commas and all."""

    name = "entries"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        text = str(value)
        if text.startswith("re:"):
            return (text,)
        names = tuple(part.strip() for part in text.split(",") if part.strip())
        if not names:
            self.fail("at least one name is needed.", param, ctx)
        return names


class Weights(click.ParamType):
    """Two numbers from a text with a comma."""

    name = "weights"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        try:
            first, second = (float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no pair of numbers such as 0.5,0.5.", param, ctx)
        return first, second


class Rows(click.ParamType):
    """'auto', 'off', or a number of rows of at least 1."""

    name = "rows"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        text = str(value).strip().lower()
        if text in ("auto", "off"):
            return text
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
            self.fail(f"{value!r} is none of auto, off and a number of at least 1.", param, ctx)
        return int(text)


@dataclass(frozen=True, slots=True)
class Source:
    """Where samples come from."""

    data: str | None
    calibration_data: str | None
    synthetic: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Images:
    """How images become feeds; texts as given, None where not given."""

    mean: str | None
    std: str | None
    scale: str | None
    resize: str | None
    crop: str | None
    pad: str | None
    layout: str | None
    color: str | None
    interpolation: str | None
    preprocess: str | None
    skip_bad: bool
    class_names: str | None

    def given(self) -> dict[str, str]:
        """Preprocessing options that were given, by name."""
        names = ("mean", "std", "scale", "resize", "crop", "pad", "layout", "color", "interpolation")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class Search:
    """What `tune` may spend and what it has to reach."""

    schemes: tuple[str, ...]
    max_drop: float
    confident: bool
    workers: int
    timeout: float | None  # seconds
    max_trials: int | None


@dataclass(frozen=True, slots=True)
class Scoring:
    """What the scores of a scan are."""

    metric: str
    mode: str
    samples: int | None
    per_output: bool
    per_channel: bool
    combined_weights: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Writing:
    """How quantized files are written."""

    weight_type: str
    activation_type: str
    symmetric_activations: bool
    asymmetric_weights: bool
    file_format: str
    bias_correction: bool


@dataclass(frozen=True, slots=True)
class Calibrating:
    """How ranges come from calibration samples."""

    calibration_method: str
    percentile: float | None  # of values


@dataclass(frozen=True, slots=True)
class Selecting:
    """Layers chosen by hand: names, or patterns behind 're:'; () where not given."""

    nodes_to_exclude: tuple[str, ...]
    nodes_to_quantize: tuple[str, ...]
    op_types_to_exclude: tuple[str, ...]
    op_types_to_quantize: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Picking:
    """What `pick` keeps float."""

    coverage: float | None
    threshold: float | None
    scheme: str | None
    blocks: str | None
    block_agg: str
    max_layers: int | None
    near: float


@dataclass(frozen=True, slots=True)
class Output:
    """What a command prints."""

    json: bool
    quiet: bool
    debug: bool


def _group(name: str, kind: type, options: Sequence[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """A decorator that adds the options to a command and hands their values on as one `kind` named `name`."""
    keys = [field.name for field in dataclasses.fields(kind)]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def collected(**values: Any) -> Any:
            own = {key: values.pop(key) for key in keys}
            return command(**values, **{name: kind(**own)})

        command_with_options: Command = collected
        for option in reversed(options):
            command_with_options = option(command_with_options)
        return command_with_options

    return decorate


source_options = _group(
    "source",
    Source,
    (
        click.option("--data", metavar="PATH", help="Samples: a folder of images, .npz or .npy.", show_default="none"),
        click.option(
            "--calibration-data",
            metavar="PATH",
            help="Samples for calibration alone.",
            show_default="a part of --data",
        ),
        click.option(
            "--synthetic",
            metavar="N",
            type=click.IntRange(min=1),
            help="Make up N random samples instead; such scores only point a direction.",
            show_default="none",
        ),
        click.option("--seed", type=click.IntRange(min=0), default=0, help="Fixes every random choice."),
    ),
)

image_options = _group(
    "images",
    Images,
    (
        click.option("--mean", metavar="A[,B,C]", help="Subtracted from pixels.", show_default="0"),
        click.option("--std", metavar="A[,B,C]", help="Pixels are divided by it.", show_default="1"),
        click.option("--scale", metavar="X", help="Factor on pixels before mean and std.", show_default="1"),
        click.option(
            "--resize",
            metavar="N|HxW",
            help="Short side, or exact size.",
            show_default="the size of the input",
        ),
        click.option("--crop", metavar="N|HxW", help="Centre crop after resizing.", show_default="none"),
        click.option(
            "--pad",
            metavar="X",
            help="Keep the aspect in an exact --resize; fill with X.",
            show_default="none",
        ),
        click.option("--layout", metavar="nchw|nhwc", help="Order of axes.", show_default="from the input"),
        click.option("--color", metavar="rgb|bgr|gray", help="Order of channels.", show_default="from the input"),
        click.option(
            "--interpolation",
            metavar="nearest|bilinear|bicubic",
            help="Of resizing.",
            show_default="bilinear",
        ),
        click.option(
            "--preprocess",
            metavar="FILE.toml",
            help="The options above from a file; options on the command line win.",
            show_default="none",
        ),
        click.option("--skip-bad", is_flag=True, help="Count unreadable images instead of stopping."),
        click.option(
            "--class-names",
            metavar="FILE",
            help="Names of class folders in the order of the model's outputs, one a line.",
            show_default="sorted",
        ),
    ),
)

writing_options = _group(
    "writing",
    Writing,
    (
        click.option(
            "--weight-type",
            type=click.Choice(["auto", "s8", "u8", "s7"]),
            default="auto",
            help="Of 8-bit weights; auto: s8, or u8 where s8 kernels saturate here; s7: s8 of half the range.",
        ),
        click.option(
            "--activation-type",
            type=click.Choice(["u8", "s8"]),
            default="u8",
            help="Type of 8-bit activations.",
        ),
        click.option(
            "--symmetric-activations",
            is_flag=True,
            help="Zero point in the middle of the type for every 8-bit activation, as some targets demand.",
        ),
        click.option(
            "--asymmetric-weights",
            is_flag=True,
            help="Zero points of static int8 weights as their ranges ask for.",
        ),
        click.option(
            "--format",
            "file_format",
            type=click.Choice(["qdq", "qoperator"]),
            default="qdq",
            help="Q/DQ pairs around float operators, or integer operators where onnxruntime has them.",
        ),
        click.option(
            "--bias-correction/--no-bias-correction",
            default=True,
            help="Take each layer's mean rounding error out of its bias.",
        ),
    ),
)

calibrating_options = _group(
    "calibrating",
    Calibrating,
    (
        click.option(
            "--calibration-method",
            type=click.Choice(["minmax", "percentile", "entropy", "mse"]),
            default="minmax",
            help="Ranges of 8-bit activations: all values, or narrower ones that clip the outermost.",
        ),
        click.option(
            "--percentile",
            type=click.FloatRange(0, 100, min_open=True),
            metavar="P",
            help="Share of values, in percent, that the calibration method percentile leaves unclipped.",
            show_default="99.99",
        ),
    ),
)

schemes_option = click.option(
    "--schemes",
    type=Names(),
    metavar="A,B,...",
    default="int8,int8-channel",
    help="Precisions that layers may be given besides float.",
)

workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    default=2,
    help="Probes of the scan that run at once.",
)

memory_option = click.option(
    "--memory-limit",
    type=Size(),
    metavar="SIZE",
    help="Memory to take beside the model, such as 512M or 4G.",
    show_default="half of what is free",
)

search_options = _group(
    "search",
    Search,
    (
        schemes_option,
        click.option(
            "--max-drop",
            type=click.FloatRange(min=0),
            metavar="X",
            default=0.01,
            help="Largest acceptable loss of the metric, absolute: 0.01 is one point of 100.",
        ),
        click.option("--confident", is_flag=True, help="Let the unfavourable end of the interval meet --max-drop."),
        workers_option,
        click.option(
            "--timeout",
            type=Duration(),
            metavar="TIME",
            help="Stop after 90, 90s, 5m or 1h with the best so far.",
            show_default="none",
        ),
        click.option(
            "--max-trials",
            type=click.IntRange(min=1),
            metavar="N",
            help="Stop after N measured models with the best so far.",
            show_default="none",
        ),
    ),
)

output_options = _group(
    "output",
    Output,
    (
        click.option("--json", is_flag=True, help="Print one JSON document on stdout."),
        click.option("--quiet", is_flag=True, help="Show no progress."),
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
    ),
)

scan_option = click.option(
    "--scan",
    metavar="SCAN.json",
    help="Never quantize the layers that it marks keep_float.",
    show_default="none",
)


def _together(ctx: click.Context, param: click.Parameter, value: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """All entries of an option that was given several times."""
    return tuple(entry for entries in value for entry in entries)


def _selecting(name: str, metavar: str, help: str) -> Callable[[Command], Command]:
    return click.option(
        name, type=Entries(), multiple=True, callback=_together, metavar=metavar, help=help, show_default="none"
    )


selecting_options = _group(
    "selecting",
    Selecting,
    (
        _selecting(
            "--nodes-to-exclude",
            "A,B,...|re:PATTERN",
            "Keep the layers of these nodes float: names of nodes of MODEL or of layers; repeatable.",
        ),
        _selecting("--nodes-to-quantize", "A,B,...|re:PATTERN", "Keep all layers but those of these nodes float."),
        _selecting("--op-types-to-exclude", "A,B,...|re:PATTERN", "Keep layers of these operators float."),
        _selecting(
            "--op-types-to-quantize", "A,B,...|re:PATTERN", "Keep all layers but those of these operators float."
        ),
    ),
)

scoring_options = _group(
    "scoring",
    Scoring,
    (
        click.option(
            "--metric",
            metavar="NAME",
            default="relative_mse",
            help="Of the outputs: relative_mse, mse, sqnr, kl_div, cos, top1, top5, max_abs; accuracy, agreement, "
            "fidelity, or quality for the one that tune takes; or file.py:function.",
        ),
        click.option(
            "--mode",
            type=click.Choice(["alone", "rescue"]),
            default="alone",
            help="Quantize each layer alone, or all but one.",
        ),
        click.option(
            "--samples",
            type=click.IntRange(min=1),
            metavar="N",
            default=None,
            show_default="until the order is settled, 64 at most",
            help="Samples that scores are means over.",
        ),
        click.option("--per-output", is_flag=True, help="Tell the metric's value of each output as well."),
        click.option("--per-channel", is_flag=True, help="Tell its value of each channel of each output as well."),
        click.option(
            "--combined-weights",
            type=Weights(),
            metavar="LOCAL,ACCUMULATED",
            default="0.5,0.5",
            help="Weights of both errors in the rank of the tensors.",
        ),
    ),
)

pick_options = _group(
    "picking",
    Picking,
    (
        click.option(
            "--coverage",
            type=click.FloatRange(0, 1),
            metavar="X",
            help="Keep the fewest layers that hold this share of all scores.",
            show_default="none",
        ),
        click.option(
            "--threshold",
            type=click.FloatRange(min=0),
            metavar="T",
            help="Keep what scores above T.",
            show_default="none",
        ),
        click.option(
            "--scheme",
            metavar="NAME",
            help="Scheme whose scores count.",
            show_default="the first of the scan",
        ),
        click.option(
            "--blocks",
            metavar="FILE|auto|stage|half|op_type",
            help="Decide layers together: a TOML or JSON map of names to regular expressions, the blocks that the "
            "scan found, its stages and heads, its blocks with attention and MLP apart, or operators.",
            show_default="each layer alone",
        ),
        click.option(
            "--block-agg",
            type=click.Choice(["sum", "max", "mean"]),
            default="sum",
            help="Score of a block from those of its layers.",
        ),
        click.option(
            "--max-layers",
            type=click.IntRange(min=0),
            metavar="N",
            help="Keep at most N layers.",
            show_default="all",
        ),
        click.option(
            "--near",
            type=click.FloatRange(0, 1, min_open=True),
            metavar="X",
            default=0.99,
            help="Warn of a cut between scores whose ratio is X or more.",
        ),
    ),
)

metric_option = click.option(
    "--metric",
    metavar="NAME",
    help="Quality measure: top1, agreement, fidelity, or file.py:function.",
    show_default="top1 with labels, else by the outputs",
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    help="Threads of each model that is measured.",
)
samples_option = click.option(
    "--samples", type=click.IntRange(min=1), metavar="N", default=32, help="Samples of the sensitivity scan."
)
screen_option = click.option(
    "--screen",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    help="Estimate most scores of large graphs; auto: from some hundred sources of noise on.",
)
equalize_option = click.option(
    "--equalize",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    help="Scale channels between layers so that rounding costs least; auto: where simulated plans get better.",
)
equalize_plan_option = click.option(
    "--equalize",
    type=click.Choice(["on", "off"]),
    help="Scale channels between layers so that rounding costs least.",
    show_default="as the plan's file says",
)
drift_option = click.option(
    "--drift",
    type=Rows(),
    metavar="auto|off|N",
    default="auto",
    help="Run the quantized model for real beside the simulation; N: the N worst rows alone, too; auto: 10 of "
    "them where the two differ.",
)
max_samples_option = click.option(
    "--max-samples",
    type=click.IntRange(min=1),
    metavar="N",
    help="Use only N of the samples.",
    show_default="all",
)
limit_option = click.option(
    "--limit",
    "limit_s",
    type=Duration(),
    metavar="TIME",
    default="5m",
    help="Time limit of one answer of the target.",
)
