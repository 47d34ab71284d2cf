"""Facts as text: aligned columns, no colour off a terminal, long names shortened in the middle.

Text from files (names of nodes, reasons) is shown as it is: never read as markup, control characters escaped.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quantsieve.evaluation import Failed, Measured
from quantsieve.inspection import Inspection, LayerFacts
from quantsieve.model.graph import GraphValue
from quantsieve.reports._numbers import count, percent, percent_interval, three
from quantsieve.reports.text import plain
from quantsieve.sensitivity.drift import Drift

if TYPE_CHECKING:
    from quantsieve.api import EvaluationResult, PickResult, ScanResult

PIPE_WIDTH = 120  # columns where stdout is no terminal and COLUMNS is not set
_GAP = 2
_MOST_OUTPUTS = 3  # that a table of scores has columns for
_NARROW = 110  # below it, why a layer cannot be quantized becomes a number explained under the table


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    right: bool = False
    shrinks: bool = False  # gets what the other columns leave


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process with code 1; `_door` decides


def stdout_console() -> Console:
    """The console for results, as wide as the terminal."""
    console = _Console(file=sys.stdout, highlight=False, emoji=False, markup=False)
    if "COLUMNS" not in os.environ:
        if not console.is_terminal:
            console.width = PIPE_WIDTH
        else:
            with contextlib.suppress(OSError):  # rich would ask descriptors 0 to 2, of which none need be stdout
                console.width = os.get_terminal_size(sys.stdout.fileno()).columns or console.width
    return console


def shorten(text: str, width: int) -> str:
    """The text in at most `width` characters, its middle left out where it is longer.

    More of the end is kept: names of nodes are paths, and layers differ in the last parts.
    """
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def quantity(value: float) -> str:
    """'0', '812', '22.6 k', '4.63 M': three digits."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor * 0.9995:
            return f"{value / factor:#.3g}".rstrip(".") + f" {unit}"
    return f"{value:.0f}"


def num_bytes(value: int) -> str:
    """'812 B', '22.6 kB', '18.6 MB'."""
    text = quantity(value)
    return f"{text}B" if " " in text else f"{text} B"


def dimensions(shape: Sequence[int | str | None] | None) -> str:
    """'N×3×224×224' with '?' where a dimension is unknown; 'any' where the rank is."""
    if shape is None:
        return "any"
    return "×".join("?" if dim is None else plain(str(dim)) for dim in shape) or "scalar"


