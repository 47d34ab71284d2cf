"""onnxruntime's own optimized graph of a model, cut into regions at the values that rounding may change.

onnxruntime fuses nodes and keeps convolutions in a blocked layout (NCHWc) while it optimizes. Sessions made from parts
of the *original* graph lose both at every cut: layer by layer they run 1.5 to 2.6 times as long as the whole model. So
the model is optimized once, with every root of a tensor as an output so that no fusion swallows it, and the optimized
graph is cut instead. A region is what makes one root from the roots before it: a layer, with the nodes between.

This module only reads what onnxruntime made; `_check.py` holds it against the model before it is used.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from quantsieve.model.aside import LARGE
from quantsieve.model.execute import piece_options
from quantsieve.model.graph import Graph, node_inputs
from quantsieve.model.units import LOOKUP, Layer, Structure

BLOCKED = "com.microsoft.nchwc"
_MOVING = ("ReorderOutput", "Transpose")  # what onnxruntime puts between a value that it keeps elsewhere and its name
_BYPASSING = ["MatMulScaleFusion"]  # lets a reader pass a value by, even when it is an output
_SMALL = 1024  # bytes of an initializer up to which it stays in the model file itself
_LINE = 64  # bytes
_BLOCKS = (16, 8, 4)  # channels side by side in a blocked layout
MULTIPLIES = (
    "Conv", "FusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul",
)  # fmt: skip


def weight_of(node: onnx.NodeProto) -> str:
    """What the node reads where weights stand; '' where it is none that has some."""
    if node.op_type == LOOKUP:
        return str(node.input[0])
    return str(node.input[1]) if node.op_type in MULTIPLIES and len(node.input) > 1 else ""


class Refused(Exception):
    """The optimized graph cannot serve; the model runs layer by layer instead. Holds the reason."""


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes in the order of running. reads: values made elsewhere; constants: initializers; outputs: read elsewhere."""

    nodes: tuple[onnx.NodeProto, ...]
    reads: tuple[str, ...]
    constants: tuple[str, ...]
    outputs: tuple[str, ...]

    def weighted(self) -> onnx.NodeProto | None:
        """The only node that has a constant weight; None when there is none or more."""
        found = [node for node in self.nodes if weight_of(node) in self.constants]
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class Optimized:
    """places: by root, the value that holds it, possibly in another layout; turned: roots whose axes are others there.
    types: of every value that is read."""

    regions: tuple[Region, ...]
    places: Mapping[str, str]
    constants: Mapping[str, np.ndarray]
    types: Mapping[str, onnx.TypeProto]
    opsets: tuple[tuple[str, int], ...]
    ir_version: int
    outputs: tuple[str, ...]
    makers: Mapping[str, int]  # by value, its region
    turned: frozenset[str]


@dataclass(frozen=True, slots=True)
class Saved:
    """A model in a folder of its own, its large initializers in a file beside it that every edited copy shares."""

    folder: Path

    def proto(self) -> onnx.ModelProto:
        """Without the bytes of large initializers; to be edited and run from the same folder."""
        return onnx.load(self.folder / "model.onnx", load_external_data=False)

    def session(
        self, model: onnx.ModelProto, options: onnxruntime.SessionOptions, disabled: Sequence[str] = ()
    ) -> onnxruntime.InferenceSession:
        """The edited model in onnxruntime, which maps the shared file instead of copying it."""
        path = self.folder / "edited.onnx"
        path.write_bytes(model.SerializeToString())
        options.add_session_config_entry("session.disable_prepacking", "1")  # for one run or none it only costs
        return onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
        )


def save(graph: Graph, folder: Path) -> Saved:
    """The model of `graph` in an empty folder."""
    ir.save(graph.model, folder / "model.onnx", external_data="weights", size_threshold_bytes=_SMALL)
    return Saved(folder)


def optimize(saved: Saved, graph: Graph, structure: Structure, types: Mapping[str, onnx.TypeProto]) -> Optimized:
    """The optimized model in regions. types: of the model's own values.

    Raises Refused when its parts do not fit together.
    """
    roots = [tensor.root for tensor in structure.tensors]
    model = _optimized_model(saved, graph, roots)
    view = Graph(ir.from_proto(model))
    places = {root: _place(view, root) for root in roots}
    if len(set(places.values())) != len(places):
        raise Refused("two tensors share one value")
    outputs = tuple(value.name for value in graph.outputs)
    reads = {node.name: tuple(node_inputs(view.by_name[node.name])) for node in model.graph.node}
    makers = {name: node for node in model.graph.node for name in node.output if name}
    position = {node.name: i for i, node in enumerate(model.graph.node)}
    ends = sorted(
        {name for name in (*places.values(), *outputs) if name in makers}, key=lambda name: position[makers[name].name]
    )
    live = _behind([name for name in outputs if name in makers], makers, reads, set())
    groups, taken = [], {node.name for node in model.graph.node if node.name not in live}
    for end in ends:
        group = _behind([end], makers, reads, taken)
        taken |= group
        if group:
            groups.append(sorted(group, key=position.__getitem__))
    constants = _constants(model, graph, saved.folder)
    nodes = {node.name: node for node in model.graph.node}
    regions = _regions([[nodes[name] for name in group] for group in groups], reads, constants, outputs)
    return Optimized(
        regions,
        places,
        constants,
        _types(model, regions, types),
        tuple((opset.domain, opset.version) for opset in model.opset_import),
        model.ir_version,
        outputs,
        {name: index for index, region in enumerate(regions) for name in region.outputs},
        frozenset(root for root in roots if any(node.op_type == "Transpose" for node in _moves(view, root))),
    )


