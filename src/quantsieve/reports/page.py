"""The report as one HTML page that needs no network and no script: warnings, picture, front, layers,
environment."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise

import jinja2

from quantsieve.front import Candidate, is_float
from quantsieve.reports import _numbers as numbers
from quantsieve.reports._axis import Axis, linear_axis, loss_axis, staircase
from quantsieve.reports._labels import Box, place
from quantsieve.reports.cautions import cautions
from quantsieve.reports.decisions import Decision, decide, refused_text
from quantsieve.reports.summary import (
    Precision,
    Summary,
    disagreement_of,
    failures,
    is_baseline,
    is_end,
    is_measured,
    loss_of,
    mse_ratio,
    precision,
)

_WIDTH, _HEIGHT = 920, 400  # of the picture, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 16, 44
_FRAME = Box(_LEFT, _TOP, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM)
_RADIUS = {"chosen": 8.0, "front": 5.5, "baseline": 4.0, "other": 4.0}
_LETTER, _BOLD_LETTER, _LINE = 7.4, 8.3, 16.0  # upper bounds of a label's letters and lines, whatever the font
_NEAR = 16.0  # a label further away has a line to its point


def html_page(summary: Summary) -> str:
    """The whole page; text from the run is escaped."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(files("quantsieve.reports").joinpath("page.html.j2").read_text("utf-8"))
    chosen = summary.recommended
    decisions = () if chosen is None else decide(summary, chosen)
    return template.render(
        summary=summary,
        cautions=cautions(summary),
        facts=_facts(summary),
        chart=_chart(summary),
        rows=[_row(summary, c) for c in _by_size(summary, shown=True)],
        others=[_row(summary, c) for c in _by_size(summary, shown=False)],
        is_float=chosen is not None and is_float(chosen),
        layers=_layer_rows(decisions),
        counts={kind: sum(d.kind == kind for d in decisions) for kind in ("quantized", "float by plan")},
        refused=refused_text(decisions),
        basis=_basis(summary),
    )


def _by_size(summary: Summary, shown: bool) -> list[Candidate]:
    ids = {c.id for c in summary.shown()}
    found = [c for c in summary.candidates if (c.id in ids) == shown]
    return sorted(found, key=lambda c: (c.size_bytes, c.id))


def _facts(summary: Summary) -> list[tuple[str, str]]:
    """(figure, what it is) of the recommended model."""
    chosen = summary.recommended
    if chosen is None:
        return []
    loss, kept, ratio = loss_of(chosen), summary.kept(chosen), summary.of_float_time(chosen)
    assert loss is not None  # only measured models are recommended
    found = [
        (numbers.size(chosen.size_bytes), f"file, float has {numbers.size(summary.float_bytes)}"),
        (numbers.percent(loss.value), f"loss of {summary.metric} {numbers.percent_range(loss)}"),
    ]
    if kept is not None and not is_float(chosen):
        found.append((numbers.percent(kept), f"of {summary.full_name}'s size reduction kept"))
    if ratio is not None and not is_float(chosen):
        found.append(
            (
                f"{numbers.three(ratio.median)}×",
                f"float's time [{numbers.three(ratio.low)}, {numbers.three(ratio.high)}]",
            )
        )
    return found


def _ran(found: Precision) -> str:
    if found.asked_int8:
        return f"int8 on {found.ran_int8:,} of {found.asked_int8:,} layers"
    return f"{numbers.count(len(found.differing), 'layer')} otherwise than planned" if found.differing else "as planned"


