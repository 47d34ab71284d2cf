"""Time of a whole front by the number of layers: the hull, and 16 budgets by integer programme.

`python -m benchmarks.search.run` from the repository's root measures, prints the table and keeps the numbers in
results/front.json beside this file. A problem is a random network: each layer reads the tensor of an earlier layer and
rounds its own, one in five joins a second one (a residual Add), every layer has two schemes. Weight bytes and prices
are log-normal with the spread that trained CNNs show (prices over five orders of magnitude).
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import scipy

from quantsieve.plan import Rounded
from quantsieve.search.milp import cheapest_noise
from quantsieve.search.mincut import hull
from quantsieve.search.prices import Problem

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = (20, 100, 500, 1000)
NUM_BUDGETS = 16
SMALLEST_SHARE = 0.3  # of the largest saving, asked for by the first budget; the last asks for 0.995
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of wall clock and of processor time (all threads) for one random problem."""

    layers: int
    hull_plans: int
    hull_s: float
    hull_cpu_s: float
    budgets_solved: int
    budgets_s: float
    budgets_cpu_s: float
    slowest_budget_s: float

    @property
    def whole_s(self) -> float:
        return self.hull_s + self.budgets_s


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.run", description=__doc__)
    parser.add_argument("--layers", nargs="+", type=int, default=SIZES, help="sizes of the random problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    rows = [measure(random_problem(size, options.seed)) for size in options.layers]
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document(rows, options.seed), indent=2) + "\n"
    (options.out / "front.json").write_text(text, encoding="utf-8")
    print(table(rows))


def random_problem(num_layers: int, seed: int) -> Problem:
    """A problem of `num_layers` layers with two schemes each and one tensor a layer, and the graph's input."""
    draw = np.random.default_rng((seed, num_layers))
    params = np.exp(draw.normal(9, 1.5, num_layers)).astype(int) + 16
    channels = draw.integers(8, 512, num_layers)
    noise = np.exp(draw.normal(-8, 2, num_layers))
    links = []
    for layer in range(num_layers):
        reads = [max(0, layer - int(draw.integers(0, 3)))]
        if draw.random() < 0.2:
            reads.append(int(draw.integers(0, layer + 1)))
        links.append(tuple(dict.fromkeys([*reads, layer + 1])))
    return Problem(
        layers=tuple(f"layer{i}" for i in range(num_layers)),
        options=(("int8", "int8-channel"),) * num_layers,
        layer_noise=tuple((float(n), float(n * draw.uniform(0.05, 1))) for n in noise),
        layer_bytes=tuple((-3 * int(p), -3 * int(p) + 5 * int(c)) for p, c in zip(params, channels, strict=True)),
        layer_ms=((0.0, 0.0),) * num_layers,
        tensors=tuple(Rounded(f"tensor{i}", "uint8") for i in range(num_layers + 1)),
        tensor_noise=tuple(float(n) for n in np.exp(draw.normal(-9, 2, num_layers + 1))),
        tensor_bytes=(5,) * (num_layers + 1),
        tensor_ms=(0.0,) * (num_layers + 1),
        links=tuple((found, found) for found in links),
    )


def measure(problem: Problem) -> Row:
    """The whole front of one problem, timed in two parts."""
    plans, hull_s, hull_cpu_s = _timed(lambda: hull(problem))
    smallest = min(problem.predict(plan).bytes_change for plan in plans)
    shares = np.linspace(SMALLEST_SHARE, 0.995, NUM_BUDGETS)
    solved = [_timed(partial(cheapest_noise, problem, smallest * share)) for share in shares]
    return Row(
        layers=len(problem.layers),
        hull_plans=len(plans),
        hull_s=hull_s,
        hull_cpu_s=hull_cpu_s,
        budgets_solved=sum(plan is not None for plan, _, _ in solved),
        budgets_s=sum(wall for _, wall, _ in solved),
        budgets_cpu_s=sum(cpu for _, _, cpu in solved),
        slowest_budget_s=max(wall for _, wall, _ in solved),
    )


def _timed(work: Callable[[], Found]) -> tuple[Found, float, float]:
    """(result, seconds of wall clock, seconds of processor time)."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, time.perf_counter() - wall, time.process_time() - cpu


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line a problem."""
    lines = [
        "| layers | hull plans | hull | budgets solved | budgets | slowest budget | whole front |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.layers} | {row.hull_plans} | {row.hull_s:.2f} s | {row.budgets_solved} of {NUM_BUDGETS}"
        f" | {row.budgets_s:.2f} s | {row.slowest_budget_s:.2f} s | {row.whole_s:.2f} s |"
        for row in rows
    ]
    return "\n".join(lines)


def document(rows: Sequence[Row], seed: int) -> dict[str, object]:
    """What front.json holds: the numbers, and on what they were measured."""
    return {
        "seed": seed,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "scipy": scipy.__version__,
        "numpy": np.__version__,
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    main()
