"""The tables of all models as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]

_HEADER = (
    "| file | made by | size kept | score | loss, points | disagrees | time, of float's |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


def markdown(models: Sequence[Json]) -> str:
    """One table a model, and one of the goals."""
    parts = [_goals(models), *map(_table, models)]
    return "\n\n".join(parts) + "\n"


def _goals(models: Sequence[Json]) -> str:
    lines = [
        "### Goals, on final samples, by real files with default session options",
        "",
        "| model | asked | reached | by | time, of full int8's | verdict |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model in models:
        goal = model["goal"]
        row = next((row for row in model["rows"] if row["name"] == "for the goal"), None)
        full = next((row for row in model["rows"] if row["name"] == "full int8"), None)
        wanted = f"{goal['measure']} at most {_percent(goal['most'])}" if goal["most"] is not None else "loss in noise"
        asked = f"{wanted} at {100 * goal['share']:.4g} % of full int8's size reduction"
        asked += f", no slower than {goal['no_slower']}" if goal["no_slower"] else ""
        if row is None or "failed" in row:
            lines.append(f"| {model['model']} | {asked} | no such file | - | - | NOT MET |")
            continue
        value, low, high = row[goal["measure"]]
        reached = f"{_percent(value)} [{_percent(low)}, {_percent(high)}], {100 * row['kept']:.1f} % kept"
        time = f"{row['ms'] / full['ms']:.2f}" if full and "ms" in full and "ms" in row else "-"
        verdict = "met" if met(model) else "NOT MET"
        lines.append(f"| {model['model']} | {asked} | {reached} | {row['origin']} | {time} | {verdict} |")
    return "\n".join(lines)


def met(model: Json) -> bool:
    """Whether the row that was chosen for the goal reaches it: its point does, or, where noise is asked, its interval
    holds 0; and where speed is asked its time ties with the rival's or is less."""
    goal = model["goal"]
    row = next((row for row in model["rows"] if row["name"] == "for the goal"), None)
    if row is None or "failed" in row:
        return False
    value, low, _ = row[goal["measure"]]
    is_good = value <= goal["most"] if goal["most"] is not None else low <= 0
    rival = next((row for row in model["rows"] if row["name"] == goal["no_slower"]), None)
    is_fast = goal["no_slower"] is None or (rival is not None and row["ratio"][1] <= rival["ratio"][2])
    return is_good and is_fast


def _table(model: Json) -> str:
    float_score = model["rows"][0]["score"]
    lines = [
        f"### {model['model']}",
        "",
        f"Score: {model['metric']}; float {100 * float_score:.1f} %. {model['samples']['final']} final samples, "
        f"schemes {', '.join(model['schemes'])}, {model['candidates']} candidates in {model['seconds']['wall']:.0f} s.",
        "",
        *_HEADER,
    ]
    for row in model["rows"]:
        kept = "-" if row["kept"] is None else f"{100 * row['kept']:.1f} %"
        if "failed" in row:
            lines.append(f"| {row['name']} | {row['origin']} | {kept} | failed: {row['failed'][:60]} | - | - | - |")
            continue
        loss = " ".join(f"{100 * value:.1f}" for value in row["loss"][:1])
        loss += f" [{100 * row['loss'][1]:.1f}, {100 * row['loss'][2]:.1f}]"
        time = "{:.2f} [{:.2f}, {:.2f}]".format(*row["ratio"]) if "ratio" in row else "-"
        lines.append(
            f"| {row['name']} | {row['origin']} | {kept} | {100 * row['score']:.1f} % | {loss} "
            f"| {_percent(row['disagreement'][0])} | {time} |"
        )
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
