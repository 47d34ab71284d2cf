"""The report in a terminal: warnings, the front as a table, the recommended model and what it keeps float.

Everything goes to the console that the caller gives; rich leaves colour out where it is no terminal. `report_text` is
the same text for a file.
"""

import io
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quantsieve.evaluation import Measured
from quantsieve.front import Candidate, is_float, top_k
from quantsieve.reports import _numbers as numbers
from quantsieve.reports.cautions import cautions
from quantsieve.reports.decisions import Decision, decide, refused_text
from quantsieve.reports.summary import (
    Summary,
    disagreement_of,
    is_baseline,
    loss_of,
    mse_ratio,
    precision,
)

FILE_WIDTH = 100  # columns of report.txt
ORIGIN_WIDTH, NAMES_WIDTH = 14, 12  # least columns of the two cells of the front's table that wrap
MAX_LAYERS = 12  # lines of layers; the rest is counted
_STYLES = {"recommended": "bold green", "best quality": "cyan", "smallest": "cyan", "fastest": "cyan"}


def print_report(summary: Summary, console: Console) -> None:
    """Warnings, front, recommendation, layers kept float, and what the figures rest on."""
    _print_cautions(summary, console)
    _print_table(summary, summary.shown(), "Measured front", console)
    _print_recommendation(summary, console)
    _print_basis(summary, console)


def report_text(summary: Summary) -> str:
    """The text of report.txt: what `print_report` shows, without colour, the same whatever the terminal."""
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=FILE_WIDTH, force_terminal=False, color_system=None,
        highlight=False, emoji=False, markup=False,
    )  # fmt: skip
    print_report(summary, console)
    return "\n".join(line.rstrip() for line in buffer.getvalue().split("\n"))  # rich pads the lines of a table


