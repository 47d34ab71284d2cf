"""Where channels can be scaled: between a layer that makes them and all layers that read them.

What a layer makes in channel c may be multiplied by any s > 0 if all who read it divide their weights for c by s, as
long as what lies between is positively homogeneous, f(s x) = s f(x), and keeps channels apart: Relu, LeakyRelu, PRelu,
pools, and Clip(0, c) as far as no value comes near c. An Add, a Concat, an output of the graph, or weights that are
used twice end a joint. Nothing is decided here.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quantsieve.model.graph import Graph
from quantsieve.model.units import Layer, Structure

_ELEMENTWISE = ("Relu", "LeakyRelu", "Identity")
_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
_FLATTENING = ("Flatten", "Reshape", "Squeeze")


@dataclass(frozen=True, slots=True)
class Form:
    """How a weight array becomes [groups, outputs, inputs, taps], outputs and inputs counted in one group."""

    groups: int
    inputs: int
    is_swapped: bool  # the array has its inputs first

    def wide(self, array: np.ndarray) -> np.ndarray:
        """The weight, any shape of its operator, as [groups, outputs, inputs, taps]."""
        ordered = np.swapaxes(array, 0, 1) if self.is_swapped else array
        outputs = ordered.shape[0] // self.groups
        return np.ascontiguousarray(ordered).reshape(self.groups, outputs, self.inputs, -1)

    def scaled(self, array: np.ndarray, made: np.ndarray | None, read: np.ndarray | None) -> np.ndarray:
        """The weight with what it makes in channel o times made[o], and what it reads from channel i times read[i];
        None leaves them. Shape and type of `array`."""
        wide = self.wide(array)
        if made is not None:
            wide = wide * made.astype(array.dtype).reshape(self.groups, -1, 1, 1)
        if read is not None:
            wide = wide * read.astype(array.dtype).reshape(self.groups, 1, -1, 1)
        shape = (array.shape[1], array.shape[0], *array.shape[2:]) if self.is_swapped else array.shape
        narrow = wide.reshape(shape)
        return np.ascontiguousarray(np.swapaxes(narrow, 0, 1) if self.is_swapped else narrow)


@dataclass(frozen=True, slots=True)
class Side:
    """A layer on one side of a joint. biases: initializers that are added to what it makes, (channels,) each."""

    layer: str
    weight: str
    form: Form
    biases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Joint:
    """Channels that can be scaled. value: what the maker's layer gives, its channels along `axis`. bound: the least c
    of a Clip(0, c) between."""

    value: str
    axis: int
    num_channels: int
    maker: Side
    readers: tuple[Side, ...]
    bound: float


def find_joints(graph: Graph, structure: Structure) -> tuple[Joint, ...]:
    """All joints of a prepared model, in graph order."""
    by_node = {layer.nodes[0]: layer for layer in structure.quantizable if layer.is_product}
    found = (_joint(graph, layer, by_node) for layer in by_node.values())
    return tuple(joint for joint in found if joint is not None)


@dataclass(frozen=True, slots=True)
class _Place:
    """A value with the channels along `axis`, each `repeat` times in a row."""

    value: str
    axis: int
    repeat: int


class _Ends(Exception):
    """The channels are read by something that does not divide them."""


def _joint(graph: Graph, layer: Layer, by_node: dict[str, Layer]) -> Joint | None:
    core = _core_output(graph, layer)
    shape = graph.shape(core)
    maker = _maker(graph, layer)
    if maker is None or shape is None or layer.channel_axis is None:
        return None
    axis = 1 if layer.op_type in ("Conv", "ConvTranspose") else len(shape) - 1
    channels = layer.weight_shape[layer.channel_axis]
    bounds: list[float] = [math.inf]
    try:
        readers = tuple(_readers(graph, _Place(core, axis, 1), channels, by_node, bounds))
    except _Ends:
        return None
    names = [maker.weight, *maker.biases, *(reader.weight for reader in readers)]
    if not readers or not all(_is_read_once(graph, name) for name in names):
        return None
    return Joint(layer.output, axis, channels, maker, readers, min(bounds))


def _is_read_once(graph: Graph, name: str) -> bool:
    readers = graph.readers.get(name, ())
    uses = [value for node in readers for value in node.inputs if value is not None and value.name == name]
    return len(readers) == 1 and len(uses) == 1 and name not in graph.output_names


def _core_output(graph: Graph, layer: Layer) -> str:
    """What the layer makes before its activation."""
    last = graph.by_name[layer.nodes[0]]
    for name in layer.nodes[1:]:
        if graph.by_name[name].op_type == "Add":
            last = graph.by_name[name]
    return last.outputs[0].name or ""


def _maker(graph: Graph, layer: Layer) -> Side | None:
    """The layer as a maker; None where what it makes cannot be scaled by channel."""
    form = _form(graph, layer, 1)
    if form is None or layer.weight is None or layer.channel_axis is None:
        return None
    biases = [layer.bias] if layer.bias else []
    for name in layer.nodes[1:]:
        node = graph.by_name[name]
        if node.op_type == "Add":
            biases += [v.name or "" for v in node.inputs if v is not None and graph.is_constant(v.name or "")]
    if any(graph.shape(bias) != (layer.weight_shape[layer.channel_axis],) for bias in biases):
        return None
    return Side(layer.name, layer.weight, form, tuple(biases))


def _form(graph: Graph, layer: Layer, repeat: int) -> Form | None:
    """How the layer's weight is laid out; None where it cannot be said. repeat: places of one channel that it reads."""
    node, shape = graph.by_name[layer.nodes[0]], layer.weight_shape
    if layer.channel_axis is None or (layer.op_type == "ConvTranspose" and _group(node) != 1):
        return None
    if layer.op_type == "Conv":
        return Form(_group(node), shape[1], False)
    return Form(1, shape[1 - layer.channel_axis] // repeat, layer.channel_axis == 1)


def _readers(
    graph: Graph, place: _Place, channels: int, by_node: dict[str, Layer], bounds: list[float]
) -> Iterator[Side]:
    """All that read the value; bounds of Clips on the way are added. Raises _Ends."""
    if place.value in graph.output_names:
        raise _Ends
    for node in graph.readers.get(place.value, ()):
        if not _is_first_input_alone(node, place.value) or node.domain != "":
            raise _Ends
        layer = by_node.get(node.name or "")
        if layer is not None:
            yield _reader(graph, layer, place)
            continue
        bounds.append(_bound(graph, node))
        yield from _readers(graph, _behind(graph, node, place, channels), channels, by_node, bounds)


def _reader(graph: Graph, layer: Layer, place: _Place) -> Side:
    is_map = layer.op_type in ("Conv", "ConvTranspose")
    axis = 1 if is_map else len(graph.shape(place.value) or ()) - 1
    form = _form(graph, layer, place.repeat)
    if form is None or layer.weight is None or place.axis != axis or (is_map and place.repeat != 1):
        raise _Ends
    return Side(layer.name, layer.weight, form)


def _behind(graph: Graph, node: ir.Node, place: _Place, channels: int) -> _Place:
    """Where the channels are behind a node that lies between. Raises _Ends where it mixes them or is none."""
    made = node.outputs[0].name or ""
    if any(output.name and output.uses() for output in node.outputs[1:]):
        raise _Ends
    if node.op_type in (*_ELEMENTWISE, "Clip", "Dropout", "PRelu"):
        return _Place(made, place.axis, place.repeat)
    if node.op_type in _POOLS and place.axis == 1 and place.repeat == 1:
        return _Place(made, 1, 1)
    before, after = graph.shape(place.value), graph.shape(made)
    if node.op_type in _FLATTENING and before is not None and after is not None and place.axis == 1:
        rest = before[1:]
        if len(after) == 2 and all(dim is not None for dim in rest) and after[1] == math.prod(d or 0 for d in rest):
            return _Place(made, 1, after[1] // channels)
    raise _Ends


def _bound(graph: Graph, node: ir.Node) -> float:
    """The upper bound of a Clip from 0, infinite for other nodes. Raises _Ends for a Clip from elsewhere."""
    if node.op_type != "Clip":
        return math.inf
    limits = [None if value is None else graph.constant(value.name or "") for value in node.inputs[1:]]
    given = [value is not None for value in node.inputs[1:]]
    if any(has and (limit is None or limit.size != 1) for has, limit in zip(given, limits, strict=True)):
        raise _Ends  # computed
    low, high = (*limits, None, None)[:2]
    if low is None or float(low.reshape(())) != 0:
        raise _Ends
    return math.inf if high is None else float(high.reshape(()))


def _is_first_input_alone(node: ir.Node, name: str) -> bool:
    first = node.inputs[0]
    return first is not None and first.name == name and all(v is None or v.name != name for v in node.inputs[1:])


def _group(node: ir.Node) -> int:
    attribute = node.attributes.get("group")
    return 1 if attribute is None else int(attribute.value)
