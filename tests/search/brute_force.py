"""Random search problems, and all plans of a small one counted out."""

from itertools import product

import numpy as np
from hypothesis import strategies as st

from quantsieve.plan import Rounded
from quantsieve.search.prices import Crossing, Problem

SCHEMES = ("int8", "int8-channel", "w8", "a16w8")
NOISE = st.just(0.0) | st.floats(1e-6, 1.0)
SAVED = st.integers(-5000, 40)  # bytes of a layer: most save, a small one may cost more than it saves
CONVERSION = st.just(0.0) | st.floats(0, 0.3).map(lambda ms: round(ms, 3))
MS = st.floats(-1.0, 0.25).map(lambda ms: round(ms, 3))


@st.composite
def problems(draw, max_layers=8, has_formats=False, has_crossings=False):
    """Up to `max_layers` layers with one or two schemes that force on one to three tensors, shared with others; beside
    them perhaps one that forces on none, and, if `has_formats`, one that forces on others."""
    num_layers = draw(st.integers(1, max_layers))
    num_tensors = draw(st.integers(1, num_layers + 1))
    kinds = [("int8",), SCHEMES[:2], ("w8",), SCHEMES[:3], *([SCHEMES, SCHEMES[2:]] if has_formats else [])]
    options = [draw(st.sampled_from(kinds)) for _ in range(num_layers)]
    some_tensors = st.lists(st.integers(0, num_tensors - 1), min_size=1, max_size=3, unique=True)

    def table(elements):
        return tuple(tuple(draw(elements) for _ in found) for found in options)

    def links(found):
        own = {"w8": (), "a16w8": tuple(draw(some_tensors))}
        shared = tuple(draw(some_tensors))
        return tuple(own.get(scheme, shared) for scheme in found)

    def row(elements):
        return tuple(draw(elements) for _ in range(num_tensors))

    linked = tuple(links(found) for found in options)
    pairs = sorted({(t, i) for i, found in enumerate(linked) for one in found for t in one}) if has_crossings else []
    return Problem(
        layers=tuple(f"layer{i}" for i in range(num_layers)),
        options=tuple(options),
        layer_noise=table(NOISE),
        layer_bytes=table(SAVED),
        layer_ms=table(MS),
        tensors=tuple(Rounded(f"tensor{i}", "uint8") for i in range(num_tensors)),
        tensor_noise=row(NOISE),
        tensor_bytes=row(st.integers(0, 10)),
        tensor_ms=row(st.floats(0, 0.1).map(lambda ms: round(ms, 3))),
        links=linked,
        crossings=tuple(Crossing(t, i, ms) for t, i in pairs if (ms := draw(CONVERSION))),
    )


def every_plan(problem):
    """(noise, bytes, milliseconds) of all plans, float64 [plans] each, straight from the definition."""
    choices = np.asarray(list(product(*(range(-1, len(found)) for found in problem.options))))
    totals = []
    for layer_table, tensor_row in (
        (problem.layer_noise, problem.tensor_noise),
        (problem.layer_bytes, problem.tensor_bytes),
        (problem.layer_ms, problem.tensor_ms),
    ):
        total = np.zeros(len(choices))
        on = np.zeros((len(choices), len(problem.tensors)), bool)
        for layer, values in enumerate(layer_table):
            total += np.asarray([*values, 0.0])[choices[:, layer]]  # -1, float, takes the last
            for option, links in enumerate(problem.links[layer]):
                on[np.ix_(choices[:, layer] == option, list(links))] = True
        totals.append(total + on @ np.asarray(tensor_row, np.float64))
    for tensor, layer, ms in problem.crossings:
        of = problem.links[layer]
        has = np.asarray([*(tensor in found for found in of), False])[choices[:, layer]]
        totals[2] = totals[2] + ms * (on[:, tensor] & ~has)
    return tuple(totals)


def small(links=(((0,),), ((0,),)), **changes):
    """Two layers with one scheme on one tensor, each saving 100 bytes, or as `changes` say."""
    num_tensors = 1 + max(t for of_layer in links for found in of_layer for t in found)
    facts = {
        "layers": tuple(f"layer{i}" for i in range(len(links))),
        "options": (("int8",),) * len(links),
        "layer_noise": ((0.1,),) * len(links),
        "layer_bytes": ((-100,),) * len(links),
        "layer_ms": ((0.0,),) * len(links),
        "tensors": tuple(Rounded(f"tensor{i}", "uint8") for i in range(num_tensors)),
        "tensor_noise": (0.5,) * num_tensors,
        "tensor_bytes": (5,) * num_tensors,
        "tensor_ms": (0.0,) * num_tensors,
        "links": links,
    }
    return Problem(**{**facts, **changes})