def _optimized_model(saved: Saved, graph: Graph, roots: Sequence[str]) -> onnx.ModelProto:
    """Large initializers stay in a file of the folder."""
    model = saved.proto()
    have = {output.name for output in model.graph.output}
    model.graph.output.extend(
        onnx.ValueInfoProto(name=root) for root in roots if root in graph.producers and root not in have
    )
    options = piece_options()
    options.optimized_model_filepath = str(saved.folder / "optimized.onnx")
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", str(_SMALL))
    saved.session(model, options, _BYPASSING)
    made = onnx.load(saved.folder / "optimized.onnx", load_external_data=False)
    for index, node in enumerate(made.graph.node):
        node.name = f"{index}"  # onnxruntime leaves some nodes without a name
    return made


def _moves(view: Graph, root: str) -> list[ir.Node]:
    """The nodes by which onnxruntime only moves or reorders a value to give it the root's name, the last first."""
    found: list[ir.Node] = []
    node = view.producers.get(root)
    while node is not None and node.op_type in _MOVING and node.inputs[0] is not None:
        found.append(node)
        node = view.producers.get(node.inputs[0].name or "")
    return found


def _place(view: Graph, root: str) -> str:
    """Where the numbers of a root are."""
    moves = _moves(view, root)
    return moves[-1].inputs[0].name or "" if moves else root  # type: ignore[union-attr]


