"""Holds the optimized graph against the model once, before anything is priced with it.

In one run of the model, optimizations off, every root is multiplied by a number of its own behind its producer and
every weight and bias by others; the regions run with the same changes. Each root must agree before its own change: so
no reader passes a changed value by, every weight lies where it is thought to, and the layouts are understood. A wrong
assumption about onnxruntime shows as a gap near the size of the changes, some hundred times what rounding leaves.
"""

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime

from quantsieve.model.execute import piece_options
from quantsieve.model.graph import Graph
from quantsieve.model.units import Layer, Structure
from quantsieve.sensitivity.optimized import Refused, Saved, unblocked
from quantsieve.sensitivity.suffixes import Suffixes

_ROOT = (np.float32(1.06), np.float32(0.95))  # by turns, so that values neither grow nor vanish along a deep model
_WEIGHT, _BIAS = np.float32(1.03), np.float32(0.95)
_TOLERANCE = 1e-3  # of the largest value; a float32 pass through 100 layers differs by 1e-5, a missed change by 5e-2
_SMALLEST = 3e-7  # what onnxruntime's Sigmoid and Tanh are off by, however small their value
_MOVED, _FACTOR = "/moved", "/moved/factor"


def check(
    suffixes: Suffixes, saved: Saved, graph: Graph, structure: Structure, feeds: Mapping[str, np.ndarray]
) -> None:
    """Raises Refused when a root differs between the model and the regions, both with the changes."""
    wanted = _changed_model(saved, graph, structure, feeds)
    got = _changed_regions(suffixes, graph, structure, feeds)
    for name, array in wanted.items():
        if name in got and not any(_is_near(found, array) for found in unblocked(got[name], array.shape)):
            raise Refused(f"{name} is another in onnxruntime's optimized graph")


def _factors(structure: Structure) -> dict[str, np.float32]:
    return {tensor.root: _ROOT[index % 2] for index, tensor in enumerate(structure.tensors)}


def _is_near(found: np.ndarray, wanted: np.ndarray) -> bool:
    peak = np.abs(wanted).max(initial=0.0)
    if not np.isfinite(peak):
        finite = np.isfinite(wanted)
        if not np.array_equal(finite, np.isfinite(found)):
            return False
        found, wanted = found[finite], wanted[finite]
        peak = np.abs(wanted).max(initial=0.0)
    return bool(np.abs(found - wanted).max(initial=0.0) <= _TOLERANCE * peak + _SMALLEST)


def _changed_regions(
    suffixes: Suffixes, graph: Graph, structure: Structure, feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Roots as their regions make them, before their own change, and the other outputs."""
    optimized = suffixes.optimized
    layers = {suffixes.region_of(layer): layer for layer in structure.quantizable if layer.weight}
    factors = {optimized.places[root]: factor for root, factor in _factors(structure).items()}
    raw: dict[str, np.ndarray] = {}
    values = {
        name: array * factors[name] if name in factors else array for name, array in suffixes.start(feeds).items()
    }
    for index in range(len(optimized.regions)):
        swap = _changed_weights(suffixes, graph, layers[index]) if index in layers else None
        for name, array in suffixes.region(index, values, swap).items():
            raw[name] = array
            values[name] = array * factors[name] if name in factors else array
    roots = {
        root: raw[place] for root, place in optimized.places.items() if place in raw and root not in optimized.turned
    }
    return {name: raw[name] for name in optimized.outputs if name in raw} | roots


def _changed_weights(suffixes: Suffixes, graph: Graph, layer: Layer) -> dict[str, np.ndarray] | None:
    weight, bias = graph.constant(layer.weight or ""), graph.constant(layer.bias) if layer.bias else None
    assert weight is not None
    found = suffixes.swapped(layer, weight * _WEIGHT, None if bias is None else bias * _BIAS)
    return None if found is None else found[1]


def _changed_model(
    saved: Saved, graph: Graph, structure: Structure, feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Roots that nodes make and outputs of floats, by name, of the model with all changes."""
    model = saved.proto()
    made = _factors(structure)
    factors = {layer.weight: _WEIGHT for layer in structure.quantizable if layer.weight}
    factors |= {layer.bias: _BIAS for layer in structure.quantizable if layer.weight and layer.bias}
    factors |= made
    _rename_reads(model.graph, {name: name + _MOVED for name in factors})
    nodes = [_move(name) for name in factors if name not in graph.producers]
    for node in model.graph.node:
        nodes += [node, *(_move(name) for name in node.output if name in made)]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(factor), name + _FACTOR) for name, factor in factors.items()
    )
    have = {output.name for output in model.graph.output}
    wanted = [root for root in made if root in graph.producers]
    model.graph.output.extend(onnx.ValueInfoProto(name=root) for root in wanted if root not in have)
    options = piece_options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = saved.session(model, options)
    names = [value.name for value in session.get_outputs()]
    arrays = dict(zip(names, session.run(names, dict(feeds)), strict=True))
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray) and array.dtype.kind == "f"}


def _move(root: str) -> onnx.NodeProto:
    return onnx.helper.make_node("Mul", [root, root + _FACTOR], [root + _MOVED], name=root + _MOVED)


def _rename_reads(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """What nodes read, in subgraphs too; a subgraph may also give a value from outside as its own output."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rename_reads(inner, names)
                for output in inner.output:
                    output.name = names.get(output.name, output.name)