def plain(text: str) -> str:
    """The text with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_top(summary: Summary, console: Console, k: int) -> None:
    """The k models of `report --top-k`: nearest the ideal first, then the best of each objective, then the
    rest."""
    _print_cautions(summary, console, only_loud=True)
    rows = [summary.candidate(id) for id in top_k(summary.candidates, k)]
    _print_table(summary, rows, f"Top {len(rows)}, nearest the ideal first", console)
    for candidate in rows:
        file = summary.files.get(candidate.id)
        if file is not None:
            console.print(Text.assemble((candidate.id, "bold"), f"  {file}"), soft_wrap=True)
    console.print()


def _print_cautions(summary: Summary, console: Console, only_loud: bool = False) -> None:
    shown = [caution for caution in cautions(summary) if caution.loud or not only_loud]
    for caution in shown:
        sign, style = ("!!", "bold red") if caution.loud else ("!", "yellow")
        line = Table.grid(padding=(0, 1))
        text = plain(" ".join(caution.text.split()))
        line.add_row(Text(sign, style), Text(text, style if caution.loud else ""))
        console.print(line)
    if shown:
        console.print()


def _print_table(summary: Summary, rows: Sequence[Candidate], title: str, console: Console) -> None:
    if not rows:
        console.print(Text.assemble((title, "bold"), f"  {plain(summary.model_file)}"))
        console.print("No model was measured on the final samples so far.\n")
        return
    timed = any(c.latency for c in rows)
    for wide, folded in ((True, False), (True, True), (False, True)):  # the first that fits, the last in any case
        cells = [_row(summary, candidate, wide, timed, folded) for candidate in rows]
        if _least_width(cells, wide) <= console.width:
            break
    reference = summary.reference
    score = ""
    if reference is not None and isinstance(reference.final, Measured) and not _loss_is_disagreement(summary):
        score = f", float scores {numbers.percent(reference.final.score)}"
    console.print(Text.assemble((title, "bold"), f"  {plain(summary.model_file)}, loss of {summary.metric}{score}"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if wide else 0, 0, 0), show_edge=False)
    table.add_column("model", no_wrap=True)
    table.add_column("from", min_width=ORIGIN_WIDTH)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("kept", justify="right", no_wrap=True)
    table.add_column("loss [95 %]", no_wrap=True)
    if wide:
        table.add_column("SQNR dB" if _loss_is_disagreement(summary) else "label differs", no_wrap=True)
    if timed:
        table.add_column("ms a run", no_wrap=True)
    if wide:
        table.add_column("", min_width=NAMES_WIDTH)
    for candidate, row in zip(rows, cells, strict=True):
        table.add_row(*row, style="" if candidate.id in summary.front else "dim")
    console.print(Padding(table, (1, 0)))


def _least_width(cells: Sequence[Sequence[Text]], wide: bool) -> int:
    """Columns that the rows take at least; in fewer, rich cuts the ends of figures and names off."""
    widths = [
        max(cell_len(line) for cell in column for line in cell.plain.split("\n")) for column in zip(*cells, strict=True)
    ]
    widths[1] = ORIGIN_WIDTH
    if wide:
        widths[-1] = NAMES_WIDTH
    return sum(widths) + (2 if wide else 1) * (len(widths) - 1)


def _row(summary: Summary, candidate: Candidate, wide: bool, timed: bool, folded: bool) -> list[Text]:
    """The cells of a candidate; folded: the interval of its time stands on a line of its own."""
    names = _names(summary, candidate)
    loss = loss_of(candidate)
    origin = Text(candidate.origin)
    if names and not wide:
        origin = Text("\n").join([origin, names])
    cells = [Text(candidate.id, "bold" if "recommended" in names.plain else ""), origin]
    cells.append(Text(numbers.size(candidate.size_bytes)))
    kept = summary.kept(candidate)
    cells.append(Text("" if kept is None or is_float(candidate) else numbers.percent(kept)))
    cells.append(Text("not measured" if loss is None else numbers.percent_interval(loss)))
    if wide:
        cells.append(_second_opinion(summary, candidate))
    if timed:
        cells.append(_time(candidate, folded))
    if wide:
        cells.append(names)
    return cells


def _loss_is_disagreement(summary: Summary) -> bool:
    return summary.metric == "agreement"


def _second_opinion(summary: Summary, candidate: Candidate) -> Text:
    """Label disagreement, or SQNR where the loss is the disagreement already."""
    disagreement = disagreement_of(candidate)
    if disagreement is None or not isinstance(candidate.final, Measured):
        return Text("")
    if _loss_is_disagreement(summary):
        return Text("" if is_float(candidate) else f"{candidate.final.sqnr_db:.1f}")
    return Text(numbers.percent_interval(disagreement))


def _time(candidate: Candidate, folded: bool) -> Text:
    found = candidate.latency
    if found is None:
        return Text("not timed")
    return Text(f"{numbers.three(found.median_ms)}{chr(10) if folded else ' '}{numbers.milliseconds_range(found)}")


def _names(summary: Summary, candidate: Candidate) -> Text:
    words = [Text(name, _STYLES[name]) for name in summary.names.get(candidate.id, ())]
    if candidate.id not in summary.front:
        words.append(Text("not on the front"))
    return Text(", ").join(words)


def _print_recommendation(summary: Summary, console: Console) -> None:
    chosen = summary.recommended
    if chosen is None:
        console.print(Text.assemble(("No model is recommended. ", "bold red"), summary.recommendation.reason))
        console.print()
        return
    loss = loss_of(chosen)
    assert loss is not None  # only measured models are recommended
    parts = [f"{numbers.size(chosen.size_bytes)} (float {numbers.size(summary.float_bytes)})"]
    if is_float(chosen):
        parts = [numbers.size(chosen.size_bytes), "no layer quantized"]
    kept = summary.kept(chosen)
    if kept is not None and not is_float(chosen):
        parts.append(f"keeps {numbers.percent(kept)} of {summary.full_name}'s size reduction")
    parts.append(f"loses {numbers.percent_interval(loss)} of {summary.metric}")
    ratio = summary.of_float_time(chosen)
    if ratio is not None and not is_float(chosen):
        interval = f"[{numbers.three(ratio.low)}, {numbers.three(ratio.high)}]"
        parts.append(f"takes {numbers.three(ratio.median)} {interval} of float's time")
    console.print(
        Text.assemble(
            ("Recommended: ", "bold"),
            (f"{chosen.id} ({chosen.origin})", "bold green"),
            f", {', '.join(parts)}.",
        )
    )
    if not is_float(chosen):  # else it stands among the warnings
        console.print(Text(summary.recommendation.reason))
    for line in _checks(summary, chosen):
        console.print(Text(line))
    if chosen.id in summary.files:
        console.print(Text.assemble(("File: ", "bold"), summary.files[chosen.id]), soft_wrap=True)
    console.print()
    if not is_float(chosen):
        _print_layers(decide(summary, chosen), console)


def _checks(summary: Summary, chosen: Candidate) -> list[str]:
    """What ran, and whether the file does what was simulated."""
    lines = []
    ran = precision(summary, chosen)
    if ran is not None and ran.asked_int8:
        lines.append(f"Read back from the optimized graph: {ran.text()}.")
    ratio = mse_ratio(chosen)
    if ratio is not None:
        lines.append(f"Squared error measured over simulated: {numbers.three(ratio)}.")
    return lines


def _print_layers(decisions: Sequence[Decision], console: Console) -> None:
    """Layers kept float by plan, highest price first, then those that cannot be quantized; at most
    MAX_LAYERS."""
    by_plan = [d for d in decisions if d.kind == "float by plan"]
    refused = [d for d in decisions if d.kind == "refused"]
    quantized = len(decisions) - len(by_plan) - len(refused)
    console.print(
        Text.assemble(
            ("Layers: ", "bold"),
            f"{quantized:,} quantized, {len(by_plan):,} float by plan, {refused_text(decisions)}.",
        )
    )
    by_plan.sort(key=lambda d: -d.ranked.price.value if d.ranked else 0.0)
    kept = [*by_plan, *refused]
    if kept:
        table = Table.grid(padding=(0, 2))
        table.add_column(ratio=2, overflow="fold")
        table.add_column(ratio=3)
        for decision in kept[:MAX_LAYERS]:
            table.add_row(Text(f"  {plain(decision.layer.name)}"), Text(plain(decision.reason), "dim"))
        console.print(table)
        if len(kept) > MAX_LAYERS:
            console.print(Text(f"  and {len(kept) - MAX_LAYERS:,} more; report.json lists all."))
    console.print()


def _print_basis(summary: Summary, console: Console) -> None:
    """What the figures rest on: samples, baselines, prediction, other processors."""
    splits = summary.splits
    samples = numbers.count(splits.final, "final sample")
    method = summary.settings.get("calibration_method", "minmax")
    calibrated = f"{splits.calibration}" if method == "minmax" else f"{splits.calibration}, {method}"
    console.print(
        Text(
            f"Measured on {samples} of {summary.data} (seed {summary.seed}), that neither calibration "
            f"({calibrated}) nor search ({splits.search}) saw. Brackets are "
            "95 % intervals; times within theirs are ties."
        )
    )
    for line in (_baselines(summary), _prediction(summary), summary.saturation):
        if line:
            console.print(Text(line))
    trials = numbers.count(sum(c.search is not None for c in summary.candidates), "model")
    console.print(Text(f"{trials} measured in {numbers.duration(summary.elapsed_s)}.", "dim"))


def _baselines(summary: Summary) -> str:
    baselines = [c for c in summary.candidates if is_baseline(c) and c.search is not None]
    if not baselines:
        return ""
    on_front = sum(c.id in summary.front for c in baselines)
    number = numbers.count(len(baselines), "baseline")
    kinds = "first k, last k float, a ranking"
    return f"{number} ({kinds}) measured beside the programme's plans; {on_front} on the front."


def _prediction(summary: Summary) -> str:
    found = summary.prediction
    if found is None or found.ratio_median is None:
        return ""
    rank = "" if found.rank_correlation is None else f", rank correlation {found.rank_correlation:.2f}"
    finalists = numbers.count(found.num_finalists, "finalist")
    ratio = numbers.three(found.ratio_median)
    return f"Predicted over measured squared error, median of {finalists}: {ratio}{rank}."
