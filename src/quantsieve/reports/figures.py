"""A picture of the front: file size against loss, with intervals, baselines in grey, the recommended model
marked.

Drawn by matplotlib, which the extra `viz` installs; a summary always gives the same picture.
"""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from quantsieve.errors import UsageError
from quantsieve.evaluation import Estimate
from quantsieve.front import Candidate, is_float, is_measured
from quantsieve.reports import _numbers as numbers
from quantsieve.reports._axis import Axis, linear_axis, loss_axis, staircase
from quantsieve.reports.summary import Summary, is_baseline, is_end, loss_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patheffects import AbstractPathEffect

FRONT, RECOMMENDED, BASELINE, INK = "#2166ac", "#d6604d", "#b4b8bd", "#24292f"
_SIZE = (8.4, 4.7)  # inches; 1344 x 752 at 160 dpi, sharp at README width
_DPI = 160


def front_picture(summary: Summary, kind: Literal["png", "svg"] = "png") -> bytes:
    """The picture's file. Raises UsageError without matplotlib, or when nothing was measured on final
    samples."""
    if not any(is_measured(c) for c in summary.candidates):
        raise UsageError("a model measured on final samples", "none", "Run `quantsieve tune` to its first finalists.")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "matplotlib, which draws the picture",
            "none installed",
            "Install it: `pip install 'quantsieve[viz]'`.",
        ) from error
    style: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "svg.hashsalt": "quantsieve",
        "svg.fonttype": "path",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=_SIZE, dpi=_DPI, facecolor="white", layout="constrained")
        _draw(summary, figure)
        buffer = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


def _draw(summary: Summary, figure: "Figure") -> None:
    axes = figure.add_subplot()
    measured = [(c, loss) for c in summary.candidates if (loss := loss_of(c)) is not None]
    x_axis = linear_axis([c.size_bytes / 1e6 for c, _ in measured])
    y_axis = loss_axis([loss.value for _, loss in measured], summary.max_drop)
    _scale(axes, x_axis, y_axis)
    _titles(summary, axes)
    axes.axhspan(y_axis.low, summary.max_drop, color="#2ca25f", alpha=0.07, lw=0, zorder=0)
    axes.axhline(summary.max_drop, color="#2ca25f", lw=1, ls=(0, (4, 3)), zorder=1)
    _budget_label(summary, axes)
    front = [(c, loss) for c, loss in measured if c.id in summary.front]
    _points(
        axes,
        [(c, e) for c, e in measured if is_baseline(c) and c.id not in summary.front],
        BASELINE,
        "baselines",
    )
    others = [(c, e) for c, e in measured if not is_baseline(c) and c.id not in summary.front]
    _points(axes, others, "#9ecae1", "other models")
    _points(axes, front, FRONT, "front")
    stairs = staircase([(c.size_bytes / 1e6, loss.value) for c, loss in front])
    axes.step(
        *zip(*[*stairs, (x_axis.high, stairs[-1][1])], strict=True),
        where="post",
        color=FRONT,
        lw=1.2,
        alpha=0.45,
        zorder=3,
    )
    chosen = summary.recommended
    if chosen is not None:
        loss = loss_of(chosen)
        assert loss is not None  # only measured models are recommended
        axes.plot(
            [chosen.size_bytes / 1e6],
            [loss.value],
            "*",
            ms=19,
            color=RECOMMENDED,
            mec="white",
            mew=1.2,
            zorder=8,
            label="recommended",
        )
    _labels(summary, axes)
    axes.legend(loc="upper right", frameon=False, fontsize=9, labelcolor=INK)


def _points(axes: "Axes", found: list[tuple[Candidate, Estimate]], color: str, label: str) -> None:
    if not found:
        return
    size = [c.size_bytes / 1e6 for c, _ in found]
    below = [e.value - e.low for _, e in found]
    above = [e.high - e.value for _, e in found]
    order = 5 if color == FRONT else 2
    axes.errorbar(
        size,
        [e.value for _, e in found],
        yerr=[below, above],
        fmt="o",
        ms=6 if color == FRONT else 4.5,
        color=color,
        mec="white",
        mew=0.8,
        elinewidth=1.1,
        capsize=2.5,
        zorder=order,
        label=label,
    )


