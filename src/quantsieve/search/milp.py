"""Plans for exact budgets, as an integer programme (HiGHS): fills the gaps between the hull's plans.

One binary per layer and scheme, one variable per tensor and format (it is integral by itself, since it is only pushed
up by binaries and costs noise): minimise noise, subject to budgets on bytes and, where asked, milliseconds. Where time
counts, one more variable per crossing, pushed up where its tensor is on and its layer is not in the tensor's format.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, vstack

from quantsieve.plan import Plan
from quantsieve.search.prices import Problem

TIGHT = 1e-4
EXACT = 1e-7
# At 500 layers, 1e-4 takes 2.4 times the processor time of 3e-3 for at most 0.24 % less noise (benchmarks/search);
# prices themselves are known to some 10 %.
WIDE = 3e-3
MANY_LAYERS = 120
NODES = 50_000


def cheapest_noise(
    problem: Problem,
    bytes_change: float,
    ms_change: float | None = None,
    gap: float | None = None,
) -> Plan | None:
    """The plan of least noise whose file changes by at most `bytes_change` (negative: saves), None where none can.

    gap: relative gap at which the solver may stop; None: TIGHT for few layers, WIDE for many. The only limit is one of
    nodes: a limit of time would make plans depend on how busy the machine is.
    """
    if gap is None:
        gap = TIGHT if len(problem.layers) <= MANY_LAYERS else WIDE
    noise, size, ms = _objectives(problem)
    if not len(problem.layers):
        return Plan({}) if bytes_change >= 0 and (ms_change is None or ms_change >= 0) else None
    scale = max(1.0, float(np.abs(size).max()))
    budgets = [(size / scale, bytes_change / scale)]
    if ms_change is not None:
        budgets.append((ms, ms_change))
    return _solve(problem, noise, budgets, gap)


def cheapest_mix(problem: Problem, rate: float) -> Plan:
    """The plan that minimises bytes + rate * noise; rate in bytes a unit of noise. Of files of one size the quieter."""
    noise, size, _ = _objectives(problem)
    if not len(problem.layers):
        return Plan({})
    least = 0.5 / (float(noise.sum()) or 1.0)  # all noise together weighs less than a byte
    found = _solve(problem, size + max(rate, least) * noise, [], EXACT)
    return Plan({}) if found is None else found


def fastest(problem: Problem) -> Plan:
    """The plan of the fewest milliseconds; of plans of one time the quieter."""
    noise, _, ms = _objectives(problem)
    if not len(problem.layers):
        return Plan({})
    least = 1e-3 * float(np.abs(ms).max(initial=0.0)) / (float(noise.sum()) or 1.0)
    found = _solve(problem, ms + least * noise, [], TIGHT)
    return Plan({}) if found is None else found


def _solve(
    problem: Problem, objective: np.ndarray, budgets: Sequence[tuple[np.ndarray, float]], gap: float
) -> Plan | None:
    """The plan of least `objective` within the budgets, (coefficients, most) each; float64 [columns, tensors,
    crossings], every array."""
    columns = _columns(problem)
    rows, uppers = _structure_rows(problem, columns)
    result = milp(
        objective / (float(np.abs(objective).max()) or 1.0),
        integrality=np.concatenate([np.ones(len(columns)), np.zeros(len(objective) - len(columns))]),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(
            vstack([rows, *(csr_array(row[None, :]) for row, _ in budgets)]),
            -np.inf,
            np.asarray([*uppers, *(most for _, most in budgets)]),
        ),
        options={"mip_rel_gap": gap, "node_limit": NODES},
    )
    if result.x is None:
        return None
    choices: list[int | None] = [None] * len(problem.layers)
    for (layer, option), value in zip(columns, result.x, strict=False):
        if value > 0.5:
            choices[layer] = option
    return problem.with_free_riders(problem.plan(choices))


def _columns(problem: Problem) -> list[tuple[int, int]]:
    return [(layer, option) for layer, options in enumerate(problem.options) for option in range(len(options))]


def _objectives(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Noise, bytes and milliseconds of every column, tensor and crossing, float64 each."""
    columns, none = _columns(problem), np.zeros(len(problem.crossings))
    noise, size, ms = (
        np.concatenate([_per_column(table, columns), row, crossings])
        for table, row, crossings in (
            (problem.layer_noise, problem.tensor_noise, none),
            (problem.layer_bytes, problem.tensor_bytes, none),
            (problem.layer_ms, problem.tensor_ms, np.asarray([c.ms for c in problem.crossings])),
        )
    )
    return noise, size, ms


def _per_column(table: Sequence[Sequence[float]], columns: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.asarray([table[layer][option] for layer, option in columns], np.float64)


def _structure_rows(problem: Problem, columns: Sequence[tuple[int, int]]) -> tuple[csr_array, list[float]]:
    """At most one scheme a layer; the tensors that a scheme forces are on when it is taken; a tensor that is on crosses
    at each of its layers that has no such scheme."""
    of_layer: dict[int, list[int]] = {}
    for column, (layer, _) in enumerate(columns):
        of_layer.setdefault(layer, []).append(column)
    entries: list[tuple[int, int, float]] = []
    uppers: list[float] = []
    for layer, own in of_layer.items():
        if len(own) > 1:
            entries += [(len(uppers), column, 1.0) for column in own]
            uppers.append(1.0)
        links = problem.links[layer]
        for tensor in dict.fromkeys(tensor for found in links for tensor in found):
            entries += [(len(uppers), column, 1.0) for column in own if tensor in links[columns[column][1]]]
            entries.append((len(uppers), len(columns) + tensor, -1.0))
            uppers.append(0.0)
    for number, crossing in enumerate(problem.crossings):
        own, links = of_layer.get(crossing.layer, []), problem.links[crossing.layer]
        entries.append((len(uppers), len(columns) + crossing.tensor, 1.0))
        entries += [(len(uppers), column, -1.0) for column in own if crossing.tensor in links[columns[column][1]]]
        entries.append((len(uppers), len(columns) + len(problem.tensors) + number, -1.0))
        uppers.append(0.0)
    shape = (len(uppers), len(columns) + len(problem.tensors) + len(problem.crossings))
    if not entries:
        return csr_array(shape), uppers
    rows, cols, values = (np.asarray(part) for part in zip(*entries, strict=True))
    return csr_array((values, (rows.astype(int), cols.astype(int))), shape=shape), uppers