def print_table(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Rows under titles; the shrinking column takes the width that is left, at least 10."""
    widths = [max([cell_len(c.title), *(cell_len(row[i]) for row in rows)]) for i, c in enumerate(columns)]
    spare = (
        console.width
        - _GAP * (len(columns) - 1)
        - sum(w for w, c in zip(widths, columns, strict=True) if not c.shrinks)
    )
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            column.title, justify="right" if column.right else "left", no_wrap=column.shrinks, overflow="fold"
        )
    for row in rows:
        cells = [
            shorten(cell, max(10, spare)) if column.shrinks else cell for cell, column in zip(row, columns, strict=True)
        ]
        table.add_row(*map(Text, cells))
    with console.capture() as captured:
        console.print(table)
    # rich pads every line to the table's width; results are compared and copied as text.
    console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


# --- inspect --------------------------------------------------------------------------------


def show_inspection(console: Console, facts: Inspection) -> None:
    """The file, its interface, its operators and its layers."""
    print_pairs(console, _file_facts(facts))
    console.print()
    print_table(
        console,
        (Column(""), Column("name", shrinks=True), Column("type"), Column("shape")),
        [*_interface("input", facts.inputs), *_interface("output", facts.outputs)],
    )
    console.print()
    operators = ", ".join(f"{plain(name)} {count}" for name, count in facts.op_counts)
    console.print(Text(f"Operators: {operators or 'none'}"))
    console.print()
    _show_layers(console, facts.layers)
    console.print()
    console.print(Text(f"{len(facts.quantizable)} of {len(facts.layers)} layers can be quantized."))
    print_notes(console, facts.notes)


def _file_facts(facts: Inspection) -> Iterator[tuple[str, str]]:
    others = "".join(f", {plain(domain)} {version}" for domain, version in facts.opsets)
    yield "Model", plain(facts.path)
    yield "Size", f"{num_bytes(facts.size_bytes)} ({facts.size_bytes} bytes)"
    yield "Opset", f"{facts.opset}{others} (IR version {facts.ir_version})"
    if facts.producer:
        yield "Producer", plain(facts.producer)
    yield "Parameters", f"{quantity(facts.num_params)} ({num_bytes(facts.weight_bytes)})"
    yield "Multiply-adds", f"{quantity(facts.macs)} a sample"


def print_pairs(console: Console, pairs: Iterable[tuple[str, str]]) -> None:
    """A name and its value a line, values aligned."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        console.print(Text(f"{name:<{width}}  {value}"), soft_wrap=True)


def _interface(kind: str, values: Sequence[GraphValue]) -> list[tuple[str, ...]]:
    return [(kind, plain(value.name), value.dtype, dimensions(value.shape)) for value in values]


def _show_layers(console: Console, layers: Sequence[LayerFacts]) -> None:
    texts = [", ".join(layer.schemes) or f"float: {layer.refusal}" for layer in layers]
    narrow = console.width < _NARROW
    numbers = {text: str(i) for i, text in enumerate(dict.fromkeys(texts), start=1)} if narrow else {}
    title = "note" if narrow else "can be quantized"
    columns = (
        Column("layer", shrinks=True),
        Column("operator"),
        Column("params", right=True),
        Column("bytes", right=True),
        Column("output"),
        Column("MACs", right=True),
        Column(title),
    )
    rows = [
        (
            plain(layer.name),
            shorten(plain(layer.op_type), 20),
            quantity(layer.num_params) if layer.num_params else "-",
            num_bytes(layer.weight_bytes) if layer.weight_bytes else "-",
            dimensions(layer.output_shape),
            "-" if layer.macs is None else quantity(layer.macs),
            numbers.get(text, plain(text)),
        )
        for layer, text in zip(layers, texts, strict=True)
    ]
    print_table(console, columns, rows)
    if numbers:
        console.print()
        for text, number in numbers.items():
            console.print(Text(f"{number}  {plain(text)}"))


# --- scan and evaluate --------------------------------------------------------------------------------


def show_scan(console: Console, found: "ScanResult") -> None:
    """What each layer costs under each scheme, the dearest first, then the layers that stay float."""
    is_decibel = found.metric.unit == "dB"
    outputs = tuple(dict.fromkeys(name for s in found.layers for name in s.outputs))
    shown = outputs if len(outputs) <= _MOST_OUTPUTS else ()
    has_drift = any(s.drift is not None for s in found.layers)
    rows = [
        (
            str(number),
            plain(s.layer),
            s.scheme,
            f"{s.value:.1f}" if is_decibel else f"{'' if s.is_exact else '~'}{s.value:.2e}",
            f"{s.low:.1f} to {s.high:.1f}" if is_decibel else f"{s.low:.1e} to {s.high:.1e}",
            "tie" if s.tie else "",
            *(("" if s.drift is None else three(s.drift),) if has_drift else ()),
            *(f"{s.outputs[name]:.1f}" if is_decibel else f"{s.outputs[name]:.1e}" for name in shown),
        )
        for number, s in enumerate(found.layers, start=1)
    ]
    if rows:
        columns = (
            Column("rank", right=True),
            Column("layer", shrinks=True),
            Column("scheme"),
            Column("score dB" if is_decibel else "score", right=True),
            Column("95 %"),
            Column("with next"),
            *((Column("drift", right=True),) if has_drift else ()),
            *(Column(shorten(plain(name), 12), right=True) for name in shown),
        )
        print_table(console, columns, rows)
        console.print(
            Text(
                f"\nScore: {plain(found.metric.text)}, on {found.num_samples} samples; {found.metric.direction}. "
                "A tie: the paired difference to the next row may be 0 (95 %)."
                + ("" if all(s.is_exact for s in found.layers) else " ~: estimated by the screen, not priced exactly.")
            )
        )
        if len(outputs) > len(shown) or any(s.channels for s in found.layers):
            console.print(Text("The JSON document (-o FILE or --json) holds the values of each output or channel."))
        if has_drift:
            console.print(Text("Drift: of the layer alone, the real session's squared error over the simulated one."))
        if found.drift:
            _show_drift(console, found.drift)
    else:
        by_hand = any(r.is_kept for r in found.refused)
        console.print(Text(f"No layer of this model can be quantized{' that is not kept float' if by_hand else ''}."))
    if found.refused:
        console.print(Text("\nThese layers stay float:"))
        reasons = [(plain(r.layer), plain(r.op_type), plain(r.reason)) for r in found.refused]
        print_table(console, (Column("layer", shrinks=True), Column("operator"), Column("reason")), reasons)
    print_notes(console, found.notes)


def _show_drift(console: Console, found: Sequence[Drift]) -> None:
    console.print(Text("\nThe fully quantized model in a real session:"))
    told = [(_drift(drift), plain(drift.scheme)) for drift in found]
    for text in dict.fromkeys(text for text, _ in told):
        console.print(Text(f"{', '.join(scheme for same, scheme in told if same == text)}: {text}."))


def _drift(found: Drift) -> str:
    if found.reason is not None or found.measured is None or found.simulated is None:
        return f"none ran, so nothing is held against the simulation ({plain(found.reason or '').rstrip('.')})"
    times = "the same" if found.ratio is None else f"{three(found.ratio)} times that"
    text = f"relative squared error {found.measured:.2e}, simulated {found.simulated:.2e}: {times}"
    return f"{text}, on {count(found.num_samples, 'sample')}"


def show_pick(console: Console, found: "PickResult", written: str | None) -> None:
    """What is kept float and what that holds, then its nodes, one a line and as a list for Python."""
    blocks = sum(len(group.layers) > 1 for group, _ in found.groups)
    by_hand = sum(r.is_kept for r in found.scan.refused)
    refused = len(found.scan.refused) - by_hand
    together = f", {count(blocks, 'block')} of several among them" if blocks else ""
    pairs = [
        ("Scores", f"{plain(found.scan.model_file)} under {found.scheme}, higher is worse"),
        ("Kept float", f"{count(found.num_kept, 'layer')}{together}"),
        ("Quantized", count(found.num_quantized, "layer")),
        *([("Float anyway", f"{count(refused, 'layer')} that cannot be quantized")] if refused else []),
        *(
            [("Float by hand", f"{count(by_hand, 'layer')} that the scan left out; not among the names")]
            if by_hand
            else []
        ),
        ("Coverage", f"{found.coverage:.1%} of the scores that were ranked"),
        ("Mass", f"{found.mass:.1%} of the layers' scores"),
    ]
    print_pairs(console, [*pairs, *([("Written", plain(written))] if written is not None else [])])
    if found.groups:
        console.print()
        rows = [(plain(group.name), f"{score:.2e}", str(len(group.layers))) for group, score in found.groups]
        columns = (Column("kept float", shrinks=True), Column("score", right=True), Column("layers", right=True))
        print_table(console, columns, rows)
    console.print(Text("\nNodes to exclude:"))
    for node in found.nodes:
        console.print(Text(plain(node)), soft_wrap=True)
    console.print(Text(f"\nnodes_to_exclude={list(found.nodes)!r}"), soft_wrap=True)


def show_evaluation(console: Console, found: "EvaluationResult") -> None:
    """One line a candidate file; failures say their reason below."""
    columns = (
        Column("file", shrinks=True),
        Column("bytes", right=True),
        Column(found.metric, right=True),
        Column("loss [95 %]", right=True),
        Column("label differs", right=True),
        Column("SQNR dB", right=True),
    )
    rows = [(plain(path), num_bytes(found.sizes[path]), *_figures(outcome)) for path, outcome in found.outcomes.items()]
    print_table(console, columns, rows)
    console.print(Text(f"\nAgainst the float model on the same {found.num_samples} samples."))
    for path, outcome in found.outcomes.items():
        if isinstance(outcome, Failed):
            console.print(Text(f"{plain(path)} failed ({outcome.kind}): {plain(outcome.reason)}"))
        elif outcome.num_bad:
            console.print(Text(f"{plain(path)}: {outcome.num_bad} samples with NaN or infinity"))
    print_notes(console, found.notes)


def _figures(outcome: Measured | Failed) -> tuple[str, ...]:
    if isinstance(outcome, Failed):
        return ("failed", "-", "-", "-")
    return (
        percent(outcome.score),
        percent_interval(outcome.loss()),
        percent(outcome.disagreement().value),
        f"{outcome.sqnr_db:.1f}",
    )


def print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(Text(f"Note: {plain(note).rstrip('.')}."))