def _scale(axes: "Axes", x_axis: Axis, y_axis: Axis) -> None:
    if y_axis.threshold is not None:
        axes.set_yscale("symlog", linthresh=y_axis.threshold, linscale=1.0)
        axes.yaxis.minorticks_off()
    axes.set_xlim(x_axis.low, x_axis.high)
    axes.set_ylim(y_axis.low, y_axis.high)
    axes.set_yticks(y_axis.ticks, [numbers.tick_percent(tick) for tick in y_axis.ticks])
    axes.set_xticks(x_axis.ticks, [f"{tick:g}" for tick in x_axis.ticks])
    axes.grid(color="#eaeef2", lw=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#8c959f")
    axes.tick_params(colors="#57606a", length=3)


def _titles(summary: Summary, axes: "Axes") -> None:
    axes.set_xlabel("file size, MB", color=INK)
    axes.set_ylabel(f"loss of {summary.metric}", color=INK)
    samples = numbers.count(summary.splits.final, "final sample")
    title = f"{summary.model_file}: measured on {samples}, bars are 95 % intervals"
    if summary.synthetic:
        title = f"{summary.model_file}: SYNTHETIC INPUTS, a direction only"
    axes.set_title(title, loc="left", fontsize=10.5, color="#b2182b" if summary.synthetic else INK, pad=10)


def _budget_label(summary: Summary, axes: "Axes") -> None:
    """Above the budget's line, on the side where the recommended model is not."""
    left, right = axes.get_xlim()
    chosen = summary.recommended
    is_free = chosen is None or chosen.size_bytes / 1e6 < (left + right) / 2
    axes.annotate(
        f"budget {numbers.percent(summary.max_drop)}",
        (0.995 if is_free else 0.38, summary.max_drop),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8.5,
        color="#238b45",
    )


def _labels(summary: Summary, axes: "Axes") -> None:
    """Names of the two ends, beside them, and of the recommended model, on a line of its own towards the
    middle."""
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground="white")]
    for candidate in summary.candidates:
        loss = loss_of(candidate)
        if loss is None or not is_end(candidate) or candidate.id == summary.recommendation.id:
            continue
        text = f"{candidate.origin}\n{numbers.size(candidate.size_bytes)}, {numbers.percent(loss.value)}"
        place = (candidate.size_bytes / 1e6, loss.value)
        is_right = candidate.size_bytes > 0.7 * max(summary.float_bytes, summary.full_bytes)
        axes.annotate(
            text,
            place,
            xytext=(-9, 12) if is_right else (11, 0),
            textcoords="offset points",
            ha="right" if is_right else "left",
            va="bottom" if is_right else "center",
            fontsize=9,
            color=INK,
            zorder=9,
            linespacing=1.25,
            path_effects=halo,
        )
    chosen = summary.recommended
    if chosen is not None:
        _label_chosen(summary, chosen, axes, halo)


def _label_chosen(summary: Summary, chosen: Candidate, axes: "Axes", halo: Sequence["AbstractPathEffect"]) -> None:
    loss, kept = loss_of(chosen), summary.kept(chosen)
    assert loss is not None  # only measured models are recommended
    text = f"recommended: {numbers.size(chosen.size_bytes)}, {numbers.percent(loss.value)}"
    if is_float(chosen):
        text += "\nfloat: no quantized model is within the budget"
    elif kept is not None:
        text += f"\n{numbers.percent(kept)} of full int8's size reduction"
    left, right = axes.get_xlim()
    is_left = chosen.size_bytes / 1e6 < (left + right) / 2
    axes.annotate(
        text,
        (chosen.size_bytes / 1e6, loss.value),
        xytext=(40 if is_left else -34, 62),
        textcoords="offset points",
        ha="left" if is_left else "right",
        va="center",
        fontsize=9.5,
        weight="bold",
        color=RECOMMENDED,
        zorder=9,
        linespacing=1.25,
        path_effects=halo,
        arrowprops={
            "arrowstyle": "-",
            "color": RECOMMENDED,
            "lw": 1.1,
            "shrinkB": 8,
            "relpos": (0 if is_left else 1, 0),
        },
    )
