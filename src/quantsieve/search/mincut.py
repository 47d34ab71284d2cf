"""The convex hull of the front, exactly: for each rate of noise against bytes a minimum cut.

For a rate r the best plan minimises bytes + r * noise. Taking a layer earns what it saves and forces its tensors on,
which cost: a project-selection problem, and so a minimum cut (source - layer: gain, layer - tensor: unbounded,
tensor - sink: cost). The best of a layer's schemes that force the same tensors on is known at a rate. Where a layer has
schemes that force none as well, the best of these is earned in any case, and the layer's gain is what the others earn
beyond it. Problems with schemes of several activation formats are no minimum cut: there each rate is an integer
programme.
All rates come from bisecting between known hull plans: the rate at which two are equal either gives a new hull plan
between them or proves that there is none.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from quantsieve.plan import Plan
from quantsieve.search.milp import cheapest_mix
from quantsieve.search.prices import Problem

# scipy's flow is int32. Gains are rounded one by one, so their sum in units may pass _GAINS: an edge that is never to
# be cut, and a cost above all gains, holds more than that.
_GAINS = 2**30
_UNBOUNDED = 2**31 - 1


def hull(problem: Problem, limit: int = 200) -> tuple[Plan, ...]:
    """Plans on the lower convex hull of (bytes, noise), smallest file first, at most `limit`; float is the last."""
    if not problem.layers:
        return (Plan({}),)
    smallest = best_at(problem, 0.0)
    found = {_point(problem, smallest): smallest, (0, 0.0): Plan({})}
    pairs = [(_point(problem, smallest), (0, 0.0))]
    while pairs and len(found) < limit:
        low, high = pairs.pop(0)
        if high[1] >= low[1] or high[0] <= low[0]:
            continue
        rate = (high[0] - low[0]) / (low[1] - high[1])
        plan = best_at(problem, rate)
        point = _point(problem, plan)
        chord = low[0] + rate * low[1]
        if point in found or point[0] + rate * point[1] >= chord - 1e-9 * max(1.0, abs(chord)):
            continue
        found[point] = plan
        pairs += [(low, point), (point, high)]
    plans: list[Plan] = []
    least = math.inf
    for point in sorted(found):  # the smallest file was first found at any noise
        if point[1] < least or not found[point].schemes:
            plans.append(found[point])
            least = point[1]
    return tuple(plans)


def best_at(problem: Problem, rate: float) -> Plan:
    """The plan that minimises bytes + rate * noise; rate in bytes a unit of noise, 0 asks for the smallest file."""
    forced = [sorted({found for found in links if found}) for links in problem.links]
    if any(len(found) > 1 for found in forced):
        return cheapest_mix(problem, rate)
    free: list[int | None] = []
    best: list[int | None] = []
    gains: list[float] = []
    for noises, sizes, links in zip(problem.layer_noise, problem.layer_bytes, problem.links, strict=True):
        # Of schemes of one value the quieter: at rate 0 the smallest file is not to be noisier than it need be.
        values = [(size + rate * noise, noise) for noise, size in zip(noises, sizes, strict=True)]
        unlinked = min(((*value, i) for i, value in enumerate(values) if not links[i]), default=None)
        linked = min(((*value, i) for i, value in enumerate(values) if links[i]), default=None)
        earned = max(0.0, -unlinked[0]) if unlinked is not None else 0.0
        free.append(unlinked[2] if unlinked is not None and earned > 0 else None)
        best.append(linked[2] if linked is not None else None)
        gains.append(-linked[0] - earned if linked is not None else 0.0)
    costs = [size + rate * noise for noise, size in zip(problem.tensor_noise, problem.tensor_bytes, strict=True)]
    taken = _select(gains, costs, [found[0] if found else () for found in forced])
    chosen = problem.plan([b if t else f for b, f, t in zip(best, free, taken, strict=True)])
    return problem.with_free_riders(chosen)


def _select(gains: Sequence[float], costs: Sequence[float], links: Sequence[tuple[int, ...]]) -> list[bool]:
    """Which projects to take: maximises the gains taken minus the costs that they force."""
    num_layers, num_tensors = len(gains), len(costs)
    total = sum(g for g in gains if g > 0)
    if total <= 0:
        return [False] * num_layers
    scale = _GAINS / total
    source, sink = num_layers + num_tensors, num_layers + num_tensors + 1
    edges = []
    for layer, gain in enumerate(gains):
        if gain > 0:
            edges.append((source, layer, max(1, round(gain * scale))))
            edges += [(layer, num_layers + tensor, _UNBOUNDED) for tensor in links[layer]]
    for tensor, cost in enumerate(costs):
        edges.append((num_layers + tensor, sink, min(_UNBOUNDED, max(0, round(cost * scale)))))
    rows, columns, capacity = (np.asarray(part) for part in zip(*edges, strict=True))
    shape = (num_layers + num_tensors + 2,) * 2
    network = csr_array((capacity.astype(np.int32), (rows, columns)), shape=shape)
    flow = maximum_flow(network, source, sink).flow
    residual = csr_array(network - flow)
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
    return [layer in reached and gains[layer] > 0 for layer in range(num_layers)]


def _point(problem: Problem, plan: Plan) -> tuple[int, float]:
    predicted = problem.predict(plan)
    return predicted.bytes_change, predicted.noise