def _behind(
    names: Iterable[str],
    makers: Mapping[str, onnx.NodeProto],
    reads: Mapping[str, Sequence[str]],
    without: set[str],
) -> set[str]:
    """Names of the nodes that the values are made by, those in `without` and all behind them left out."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        node = makers.get(waiting.pop())
        if node is not None and node.name not in found and node.name not in without:
            found.add(node.name)
            waiting += reads[node.name]
    return found


def _regions(
    groups: Sequence[Sequence[onnx.NodeProto]],
    reads: Mapping[str, Sequence[str]],
    constants: Mapping[str, np.ndarray],
    outputs: Sequence[str],
) -> tuple[Region, ...]:
    readers: dict[str, set[int]] = {}
    for index, group in enumerate(groups):
        for node in group:
            for name in reads[node.name]:
                readers.setdefault(name, set()).add(index)
    regions = []
    for index, group in enumerate(groups):
        made = [name for node in group for name in node.output if name]
        read = dict.fromkeys(name for node in group for name in reads[node.name] if name not in set(made))
        regions.append(
            Region(
                tuple(group),
                tuple(name for name in read if name not in constants),
                tuple(name for name in read if name in constants),
                tuple(name for name in made if readers.get(name, set()) - {index} or name in outputs),
            )
        )
    return tuple(regions)


def _constants(model: onnx.ModelProto, graph: Graph, folder: Path) -> dict[str, np.ndarray]:
    """Arrays of the initializers; those that the model holds unchanged are the model's own, not copies.

    Large ones of another layout are maps of a file in `folder`, which may be removed as long as they are used.
    """
    found = {}
    with (folder / "laid out").open("w+b") as file:
        for tensor in model.graph.initializer:
            array, own = _array(tensor, folder), graph.constant(tensor.name)
            if own is not None and own.dtype == array.dtype and own.shape == array.shape and np.array_equal(own, array):
                found[tensor.name] = own
            elif array.nbytes > LARGE:
                start = -(-file.tell() // _LINE) * _LINE
                file.seek(start)
                array.tofile(file)
                found[tensor.name] = np.memmap(file, array.dtype, "r", start, array.shape)
            else:
                found[tensor.name] = _aligned(array)
    return found


def _array(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return onnx.numpy_helper.to_array(tensor)
    info = onnx.external_data_helper.ExternalDataInfo(tensor)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(folder / info.location, dtype, "r", info.offset or 0, tuple(tensor.dims))


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a cache line: blocked convolutions run 8 to 10 % longer on weights that do not."""
    buffer = np.empty(array.nbytes + _LINE, np.uint8)
    start = -buffer.ctypes.data % _LINE
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _types(
    model: onnx.ModelProto, regions: Sequence[Region], own: Mapping[str, onnx.TypeProto]
) -> dict[str, onnx.TypeProto]:
    known = {value.name: value.type for value in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    elems = {name: found.tensor_type.elem_type for name, found in known.items() if found.HasField("tensor_type")}
    elems |= {name: found.tensor_type.elem_type for name, found in own.items() if found.HasField("tensor_type")}
    elems |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        # What onnxruntime made has often no type in the file. Its own nodes hand on the type of what they read;
        # a wrong guess is refused when the session is made.
        for name in node.output:
            if name and not elems.get(name):
                elems[name] = elems.get(node.input[0], 0) if node.input else 0
    types = {}
    for name in {name for region in regions for name in region.reads}:
        if not elems.get(name):
            raise Refused(f"{name} is no tensor of known type")
        types[name] = onnx.helper.make_tensor_type_proto(elems[name], None)
    return types


# --- weights in the layout of the optimized graph -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slots:
    """Where a region takes a layer's weight and bias from, and the layout that the weight has there."""

    region: int
    weight: str
    bias: str | None
    layout: tuple[str, int]  # kind and channels a block; ('plain', 1) for the model's own

    def arrays(self, weight: np.ndarray, bias: np.ndarray | None, shapes: Mapping[str, np.ndarray]) -> dict:
        """By initializer, what stands for that weight and bias."""
        found = {self.weight: _laid_out(weight, self.layout).reshape(shapes[self.weight].shape)}
        if self.bias is not None and bias is not None:
            found[self.bias] = _padded_bias(bias, shapes[self.bias].size).reshape(shapes[self.bias].shape)
        return found


def find_slots(optimized: Optimized, graph: Graph, layer: Layer) -> Slots | None:
    """None when nothing reads what the layer makes. Raises Refused when its weight is not found as it should be."""
    index = optimized.makers.get(optimized.places.get(layer.output, ""))
    if index is None:
        return None
    node = optimized.regions[index].weighted()
    weight = graph.constant(layer.weight or "")
    if node is None or weight is None:
        raise Refused(f"the weight of {layer.name} is not found in the optimized graph")
    names = [weight_of(node)]
    there = optimized.constants[names[0]]
    layout = next((known for known in _layouts(weight) if _is_same(_laid_out(weight, known), there)), None)
    bias = graph.constant(layer.bias) if layer.bias else None
    if bias is not None:
        names.append(node.input[2] if len(node.input) > 2 else "")
        held = optimized.constants.get(names[-1])
        if held is None or held.size < bias.size or not _is_same(_padded_bias(bias, held.size), held):
            raise Refused(f"the bias of {layer.name} is another in the optimized graph")
    if layout is None:
        raise Refused(f"the weight of {layer.name} has an unknown layout in the optimized graph")
    for name in names:
        if sum(list(other.input).count(name) for other in optimized.regions[index].nodes) > 1:
            raise Refused(f"{name} is read twice behind {layer.name}")
    return Slots(index, names[0], names[1] if bias is not None else None, layout)


def _layouts(weight: np.ndarray) -> list[tuple[str, int]]:
    """onnxruntime's filter layouts by name (mlas, reorder.cpp), the most likely first."""
    blocked = [(kind, block) for block in _BLOCKS for kind in ("OIHWBiBo", "OIHWBo")] if weight.ndim == 4 else []
    return [("plain", 1), *blocked]


def _laid_out(weight: np.ndarray, layout: tuple[str, int]) -> np.ndarray:
    """The weight with its channels in blocks, filled up with zeros; same numbers, another order."""
    kind, block = layout
    if kind == "plain":
        return np.ascontiguousarray(weight)
    num_out, num_in, height, width = weight.shape
    in_block = block if kind == "OIHWBiBo" else 1
    padded = np.zeros((-(-num_out // block) * block, -(-num_in // in_block) * in_block, height, width), np.float32)
    padded[:num_out, :num_in] = weight
    split = padded.reshape(-1, block, padded.shape[1] // in_block, in_block, height, width)
    return _aligned(split.transpose(0, 2, 4, 5, 3, 1))


def _padded_bias(bias: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([bias.reshape(-1), np.zeros(size - bias.size, np.float32)])


def _is_same(array: np.ndarray, there: np.ndarray) -> bool:
    return array.size == there.size and np.array_equal(array.reshape(-1), there.reshape(-1))


def unblocked(array: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """What a value may be in the model's own layout: as it is, and read as blocks of channels. shape: that layout's."""
    if array.shape == shape:
        yield array
    if array.ndim == 4 and len(shape) == 4 and array.shape[0] == shape[0] and array.shape[2:] == shape[2:]:
        count, channels, height, width = array.shape
        for block in _BLOCKS:
            if channels % block == 0 and channels >= shape[1]:
                split = array.reshape(count, channels // block, height, width, block).transpose(0, 1, 4, 2, 3)
                yield split.reshape(array.shape)[:, : shape[1]]
