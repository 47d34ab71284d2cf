"""What plans take on the target: milliseconds by layer and scheme, and of conversions, from profiles of a few files.

Each layer's kernel is seen in float and in every full plan; what converts a tensor is seen in plans that quantize every
other layer, so that nearly every tensor is converted to integers in one and back in the other. Conversions that no
profile shows are taken to cost what the middle one does. (A layer's kernel is taken to be as fast whatever is around.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import onnx

from quantsieve.model.execute import DYNAMIC, OWN_RANGE
from quantsieve.model.graph import Graph
from quantsieve.model.units import Structure, Tensor, layout_root
from quantsieve.plan import Options, Plan, Rounded
from quantsieve.search.prices import Costs
from quantsieve.targets.base import Profile

RUNS = 20  # of each profile


class Seen(NamedTuple):
    """A plan, its file, and where its time goes."""

    plan: Plan
    path: Path
    profile: Profile


def alternating(options: Options, full: Plan, scheme: str) -> tuple[Plan, Plan]:
    """Two plans that share the layers that `full` has in the format of the scheme, by turns."""
    form = options.forms[scheme]
    names = [name for name in options.schemes if options.forms.get(full.scheme(name)) == form]
    halves = (names[start::2] for start in (0, 1))
    first, second = (replace(full, schemes={name: full.scheme(name) for name in half}) for half in halves)
    return first, second


def timed_costs(costs: Costs, graph: Graph, structure: Structure, options: Options, seen: Sequence[Seen]) -> Costs:
    """The costs with times. seen: the float plan first."""
    kernels = [_kernels(one, structure) for one in seen]
    converted = [_conversions(one, graph) for one in seen]
    layers = {
        layer.name: _changes(layer.name, options, seen, kernels)
        for layer in structure.quantizable
        if layer.name in options.schemes
    }
    quantize = _middle([found for found, _ in converted])
    dequantize = _middle([found for _, found in converted])
    tensor_ms: dict[Rounded, float] = {}
    crossing_ms: dict[tuple[Rounded, str], float] = {}
    for tensor in structure.tensors:
        for form in dict.fromkeys(form for form in options.forms.values() if form is not None):
            rounded = Rounded(tensor.root, form)
            if form in OWN_RANGE:
                tensor_ms[rounded] = _dynamic(tensor.root, seen, options, graph) if form == DYNAMIC else 0.0
                continue
            always, crossings = _crossings(tensor, graph, options, quantize, dequantize)
            tensor_ms[rounded] = always
            crossing_ms.update({(rounded, layer): ms for layer, ms in crossings.items()})
    return replace(costs, layer_ms=layers, tensor_ms=tensor_ms, crossing_ms=crossing_ms)


def _kernels(one: Seen, structure: Structure) -> dict[str, float]:
    """Milliseconds by layer: its own nodes', and those of the new nodes behind or before them."""
    owner = {node: layer.name for layer in structure.layers for node in layer.nodes}
    file = onnx.load(one.path, load_external_data=False).graph
    label = {node.name or next(filter(None, node.output), ""): node for node in file.node}
    producer = {name: node for node in file.node for name in node.output}
    found: dict[str, float] = {}
    for name, ms in one.profile.nodes.items():
        node: onnx.NodeProto | None = label.get(name)
        while node is not None and node.name not in owner and not _is_guard(node):
            node = next((producer[x] for x in node.input if x in producer), None)
        if node is not None and node.name in owner:
            found[owner[node.name]] = found.get(owner[node.name], 0.0) + ms
    return found


def _changes(
    layer: str, options: Options, seen: Sequence[Seen], kernels: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Milliseconds against float by scheme; of the first plan that has the scheme there."""
    changes: dict[str, float] = {}
    for scheme in options.schemes[layer]:
        have = (times for one, times in zip(seen, kernels, strict=True) if one.plan.scheme(layer) == scheme)
        times = next(have, None)
        changes[scheme] = 0.0 if times is None else times.get(layer, 0.0) - kernels[0].get(layer, 0.0)
    return changes


def _is_guard(node: onnx.NodeProto) -> bool:
    return node.op_type == "Sum" and len(node.input) == 1


def _conversions(one: Seen, graph: Graph) -> tuple[dict[str, float], dict[str, float]]:
    """(milliseconds to integers, a guard before them included; of one way back) by root, 8-bit formats of a range."""
    file = onnx.load(one.path, load_external_data=False).graph
    producer = {name: node for node in file.node for name in node.output}
    dynamic = {node.input[0] for node in file.node if node.op_type == "DynamicQuantizeLinear"}

    def root(name: str) -> tuple[str, float]:
        node, guards = producer.get(name), 0.0
        while node is not None and _is_guard(node) and node.name not in graph.by_name:
            guards += one.profile.nodes.get(node.name, 0.0)
            name = node.input[0]
            node = producer.get(name)
        if node is not None and node.name in graph.by_name:  # an output's own name went to what is rounded
            name = graph.by_name[node.name].outputs[list(node.output).index(name)].name or name
        return layout_root(graph, name), guards

    quantize: dict[str, float] = {}
    for name, ms in one.profile.quantize.items():
        if name not in dynamic:
            found, guards = root(name)
            quantize[found] = max(quantize.get(found, 0.0), ms + guards)
    dequantize: dict[str, float] = {}
    for name, ms in one.profile.dequantize.items():
        found, _ = root(name)
        dequantize[found] = max(dequantize.get(found, 0.0), ms)
    return quantize, dequantize


def _dynamic(tensor: str, seen: Iterable[Seen], options: Options, graph: Graph) -> float:
    """Milliseconds of rounding it in its own range once for several layers; 0 where that is part of the kernel."""
    for one in seen:
        if any(options.forms.get(scheme) == DYNAMIC for scheme in one.plan.schemes.values()):
            spent = (ms for name, ms in one.profile.quantize.items() if layout_root(graph, name) == tensor)
            return sum(spent)
    return 0.0


def _middle(found: Sequence[Mapping[str, float]]) -> Callable[[str], float]:
    """By root the median of what plans show of it; of those that none shows the median of all."""
    values: dict[str, list[float]] = {}
    for one in found:
        for root, ms in one.items():
            values.setdefault(root, []).append(ms)
    known = {root: median(times) for root, times in values.items()}
    usual = median(known.values()) if known else 0.0
    return lambda root: known.get(root, usual)


def _crossings(
    tensor: Tensor, graph: Graph, options: Options, quantize: Callable[[str], float], dequantize: Callable[[str], float]
) -> tuple[float, dict[str, float]]:
    """(milliseconds whenever the tensor is rounded; by layer with a choice, those while it is in another format)."""
    always = 0.0
    crossings: dict[str, float] = {}
    if tensor.producer is not None and tensor.producer in options.schemes:
        crossings[tensor.producer] = quantize(tensor.root)
    else:
        always += quantize(tensor.root)
    for reader in tensor.readers:
        if reader in options.schemes:
            crossings[reader] = crossings.get(reader, 0.0) + dequantize(tensor.root)
    readers = {node.name for name in tensor.members for node in graph.readers.get(name, ())}
    others = sum(name in graph.output_names for name in tensor.members)
    others += max(0, len(readers) - len(tensor.members) + 1 - len(tensor.readers))  # layout ops pass it on
    return always + others * dequantize(tensor.root), crossings
