"""The figures of all rows as markdown, and whether each of the issue's demands is met."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.quality.fraction import Share, fraction, lead, share
from benchmarks.quality.records import Entry, Method, Row
from scipy.stats import spearmanr

OURS = "ours"
BASELINES = ("first k", "last k", "forerunner, as published", "forerunner, repaired")
METHODS = (OURS, *BASELINES)
MSE_FACTOR = 1.5
MIN_RANK = 0.9
# Not counted for the forerunner either, or not done by it: starting Python, final samples, timing.
UNCOUNTED_STAGES = ("start", "final", "latency")
KEPT = (0.3, 0.5, 0.75, 0.85, 0.95, 0.97, 0.985, 0.99, 0.995)
DEMANDED = {
    ("efficientnet_lite0", "per-tensor"): 0.95,
    ("mobilenetv2_cifar10", "per-tensor"): 0.85,
    ("efficientnet_lite0", "all-int8"): 0.95,
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """How prediction, simulation and measurement of the logit MSE fit. Ratios: 1 is perfect; None: not known."""

    num_finalists: int
    worst_measured_to_simulated: float | None  # by its logarithm, as the ratio itself
    median_measured_to_simulated: float | None
    full_predicted_to_measured: float | None
    median_predicted_to_measured: float | None
    rank: float | None  # Spearman, predicted against measured


@dataclass(frozen=True, slots=True)
class Verdict:
    """One demand and whether it is met."""

    demand: str
    is_met: bool
    found: str


def agreement(entries: Sequence[Entry]) -> Agreement:
    """Ratios over the entries whose figures are known."""
    simulated = _ratios(entries, "measured_mse", "simulated_mse")
    predicted = _ratios(entries, "predicted_mse", "final_mse")
    full = [entry for entry in entries if entry.origin.startswith("full int8")]
    return Agreement(
        len(entries),
        _worst(simulated),
        _median(simulated),
        _worst(_ratios(full, "predicted_mse", "final_mse")),
        _median(predicted),
        _rank(entries),
    )


def fractions(row: Row) -> dict[str, Share]:
    """The fraction of every method of the row, by name."""
    return {name: share(_points(row, name), row.base) for name in METHODS if name in row.methods}


def markdown(rows: Sequence[Row]) -> str:
    """All tables, ending in a newline."""
    tables = (_fraction_table, _kept_table, _cost_table, _mse_table)
    parts = [*(table(rows) for table in tables), _verdict_table(verdicts(rows))]
    return "\n".join(part for part in parts if part)


def verdicts(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """The demands of the section "Real input", for the rows that have our figures."""
    ours = [row for row in rows if OURS in row.methods and any(name in row.methods for name in BASELINES)]
    found: list[Verdict] = []
    above = 0
    for row in ours:
        gap, best = _lead(row)
        above += gap.value > 0
        name = f"{row.model}, {row.kind}"
        shown = f"{gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}] against {best}"
        found.append(Verdict(f"{name}: at least the best baseline, within the interval", gap.high >= 0, shown))
        wanted = DEMANDED.get((row.model, row.kind))
        if wanted is not None:
            value = fraction(_points(row, OURS), row.base)
            found.append(Verdict(f"{name}: fraction at least {wanted}", value >= wanted, f"{value:.3f}"))
        found += _mse_verdicts(name, agreement(row.methods[OURS].entries))
        found += _cost_verdicts(name, row)
    if ours:
        demand = "above every baseline on at least half of the rows"
        found.append(Verdict(demand, above * 2 >= len(ours), f"{above} of {len(ours)}"))
    return tuple(found)


def _lead(row: Row) -> tuple[Share, str]:
    """How far ours is above the best baseline, and which one that is."""
    best = max((n for n in BASELINES if n in row.methods), key=lambda n: fraction(_points(row, n), row.base))
    return lead(_points(row, OURS), _points(row, best), row.base), best


def _mse_verdicts(name: str, found: Agreement) -> list[Verdict]:
    made = [
        (
            f"{name}: measured MSE of every finalist within {MSE_FACTOR} of simulated",
            found.worst_measured_to_simulated,
        ),
        (
            f"{name}: predicted MSE of full int8 within {MSE_FACTOR} of measured",
            found.full_predicted_to_measured,
        ),
        (f"{name}: the same for the median finalist", found.median_predicted_to_measured),
    ]
    verdicts = [
        Verdict(demand, value is not None and 1 / MSE_FACTOR <= value <= MSE_FACTOR, _number(value))
        for demand, value in made
    ]
    is_ranked = found.rank is not None and found.rank >= MIN_RANK
    return [
        *verdicts,
        Verdict(f"{name}: rank correlation at least {MIN_RANK}", is_ranked, _number(found.rank)),
    ]


def _cost_verdicts(name: str, row: Row) -> list[Verdict]:
    rivals = [row.methods[n] for n in BASELINES if n.startswith("forerunner") and n in row.methods]
    if not rivals:
        return []
    mine = row.methods[OURS]
    theirs = min(rival.cpu_s_per_model for rival in rivals) * mine.num_measured
    alike = mine.cpu_s - sum(mine.stages.get(stage, 0.0) for stage in UNCOUNTED_STAGES)
    rival = f"against {theirs:.1f} s for {mine.num_measured} models"
    return [
        Verdict(
            f"{name}: fewer CPU seconds than the forerunner, like for like", alike < theirs, f"{alike:.1f} s {rival}"
        ),
        Verdict(f"{name}: the same with all that ours did", mine.cpu_s < theirs, f"{mine.cpu_s:.1f} s {rival}"),
    ]


def _fraction_table(rows: Sequence[Row]) -> str:
    head = ["model", "schemes", "full int8 disagrees", "final samples", *METHODS]
    lines = []
    for row in rows:
        found = fractions(row)
        cells = [row.model, row.kind, f"{100 * row.full_int8.point.disagreement:.1f} %", str(row.num_final)]
        lines.append([*cells, *(_share(found.get(name)) for name in METHODS)])
    return (
        "### Fraction of the ideal front's area, with 95 % bootstrap intervals\n\n"
        "Both kinds of rows are measured against plain full int8 per tensor (its disagreement and size).\n\n"
        + _table(head, lines)
    )


def _cost_table(rows: Sequence[Row]) -> str:
    head = ["model", "schemes", "method", "CPU s", "models measured", "CPU s a model", "CPU s by stage"]
    lines = [
        [
            row.model,
            row.kind,
            name,
            f"{m.cpu_s:.1f}",
            str(m.num_measured),
            f"{m.cpu_s_per_model:.2f}",
            ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in m.stages.items() if seconds >= 0.05) or "-",
        ]
        for row in rows
        for name in METHODS
        if (m := row.methods.get(name)) is not None
    ]
    return (
        "### Processor seconds\n\n"
        "Reading images is counted for nobody. Ours holds scan, search, latency and all final samples; first and\n"
        "last k all final samples; the forerunner its ranking and 300 samples a model, final samples left out.\n\n"
        + _table(head, lines)
    )


def _kept_table(rows: Sequence[Row]) -> str:
    head = ["model", "schemes", "method", *(f"{100 * kept:g} %" for kept in KEPT)]
    lines = [
        [row.model, row.kind, name, *(_at_least(row, row.methods[name], kept) for kept in KEPT)]
        for row in rows
        for name in METHODS
        if name in row.methods
    ]
    return "### Lowest disagreement (%) of the models that keep a share of full int8's size reduction\n\n" + _table(
        head, lines
    )


def _at_least(row: Row, method: Method, kept: float) -> str:
    limit = row.float_bytes - kept * (row.float_bytes - row.full_int8.size_bytes)
    found = [entry.point.disagreement for entry in method.entries if entry.size_bytes <= limit]
    return f"{100 * min(found):.1f}" if found else "-"


def _mse_table(rows: Sequence[Row]) -> str:
    head = [
        "model",
        "schemes",
        "finalists",
        "measured / simulated, worst",
        "median",
        "predicted / measured, full int8",
        "median finalist",
        "rank correlation",
    ]
    lines = []
    for row in rows:
        if OURS in row.methods:
            found = agreement(row.methods[OURS].entries)
            values = (
                found.worst_measured_to_simulated,
                found.median_measured_to_simulated,
                found.full_predicted_to_measured,
                found.median_predicted_to_measured,
                found.rank,
            )
            lines.append([row.model, row.kind, str(found.num_finalists), *map(_number, values)])
    return "### Logit MSE of our finalists\n\n" + _table(head, lines) if lines else ""


def _verdict_table(found: Sequence[Verdict]) -> str:
    if not found:
        return ""
    lines = [[v.demand, "yes" if v.is_met else "**no**", v.found] for v in found]
    return "### Demands\n\n" + _table(["demand", "met", "found"], lines)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _share(found: Share | None) -> str:
    return "-" if found is None else f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _points(row: Row, name: str) -> list:
    return [entry.point for entry in row.methods[name].entries]


def _ratios(entries: Sequence[Entry], over: str, under: str) -> np.ndarray:
    pairs = [(getattr(entry, over), getattr(entry, under)) for entry in entries]
    return np.array([a / b for a, b in pairs if a is not None and b is not None and 0 < a < np.inf and 0 < b < np.inf])


def _worst(ratios: np.ndarray) -> float | None:
    """The ratio that is furthest from 1 as a factor."""
    return float(ratios[np.argmax(np.abs(np.log(ratios)))]) if len(ratios) else None


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


def _rank(entries: Sequence[Entry]) -> float | None:
    pairs = [(e.predicted_mse, e.final_mse) for e in entries if e.predicted_mse is not None and e.final_mse is not None]
    return float(spearmanr(*zip(*pairs, strict=True)).statistic) if len(pairs) >= 3 else None
