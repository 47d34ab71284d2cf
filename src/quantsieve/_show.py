"""What commands print: text tables, or with `--json` exactly one document; warnings then go to stderr."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantsieve import _tables, api
from quantsieve._door import say
from quantsieve._options import Output
from quantsieve.api import EvaluationResult, PickResult, ScanResult, TuneResult
from quantsieve.errors import QuantsieveError
from quantsieve.inspection import Inspection
from quantsieve.reports.cautions import cautions
from quantsieve.reports.document import report_document
from quantsieve.reports.text import print_report, print_top

SCHEMA = 1  # of the small documents made here


def result(found: TuneResult, output: Output, top_k: int | None = None) -> None:
    """The front, the recommended model and where the report lies; with top_k those models only."""
    if output.json:
        print_json(report_document(found.summary))
        for caution in cautions(found.summary):
            say(f"warning: {caution.text}")
        return
    console = _tables.stdout_console()
    if top_k is None:
        print_report(found.summary, console)
    else:
        print_top(found.summary, console, top_k)
    _tables.print_pairs(console, [("Report", str(path)) for path in found.report_files])


def inspection(facts: Inspection, output: Output) -> None:
    if output.json:
        print_json(facts.document())
    else:
        _tables.show_inspection(_tables.stdout_console(), facts)


def scan(found: ScanResult, output: Output) -> None:
    if output.json:
        print_json(found.document())
    else:
        _tables.show_scan(_tables.stdout_console(), found)


def pick(found: PickResult, output: Output, written: str | None) -> None:
    """The summary, then the names to paste; warnings on stderr."""
    for note in found.notes:
        say(f"warning: {note}")
    if output.json:
        print_json(found.document())
    else:
        _tables.show_pick(_tables.stdout_console(), found, written)


def evaluation(found: EvaluationResult, output: Output) -> None:
    if output.json:
        print_json(found.document())
    else:
        _tables.show_evaluation(_tables.stdout_console(), found)


def path(kind: str, written: Path, output: Output, notes: Sequence[str] = ()) -> None:
    """The file that a command wrote; notes on stderr."""
    for note in notes:
        say(f"note: {note}")
    if output.json:
        print_json({"schema": SCHEMA, "kind": kind, "path": str(written), **({"notes": [*notes]} if notes else {})})
    else:
        print(f"Wrote {written}")


def interrupted(run: Path) -> None:
    """On stderr: the best so far, and how to go on."""
    best = _best_so_far(run)
    say(f"interrupted; {best}. What was finished is kept in {run}: the same command goes on from there.")


def _best_so_far(run: Path) -> str:
    """By the final samples where the run came so far, else by the search samples."""
    with contextlib.suppress(QuantsieveError):
        found = api.report(run)
        if found.recommended is not None:
            return f"recommended so far: {found.file(found.recommended.id)} ({found.recommended.origin})"
    try:
        return str(json.loads((run / "best.json").read_bytes())["text"])
    except (OSError, ValueError, KeyError):
        return "no model was measured so far"


def print_json(document: Mapping[str, Any]) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))
