"""Plans for exact budgets, as an integer programme (HiGHS): fills the gaps between the hull's plans.

One binary per layer and scheme, one variable per tensor (it is integral by itself, since it is only pushed up by
binaries and costs noise): minimise noise, subject to budgets on bytes and, where asked, milliseconds.
"""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, vstack

from quantsieve.plan import Plan
from quantsieve.search.prices import Problem

TIGHT = 1e-4
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
    columns = [(layer, option) for layer, options in enumerate(problem.options) for option in range(len(options))]
    if not columns:
        return Plan({}) if bytes_change >= 0 and (ms_change is None or ms_change >= 0) else None
    num_tensors = len(problem.tensors)
    pick = _per_column(problem.layer_bytes, columns)
    noise = np.concatenate([_per_column(problem.layer_noise, columns), problem.tensor_noise])
    size = np.concatenate([pick, problem.tensor_bytes])
    rows, uppers = _structure_rows(problem, columns)
    budgets = [csr_array(size[None, :] / max(1.0, float(np.abs(size).max())))]
    uppers.append(bytes_change / max(1.0, float(np.abs(size).max())))
    if ms_change is not None:
        budgets.append(csr_array(np.concatenate([_per_column(problem.layer_ms, columns), problem.tensor_ms])[None, :]))
        uppers.append(ms_change)
    scale = float(noise.max()) or 1.0
    result = milp(
        noise / scale,
        integrality=np.concatenate([np.ones(len(columns)), np.zeros(num_tensors)]),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(vstack([rows, *budgets]), -np.inf, np.asarray(uppers)),
        options={"mip_rel_gap": gap, "node_limit": NODES},
    )
    if result.x is None:
        return None
    choices: list[int | None] = [None] * len(problem.layers)
    for (layer, option), value in zip(columns, result.x, strict=False):
        if value > 0.5:
            choices[layer] = option
    return problem.with_free_riders(problem.plan(choices))


def _per_column(table: tuple[tuple[float, ...], ...], columns: list[tuple[int, int]]) -> np.ndarray:
    return np.asarray([table[layer][option] for layer, option in columns], np.float64)


def _structure_rows(problem: Problem, columns: list[tuple[int, int]]) -> tuple[csr_array, list[float]]:
    """At most one scheme a layer; a layer's tensors are on when it is quantized."""
    of_layer: dict[int, list[int]] = {}
    for column, (layer, _) in enumerate(columns):
        of_layer.setdefault(layer, []).append(column)
    entries: list[tuple[int, int, float]] = []
    uppers: list[float] = []
    for layer, own in of_layer.items():
        if len(own) > 1:
            entries += [(len(uppers), column, 1.0) for column in own]
            uppers.append(1.0)
        for tensor in problem.links[layer]:
            entries += [(len(uppers), column, 1.0) for column in own]
            entries.append((len(uppers), len(columns) + tensor, -1.0))
            uppers.append(0.0)
    rows, cols, values = (np.asarray(part) for part in zip(*entries, strict=True))
    shape = (len(uppers), len(columns) + len(problem.tensors))
    return csr_array((values, (rows.astype(int), cols.astype(int))), shape=shape), uppers
