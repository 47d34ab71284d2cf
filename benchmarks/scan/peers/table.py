"""The rows of a model as one table: what a probe and a whole scan cost, and how alike the scores are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import spearmanr

TOP = 10
EXACT, RACED = "quantsieve, exact", "quantsieve, raced"
OWN = {False: (EXACT, RACED), True: ("quantsieve, weights, exact", "quantsieve, weights, raced")}  # by is_weights
_HEAD = (
    "tool, what it runs", "version", "probes", "set-up", "a probe", "FPE a probe", "times exact / raced",
    "whole scan", "times exact / raced", "wall", "peak", "ranks", "top 10", "score gaps",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a runner, or why there is none. Seconds are processor seconds; wall_s and peak_mb of the process.
    timed: probes that ran, of `probes`. scores: by layer of Quantsieve's, higher is worse. samples: of a probe, in the
    mean."""

    name: str
    versions: Mapping[str, str] = field(default_factory=dict)
    fpe_s: float = 1.0
    setup_cpu_s: float = 0.0
    probe_cpu_s: float = 0.0
    wall_s: float = 0.0
    probes: int = 0
    timed: int = 0
    peak_mb: float = 0.0
    samples: float = 0
    unit: str = "KL"
    scores: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None

    @property
    def is_weights(self) -> bool:
        return "weights" in self.name

    @property
    def is_own(self) -> bool:
        """Whether the row quantizes as Quantsieve does, so that scores compare and not only their order."""
        return self.name.startswith(("quantsieve", "plain loop"))

    @property
    def probe_s(self) -> float:
        return self.probe_cpu_s / max(self.timed, 1)

    @property
    def probe_fpe(self) -> float:
        return self.probe_s / self.fpe_s

    @property
    def scan_fpe(self) -> float:
        """Set-up and all probes, those that did not run at the mean of those that did."""
        return self.setup_cpu_s / self.fpe_s + self.probe_fpe * self.probes


def by_layer(scores: Mapping[str, float], nodes: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Scores of nodes added up over the nodes of each layer; layers that have none of them are left out."""
    found = {}
    for layer, names in nodes.items():
        known = [scores[name] for name in names if name in scores]
        if known:
            found[layer] = float(sum(known))
    return found


def alike(scores: Mapping[str, float], exact: Mapping[str, float]) -> tuple[float, int | None, int]:
    """(Spearman's rank correlation, how many of the TOP worst are the same, layers that both know); nan and None for
    fewer than TOP common layers, None also where `scores` lacks a layer of the exact top."""
    common = [layer for layer in exact if layer in scores]
    if len(common) < TOP:
        return float("nan"), None, len(common)
    a, b = np.asarray([exact[layer] for layer in common]), np.asarray([scores[layer] for layer in common])
    worst = sorted(exact, key=lambda layer: -exact[layer])[:TOP]
    tops = {common[i] for i in np.argsort(-b, kind="stable")[:TOP]}
    return (
        float(spearmanr(a, b).statistic),
        len(tops & set(worst)) if set(worst) <= set(common) else None,
        len(common),
    )


def score_gaps(scores: Mapping[str, float], exact: Mapping[str, float]) -> tuple[float, float]:
    """Median and largest of |score / exact score - 1| over the common layers."""
    gaps = [abs(scores[layer] / exact[layer] - 1) for layer in exact if layer in scores and exact[layer]]
    return float(np.median(gaps)), float(max(gaps))


def table(rows: Sequence[Row]) -> str:
    """Markdown of one model, ending in a newline."""
    by_name = {row.name: row for row in rows}
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|---|" + "---:|" * (len(_HEAD) - 2)]
    lines += ["| " + " | ".join(_cells(row, by_name)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cells(row: Row, by_name: Mapping[str, Row]) -> list[str]:
    if row.failure is not None:
        return [row.name, row.failure, *["-"] * (len(_HEAD) - 2)]
    own = [by_name[name] for name in OWN[row.is_weights] if name in by_name and by_name[name].failure is None]
    rank, top, common = alike(row.scores, own[0].scores) if own and row.scores else (float("nan"), None, 0)
    count = f"{row.probes}" if row.timed == row.probes else f"{row.probes} ({row.timed} ran)"
    return [
        row.name + (f", {row.samples:.3g} samples" if row.name in OWN[row.is_weights] else ""),
        next(iter(row.versions.values()), "-"),
        count,
        f"{row.setup_cpu_s:.2f} s",
        f"{row.probe_s:.3f} s",
        f"**{row.probe_fpe:.2f}**",
        " / ".join(f"{row.probe_fpe / each.probe_fpe:.1f}" for each in own) or "-",
        f"{row.scan_fpe:.0f} FPE",
        " / ".join(f"{row.scan_fpe / each.scan_fpe:.1f}" for each in own) or "-",
        f"{row.wall_s:.1f} s",
        f"{row.peak_mb:.0f} MB",
        "-" if np.isnan(rank) else f"{rank:.3f} ({common})",
        "-" if top is None else f"{top}",
        " / ".join(f"{gap:.2%}" for gap in score_gaps(row.scores, own[0].scores))
        if own and row.scores and row.is_own
        else "-",
    ]
