"""Beside the scores of a scan, which are of the simulation: what a real session makes of the fully quantized model.

One file, one session and one pass over samples of the scores a scheme. Where the two errors differ, the worst
rows are built and measured alone too. A file that cannot be made or run is an answer: its reason is kept.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from google.protobuf.message import EncodeError

from quantsieve.errors import InputError, UnsupportedModel, UsageError
from quantsieve.evaluation import Failed
from quantsieve.plan import BIAS, Plan, full_plan
from quantsieve.reports._numbers import three
from quantsieve.run.line import Line
from quantsieve.run.progress import Step
from quantsieve.run.trials import Trials, same_samples
from quantsieve.sensitivity.drift import NEAR, Drift
from quantsieve.sensitivity.engine import float_outputs
from quantsieve.sensitivity.ranking import Score
from quantsieve.sensitivity.scan_document import ScanResult
from quantsieve.targets.base import TargetFailure

WORST = 10  # rows of a scheme that are measured alone where its drift is outside NEAR
TASK = "fidelity"  # takes any float outputs and no labels; of what it measures only the squared errors are used
COPIES = 8  # of the float outputs of all samples that comparing them holds at once
TOO_LARGE = "its weights are large beside the memory limit; a larger --memory-limit or --drift N runs it all the same"


def check_wanted(wanted: str | int, mode: str) -> None:
    """Raises UsageError for what is neither 'auto', 'off' nor a number of rows, and for rows of another mode."""
    is_number = isinstance(wanted, int) and not isinstance(wanted, bool)
    if not (wanted in ("auto", "off") if isinstance(wanted, str) else is_number and wanted >= 1):
        raise UsageError("a drift of auto, off or a number of rows of at least 1", repr(wanted), "Choose one of them.")
    if is_number and mode != "alone":
        raise UsageError(f"a drift of auto or off with the mode {mode}", str(wanted), "Leave one of them out.")


def with_drift(line: Line, scan: ScanResult, wanted: str | int) -> ScanResult:
    """The scan with the drift of each scheme, and of its worst rows where they were measured.

    wanted: 'auto' for the worst rows of schemes whose drift is outside NEAR, 'off' for no session at all, or how many
    of the worst rows of each scheme are measured in any case. Rows of another mode than 'alone' are not measured.
    """
    if wanted == "off" or not scan.layers:
        return scan
    known = len(line.notes)
    sessions = None if wanted == "auto" and line.executor.room.is_lean else _Sessions(line, scan.num_samples)
    reason = TOO_LARGE if sessions is None else sessions.refusal()
    if sessions is None or reason is not None:
        return replace(scan, drift=tuple(Drift(scheme, None, None, reason) for scheme in dict.fromkeys(scan.schemes)))
    notes, rows, found = [], {(score.layer, score.scheme): score for score in scan.layers}, []
    for scheme in dict.fromkeys(scan.schemes):
        line.progress(Step("drift", f"{scheme}: the quantized model in a real session"))
        made = sessions.run(full_plan(line.options, scheme), scheme)
        found.append(made)
        count = wanted if isinstance(wanted, int) else WORST if made.is_outside and scan.mode == "alone" else 0
        worst = [score for score in scan.layers if score.scheme == scheme][:count]
        for score, alone in _alone(line, sessions, worst):
            rows[score.layer, scheme] = replace(score, drift=alone.ratio)
            if alone.reason is not None:
                notes.append(f"{score.layer} alone under {scheme} could not be run: {alone.reason}")
        if made.is_outside and made.ratio is not None:
            notes.append(_note(made.ratio, scheme, sessions.trials.drift_reason(), len(worst)))
    more = dict.fromkeys([*scan.notes, *line.notes[known:], *notes])
    return replace(scan, drift=tuple(found), layers=tuple(rows.values()), notes=tuple(more))


class _Sessions:
    """Plans as files, simulated and run on the first `count` scan samples; on fewer where their outputs are large."""

    def __init__(self, line: Line, count: int):
        self.indices = _fitting(line, line.scan_indices[:count])
        self.trials = Trials(line, self.indices, TASK)
        self._repairs = (BIAS,) if line.settings.bias_correction else ()

    def refusal(self) -> str | None:
        """Why the float model, which all others are held against, cannot be run."""
        try:
            self.trials.reference("search")
        except (InputError, UnsupportedModel, TargetFailure) as failure:
            return _text(failure)
        return None

    def run(self, plan: Plan, scheme: str) -> Drift:
        """Of the plan, whose file is removed again."""
        try:
            built = self.trials.build(Plan(plan.schemes, self._repairs))
        except EncodeError:
            return Drift(scheme, None, None, "its file would be larger than the 2 GB that a message can have")
        except (InputError, UnsupportedModel, TargetFailure) as failure:
            return Drift(scheme, None, None, _text(failure))
        outcome = self.trials.measure(built, "search")
        (self.trials.store.root / built.path).unlink(missing_ok=True)
        if isinstance(outcome, Failed):
            return Drift(scheme, float(built.simulated.mean()), None, _text(outcome))
        return Drift(scheme, *same_samples(built, outcome), num_samples=len(self.indices))


def _fitting(line: Line, indices: np.ndarray) -> np.ndarray:
    """As many of the samples, at least one, as have float outputs that the memory limit leaves room for."""
    values = line.executor.forward(line.samples.feed(int(indices[0])), keep=lambda name: False)
    num_bytes = sum(array.nbytes for array in float_outputs(line.executor, values).values())
    return indices[: max(1, line.memory.limit // 2 // COPIES // max(1, num_bytes))]


def _alone(line: Line, sessions: _Sessions, worst: list[Score]) -> Iterator[tuple[Score, Drift]]:
    for number, score in enumerate(worst):
        line.progress(Step("drift", f"{score.scheme}: the worst rows alone in real sessions", number, len(worst)))
        yield score, sessions.run(Plan({score.layer: score.scheme}), score.scheme)


def _text(failure: Failed | Exception) -> str:
    if isinstance(failure, Failed | TargetFailure):
        return f"{failure.kind} at {failure.stage}: {failure.reason}"
    return str(failure)


def _note(ratio: float, scheme: str, reason: str, rows: int) -> str:
    told = f"; drift tells the same of the {rows} worst rows alone" if rows else ""
    return (
        f"under {scheme} the real session has {three(ratio)} times the simulated error, "
        f"outside {NEAR[0]} to {NEAR[1]}: {reason}. The scores are of the simulation{told}"
    )
