"""A picture of the front: file size against loss, with intervals, baselines in grey, the recommended model
marked.

Drawn by matplotlib, which the extra `viz` installs; a summary always gives the same picture.
"""

import io
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from quantsieve.errors import UsageError
from quantsieve.evaluation import Estimate
from quantsieve.front import Candidate, is_float, is_measured
from quantsieve.reports import _numbers as numbers
from quantsieve.reports._axis import Axis, linear_axis, loss_axis, staircase
from quantsieve.reports._labels import Box, place
from quantsieve.reports.summary import Summary, is_baseline, is_end, loss_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

FRONT, RECOMMENDED, BASELINE, INK = "#2166ac", "#d6604d", "#b4b8bd", "#24292f"
_SIZE = (8.4, 4.7)  # inches; 1344 x 752 at 160 dpi, sharp at README width
_DPI = 160
_DOT, _CAP, _STAR = 9.0, 6.0, 26.0  # pixels from the middle of a point, a bar, the star to the edge


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
    axes.legend(loc="upper right", frameon=False, fontsize=9, labelcolor=INK)
    _labels(summary, axes, figure)


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


def _labels(summary: Summary, axes: "Axes", figure: "Figure") -> None:
    """What the recommended model is, and the names of the ends, each where it hides fewest points and bars."""
    figure.draw_without_rendering()  # only now is known where everything lies
    taken = _in_the_way(summary, axes)
    labels: list[Box] = []
    measured = [(c, loss) for c in summary.candidates if (loss := loss_of(c)) is not None]
    measured.sort(key=lambda pair: pair[0].id != summary.recommendation.id)
    for candidate, loss in measured:
        is_chosen = candidate.id == summary.recommendation.id
        if is_chosen or is_end(candidate):
            text = _chosen_text(summary, candidate, loss) if is_chosen else _end_text(candidate, loss)
            labels.append(_label(axes, text, candidate, loss, is_chosen, taken, labels))


def _in_the_way(summary: Summary, axes: "Axes") -> list[Box]:
    """What a label should not hide: legend, points, bars, the front's stairs, the budget."""
    measured = [(c, loss) for c in summary.candidates if (loss := loss_of(c)) is not None]
    found = [_box(artist.get_window_extent()) for artist in (axes.get_legend(), *axes.texts) if artist is not None]
    for candidate, loss in measured:
        x, y = _pixel(axes, candidate.size_bytes / 1e6, loss.value)
        bar = [_pixel(axes, candidate.size_bytes / 1e6, end)[1] for end in (loss.high, loss.low)]
        found += [Box(x - _DOT, y - _DOT, x + _DOT, y + _DOT), Box(x - _CAP, bar[0], x + _CAP, bar[1])]
    low, high = axes.get_xlim()
    stairs = staircase([(c.size_bytes / 1e6, loss.value) for c, loss in measured if c.id in summary.front])
    steps = [(start, value, end) for (start, value), (end, _) in pairwise([*stairs, (high, 0.0)])]
    for start, value, end in [(low, summary.max_drop, high), *steps]:
        left, y = _pixel(axes, start, value)
        found.append(Box(left, y - 1, _pixel(axes, end, value)[0], y + 1))
    return found


def _end_text(candidate: Candidate, loss: Estimate) -> str:
    return f"{candidate.origin}\n{numbers.size(candidate.size_bytes)}, {numbers.percent(loss.value)}"


def _chosen_text(summary: Summary, chosen: Candidate, loss: Estimate) -> str:
    text = f"recommended: {numbers.size(chosen.size_bytes)}, {numbers.percent(loss.value)}"
    kept = summary.kept(chosen)
    if is_float(chosen):
        return f"{text}\nfloat: no quantized model is within the budget"
    return text if kept is None else f"{text}\n{numbers.percent(kept)} of {summary.full_name}'s size reduction"


def _label(
    axes: "Axes",
    text: str,
    candidate: Candidate,
    loss: Estimate,
    is_chosen: bool,
    taken: Sequence[Box],
    labels: Sequence[Box],
) -> Box:
    """Where the text now stands, in pixels with y downward."""
    from matplotlib.patheffects import withStroke

    x, y = _pixel(axes, candidate.size_bytes / 1e6, loss.value)
    style: dict[str, Any] = {"fontsize": 9, "color": INK}
    if is_chosen:
        style = {"fontsize": 9.5, "color": RECOMMENDED, "weight": "bold"}
    trial = axes.text(0, 0, text, linespacing=1.25, **style)
    extent = trial.get_window_extent()
    trial.remove()
    frame, gap = _box(axes.get_window_extent()), _STAR if is_chosen else 1.5 * _DOT
    box = place((x, y), (extent.width, extent.height), [*taken, *labels], frame, gap, labels)
    end = box.nearest(x, y)
    is_far = box.distance(x, y) > (1.3 * _STAR if is_chosen else 2.5 * _DOT)
    axes.annotate(
        text,
        (candidate.size_bytes / 1e6, loss.value),
        xytext=(((box.left + box.right) / 2 - x) * 72 / _DPI, (y - (box.top + box.bottom) / 2) * 72 / _DPI),
        textcoords="offset points",
        ha="center",
        va="center",
        multialignment="right" if box.right < x else "left",
        zorder=9,
        linespacing=1.25,
        path_effects=[withStroke(linewidth=3, foreground="white")],
        arrowprops={
            "arrowstyle": "-",
            "color": style["color"],
            "lw": 1.1 if is_chosen else 0.7,
            "shrinkB": 8 if is_chosen else 4,
            "relpos": ((end[0] - box.left) / extent.width, (box.bottom - end[1]) / extent.height),
        }
        if is_far
        else None,
        **style,
    ).set_in_layout(False)
    return box


def _pixel(axes: "Axes", size: float, loss: float) -> tuple[float, float]:
    """Pixels with y downward, which in matplotlib grows upward; size in MB."""
    x, y = axes.transData.transform((size, loss))
    return float(x), -float(y)


def _box(extent: "Bbox") -> Box:
    return Box(float(extent.x0), -float(extent.y1), float(extent.x1), -float(extent.y0))