def _row(summary: Summary, candidate: Candidate) -> dict[str, object]:
    loss, disagreement, kept = loss_of(candidate), disagreement_of(candidate), summary.kept(candidate)
    ratio, ran, latency = mse_ratio(candidate), precision(summary, candidate), candidate.latency
    failed = next((f"{f.kind} at {f.stage}: {f.reason}" for f in failures(candidate)), None)
    return {
        "id": candidate.id,
        "origin": candidate.origin,
        "names": summary.names.get(candidate.id, ()),
        "on_front": candidate.id in summary.front,
        "size": numbers.size(candidate.size_bytes),
        "kept": "" if kept is None or is_float(candidate) else numbers.percent(kept),
        "loss": "" if loss is None else numbers.percent(loss.value),
        "loss_range": "" if loss is None else numbers.percent_range(loss),
        "differs": "" if disagreement is None else numbers.percent(disagreement.value),
        "differs_range": "" if disagreement is None else numbers.percent_range(disagreement),
        "ms": "" if latency is None else numbers.three(latency.median_ms),
        "ms_range": "" if latency is None else numbers.milliseconds_range(latency),
        "mse_ratio": "" if ratio is None else numbers.three(ratio),
        "ran": "" if ran is None or is_float(candidate) else _ran(ran),
        "ran_text": "" if ran is None else ran.text(),
        "file": summary.files.get(candidate.id, ""),
        "state": failed or ("" if is_measured(candidate) else "dropped after the search samples"),
    }


def _layer_rows(decisions: Sequence[Decision]) -> list[dict[str, object]]:
    """In graph order; bar: 0..100 on a logarithmic scale over the prices shown."""
    prices = [d.ranked.price.value for d in decisions if d.ranked is not None and d.ranked.price.value > 0]
    low, high = math.log(min(prices, default=1.0)), math.log(max(prices, default=1.0))
    rows: list[dict[str, object]] = []
    for decision in decisions:
        value = decision.ranked.price.value if decision.ranked is not None else 0.0
        share = (math.log(value) - low) / (high - low) if value > 0 and high > low else float(value > 0)
        rows.append(
            {
                "name": decision.layer.name,
                "op": decision.layer.op_type,
                "bytes": numbers.size(decision.layer.weight_bytes) if decision.layer.weight_bytes else "",
                "kind": decision.kind,
                "scheme": decision.scheme,
                "bar": round(4 + 96 * share, 1) if value > 0 else 0,
                "price": numbers.price(value) if decision.ranked is not None else "",
                "reason": decision.reason,
            }
        )
    return rows


def _basis(summary: Summary) -> list[tuple[str, str]]:
    """(what, its value) at the foot of the page."""
    splits = summary.splits
    found = [
        ("data", f"{summary.data}, seed {summary.seed}"),
        (
            "samples",
            f"{splits.calibration} calibration, {splits.search} search, {splits.final} final; disjoint",
        ),
        ("calibration", str(summary.settings.get("calibration_method", "minmax"))),
        ("metric", f"{summary.metric}: {summary.metric_text}; higher is better"),
        (
            "budget",
            f"loss of at most {numbers.percent(summary.max_drop)}"
            + (", interval's high end" if summary.confident else ""),
        ),
        ("schemes", ", ".join(summary.schemes)),
        (
            "run",
            f"{summary.stopped}, {numbers.duration(summary.elapsed_s)}, {len(summary.candidates)} candidates",
        ),
        *((name, value) for name, value in summary.environment.items()),
        ("other processors", summary.saturation),
        ("model key", summary.model_key[:16]),
    ]
    prediction = summary.prediction
    if prediction is not None and prediction.ratio_median is not None:
        text = f"predicted over measured squared error: median {numbers.three(prediction.ratio_median)}"
        rank = prediction.rank_correlation
        found.append(("prediction", text + ("" if rank is None else f", rank correlation {rank:.2f}")))
    return found


