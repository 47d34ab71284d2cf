"""What a reader must know before believing a number: one sentence each, loud ones first.

Loud is what makes the numbers mean something else than they seem to, or the recommendation not what was asked
for.
"""

from dataclasses import dataclass

from quantsieve.front import Candidate, is_float
from quantsieve.reports import _numbers as numbers
from quantsieve.reports.summary import Summary, failures, loss_of, mse_ratio, precision

MSE_RATIO = 2.0  # measured over simulated squared error above which a file does not do what was simulated


@dataclass(frozen=True, slots=True)
class Caution:
    loud: bool
    text: str


def cautions(summary: Summary) -> tuple[Caution, ...]:
    """Loud ones first, each in the order of the run's stages."""
    found = [
        *_about_data(summary),
        *_about_budget(summary),
        *_about_stop(summary),
        *_about_files(summary),
        *_about_failures(summary),
        *(Caution(False, note) for note in summary.notes),
    ]
    return tuple(sorted(found, key=lambda caution: not caution.loud))


def _about_data(summary: Summary) -> list[Caution]:
    if not summary.synthetic:
        return []
    text = (
        "SYNTHETIC INPUTS: all scores come from random data and only point a direction. They say nothing "
        "about the quality on real inputs; measure with --data before you deploy a file."
    )
    return [Caution(True, text)]


def _about_budget(summary: Summary) -> list[Caution]:
    chosen = summary.recommended
    if chosen is None or is_float(chosen):
        by = "" if chosen is None else " BY A QUANTIZED MODEL"
        return [Caution(True, f"BUDGET NOT MET{by}: {summary.recommendation.reason}")]
    loss = loss_of(chosen)
    if loss is not None and loss.high > summary.max_drop:
        text = (
            f"The recommended model meets the budget by its point estimate; the interval reaches "
            f"{numbers.percent(loss.high)}. More samples narrow it; --confident asks for its high end."
        )
        return [Caution(False, text)]
    return []


def _about_stop(summary: Summary) -> list[Caution]:
    if summary.stopped == "done":
        return []
    how = {
        "timeout": "at its time limit",
        "max trials": "at its limit of trials",
        "interrupted": "when interrupted",
    }
    text = f"The run stopped {how[summary.stopped]}: this is the best so far. The same command goes on."
    return [Caution(summary.stopped == "interrupted", text)]


def _about_files(summary: Summary) -> list[Caution]:
    rows = [c for c in summary.shown() if not is_float(c)]
    found = []
    for candidate in rows:
        ratio = mse_ratio(candidate)
        if ratio is not None and ratio > MSE_RATIO:
            text = (
                f"{candidate.id} ({candidate.origin}): squared error measured "
                f"{numbers.three(ratio)} times what was simulated. {_reason(summary, candidate)}"
            )
            found.append(Caution(True, text))
        ran = precision(summary, candidate)
        if ran is not None and ran.differing:
            first = ", ".join(f"{layer} ran {what}" for layer, what in list(ran.differing.items())[:3])
            more = f" and {len(ran.differing) - 3} more" if len(ran.differing) > 3 else ""
            text = f"{candidate.id} ({candidate.origin}): {ran.text()}; otherwise than planned: {first}{more}."
            found.append(Caution(False, text))
    return found


def _reason(summary: Summary, candidate: Candidate) -> str:
    if candidate.notes:
        return f"Reason: {' '.join(candidate.notes)}"
    ran = precision(summary, candidate)
    if ran is not None and ran.differing:
        return f"Reason: {numbers.count(len(ran.differing), 'layer')} ran otherwise than planned."
    return f"No single reason was found. {summary.saturation}".rstrip()


def _about_failures(summary: Summary) -> list[Caution]:
    failed = [(candidate, found) for candidate in summary.candidates for found in failures(candidate)[:1]]
    if not failed:
        return []
    candidate, first = failed[0]
    number = numbers.count(len(failed), "candidate")
    text = f"{number} of {len(summary.candidates)} failed on the target and cannot be recommended; the first: "
    text += f"{candidate.id} ({candidate.origin}), {first.kind} at {first.stage}: {first.reason}"
    return [Caution(False, text)]