@dataclass(frozen=True, slots=True)
class _Canvas:
    x_axis: Axis
    y_axis: Axis

    def x(self, value: float) -> float:
        return round(_LEFT + self.x_axis.place(value) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = min(1.0, max(0.0, self.y_axis.place(value)))
        return round(_TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _chart(summary: Summary) -> Mapping[str, object] | None:
    """Places of everything in the picture; None when nothing was measured on final samples."""
    measured = [(c, loss) for c in summary.candidates if (loss := loss_of(c)) is not None]
    if not measured:
        return None
    canvas = _Canvas(
        linear_axis([c.size_bytes / 1e6 for c, _ in measured]),
        loss_axis([e.value for _, e in measured], summary.max_drop),
    )
    corners = staircase([(c.size_bytes / 1e6, e.value) for c, e in measured if c.id in summary.front])
    path = f"M{canvas.x(corners[0][0])} {canvas.y(corners[0][1])}"
    path += "".join(f"H{canvas.x(size)}V{canvas.y(loss)}" for size, loss in corners[1:]) + f"H{_WIDTH - _RIGHT}"
    points: list[_Point] = []
    for candidate, loss in measured:
        is_chosen = candidate.id == summary.recommendation.id
        kind = "front" if candidate.id in summary.front else "baseline" if is_baseline(candidate) else "other"
        points.append(
            _Point(
                canvas.x(candidate.size_bytes / 1e6),
                canvas.y(loss.value),
                canvas.y(loss.low),
                canvas.y(loss.high),
                "chosen" if is_chosen else kind,
                "recommended" if is_chosen else candidate.origin if is_end(candidate) else "",
                f"{candidate.id} ({candidate.origin}): {numbers.size(candidate.size_bytes)}, "
                f"{numbers.percent_interval(loss)}",
            )
        )
    budget = canvas.y(summary.max_drop)
    lines = [
        Box(_LEFT, budget - 1, _WIDTH - _RIGHT, budget + 1),
        Box(_WIDTH - _RIGHT - 110, budget - 20, _WIDTH - _RIGHT, budget),  # its text
        *(
            Box(canvas.x(size), canvas.y(loss) - 1, canvas.x(end), canvas.y(loss) + 1)
            for (size, loss), (end, _) in pairwise([*corners, (canvas.x_axis.high, 0.0)])
        ),
    ]
    order = ("baseline", "other", "front", "chosen")
    points.sort(key=lambda point: order.index(point.kind))
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "top": _TOP,
        "bottom": _HEIGHT - _BOTTOM,
        "budget": budget,
        "budget_text": f"budget {numbers.percent(summary.max_drop)}",
        "x_ticks": [(canvas.x(tick), f"{tick:g}") for tick in canvas.x_axis.ticks],
        "y_ticks": [(canvas.y(tick), numbers.tick_percent(tick)) for tick in canvas.y_axis.ticks],
        "path": path,
        "points": points,
        "radius": _RADIUS,
        "labels": _labels(points, lines),
    }


@dataclass(frozen=True, slots=True)
class _Point:
    """A model in the picture: its place, the ends of its bar, and what stands beside it."""

    x: float
    y: float
    low: float
    high: float
    kind: str
    label: str
    title: str

    def boxes(self) -> tuple[Box, Box]:
        """What a label must not hide."""
        radius = _RADIUS[self.kind] + 1
        around = Box(self.x - radius, self.y - radius, self.x + radius, self.y + radius)
        return around, Box(self.x - 2, self.high, self.x + 2, self.low)


def _labels(points: Sequence[_Point], lines: Sequence[Box]) -> list[dict[str, object]]:
    """Text and place of each label, the recommended model's first, for it may choose."""
    taken = [*lines, *(box for point in points for box in point.boxes())]
    placed: list[Box] = []
    found: list[dict[str, object]] = []
    for point in sorted(points, key=lambda point: point.kind != "chosen"):
        if not point.label:
            continue
        letter = _BOLD_LETTER if point.kind == "chosen" else _LETTER
        size = (letter * len(point.label), _LINE)
        box = place((point.x, point.y), size, [*taken, *placed], _FRAME, gap=10, labels=placed)
        placed.append(box)
        anchor = "start" if box.left > point.x else "end" if box.right < point.x else "middle"
        x = {"start": box.left, "end": box.right, "middle": (box.left + box.right) / 2}[anchor]
        end_x, end_y = box.nearest(point.x, point.y)
        line = None if box.distance(point.x, point.y) <= _NEAR else (round(end_x, 1), round(end_y, 1))
        found.append(
            {
                "text": point.label,
                "kind": point.kind,
                "anchor": anchor,
                "x": round(x, 1),
                "y": round(box.bottom - 4, 1),
                "point": point,
                "line": line,
            }
        )
    return found
