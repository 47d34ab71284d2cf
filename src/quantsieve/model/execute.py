"""Runs a prepared model piece by piece: one small onnxruntime session a layer, activations handed on as OrtValues.

Because every activation between layers is at hand, a probe runs only what a changed value reaches (suffix execution),
and no session is made per probe: a layer whose weights are probed has a second session that takes them as inputs.
Weights that a walk over a plan gives a convolution come again with the next plan: they are constants of a session.

All numbers are the simulation's: float kernels with fake-quantized values. What integer kernels make of the same plan
is a measurement on a target, never taken from here. `OrtValue.numpy()` is a view that dies with its owner, so values
are kept as OrtValues and copied where an array leaves this module.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnxruntime import OrtValue

from quantsieve.errors import UnsupportedModel
from quantsieve.model import aside
from quantsieve.model.graph import Graph, node_inputs, tensor_proto
from quantsieve.model.units import Layer, Structure

Values = dict[str, OrtValue]
Weights = tuple[np.ndarray, np.ndarray | None]  # of a layer, with its bias
_PAGE = 4096  # bytes
DYNAMIC = "dynamic"
BLOCKS = "blocks"
OWN_RANGE = (DYNAMIC, BLOCKS)  # formats without calibrated ranges: a layer rounds what it reads as it comes
_BLOCK = 32  # values along the last axis that share a scale under BLOCKS


@dataclass(frozen=True, slots=True)
class Affine:
    """An activation format with its range applied: q = saturate(rint(x / scale) + zero_point) in `dtype`."""

    scale: np.float32
    zero_point: int
    dtype: str  # 'uint8' or another integer type that QuantizeLinear takes, or one of OWN_RANGE


_ARRAY_TYPES = {
    f"tensor({name})"
    for name in (
        "float",
        "double",
        "float16",
        "bool",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
}  # what onnxruntime hands over as numpy arrays without a copy


class Shelf:
    """Keeps arrays in memory up to `room` bytes, and those that come later in an unnamed file, as maps of it."""

    def __init__(self, room: int):
        self._left = room
        self._file: IO[bytes] | None = None

    def put(self, array: np.ndarray) -> np.ndarray:
        """The array, or what stands for it and must not be changed."""
        if array.nbytes <= self._left or array.nbytes < _PAGE or array.dtype.hasobject:
            self._left -= array.nbytes
            return array
        if self._file is None:
            self._file = TemporaryFile(prefix="quantsieve-")  # noqa: SIM115 - its maps outlive the shelf
        start = -(-self._file.tell() // _PAGE) * _PAGE
        self._file.seek(start)
        array.tofile(self._file)
        return np.memmap(self._file, array.dtype, "r", start, array.shape)

    def put_value(self, value: OrtValue) -> OrtValue:
        """As `put`; a view of the value's array dies with the value, so what stays is the value."""
        if not value.is_tensor() or "string" in value.data_type():
            return value
        array = value.numpy()
        kept = self.put(array)
        return value if kept is array else OrtValue.ortvalue_from_numpy(kept)


class Piece:
    """A part of the graph as a session: all its reads as inputs, apart from the constants that it holds.

    given: inputs of the session that are fed with the same arrays in every run; they count as no inputs of the piece.
    folder: where constants of the model lie that are in files.
    """

    def __init__(
        self,
        name: str,
        model: onnx.ModelProto,
        options: onnxruntime.SessionOptions,
        given: Mapping[str, np.ndarray] = MappingProxyType({}),
        folder: Path | None = None,
    ):
        self.name = name
        self._given = {name: OrtValue.ortvalue_from_numpy(array) for name, array in given.items()}
        try:
            self.session = aside.open_proto(model, folder, options)
        except Exception as error:
            raise UnsupportedModel(
                "layers that onnxruntime can run one by one",
                f"{name}, which it refuses: {str(error).strip().splitlines()[0][:300]}",
                "Report this model; `evaluate` and `quantize --plan` work without the layer-wise run.",
            ) from error
        self.inputs = tuple(value.name for value in self.session.get_inputs() if value.name not in given)
        self.outputs = tuple(value.name for value in self.session.get_outputs())
        self._are_arrays = all(value.type in _ARRAY_TYPES for value in self.session.get_outputs())

    def run(self, values: Mapping[str, OrtValue]) -> Values:
        """What the piece makes from its inputs, which are among `values`."""
        feeds = {name: values[name] for name in self.inputs} | self._given
        if not self._are_arrays:
            return dict(zip(self.outputs, self.session.run_with_ort_values(self.outputs, feeds), strict=True))
        # `run` costs 3 us a call where `run_with_ort_values` costs 45 (onnxruntime 1.32); neither copies.
        got = self.session.run(self.outputs, feeds)
        return {name: OrtValue.ortvalue_from_numpy(array) for name, array in zip(self.outputs, got, strict=True)}

    def arrays(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As `run`, on arrays; `values` holds the inputs and nothing else."""
        feeds = {**values, **self._given} if self._given else values
        return dict(zip(self.outputs, self.session.run(self.outputs, feeds), strict=True))


@dataclass(frozen=True, slots=True)
class Room:
    """What a run may hold in memory.

    is_lean: large weights are read from the model's file in every run instead of being held in the layout that the
    kernels want, which takes next to no memory and up to twice the time. values: bytes of the kept values of one
    batch, beyond which they go to a file. keeps_integers: whether integers of layers are kept from batch to batch.
    """

    is_lean: bool = False
    values: int = 1 << 62
    keeps_integers: bool = True


AMPLE = Room()


class Executor:
    """The pieces of one model. Thread-safe: sessions are, and a run holds its values itself."""

    def __init__(self, graph: Graph, structure: Structure, room: Room = AMPLE):
        self.room = room
        self.graph = graph
        self.structure = structure
        self._owner = {name: layer for layer in structure.layers for name in layer.nodes}
        self.types = _value_types(graph)
        self._order: list[tuple[str, tuple[str, ...], Layer | None]] = []
        for node in graph.nodes:
            layer = self._owner.get(node.name or "")
            if layer is None:
                self._order.append((node.name or "", (node.name or "",), None))
            elif layer.nodes[-1] == node.name:  # where all its inputs are surely there
                self._order.append((layer.name, layer.nodes, layer))
        self._pieces = [self._make_piece(name, nodes, ()) for name, nodes, _ in self._order]
        self.position = {layer.name: i for i, (_, _, layer) in enumerate(self._order) if layer is not None}
        self._free_weights: dict[str, Piece] = {}
        # The last two weights of a layer, as plans with two schemes take turns.
        self._constant_weights: dict[str, tuple[tuple[np.ndarray, Piece], ...]] = {}
        self._cores: dict[str, Piece] = {}
        self._quantizers: dict[str, Piece] = {}
        self._last_use = self._find_last_uses()

    # --- whole runs -------------------------------------------------------------------------------------------

    def forward(self, feeds: Mapping[str, np.ndarray], keep: Callable[[str], bool] | None = None) -> Values:
        """Float values by name: all of them, or those that `keep` says yes to and the graph's outputs."""
        values = self.feed_values(feeds)
        shelf = Shelf(self.room.values)
        for index, piece in enumerate(self._pieces):
            made = piece.run(values)
            values.update(made if keep is not None else {name: shelf.put_value(value) for name, value in made.items()})
            if keep is not None:
                self.drop(values, index, keep)
        return values

    def feed_values(self, feeds: Mapping[str, np.ndarray]) -> Values:
        """Raises UnsupportedModel for an input of text, which onnxruntime does not hand from session to session."""
        for name, given in feeds.items():
            if given.dtype.kind in "USO":
                raise UnsupportedModel(
                    "inputs of numbers or truth values",
                    f"text in the input {name}",
                    "Cut off the part of the model that turns text into numbers, and give its numbers as samples.",
                )
        values = {name: OrtValue.ortvalue_from_numpy(np.ascontiguousarray(a)) for name, a in feeds.items()}
        for name in self.graph.output_names:  # an initializer may be an output
            array = self.graph.constant(name)
            if array is not None:
                values[name] = OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        return values

    @property
    def steps(self) -> tuple[Layer | None, ...]:
        """The layer of every piece in the order of running, None for a piece that belongs to no layer."""
        return tuple(layer for _, _, layer in self._order)

    def run_step(
        self,
        index: int,
        values: Values,
        weights: Weights | None = None,
        reads: Mapping[str, Affine] = MappingProxyType({}),
        outputs: Mapping[str, Affine] = MappingProxyType({}),
    ) -> None:
        """Run one piece on `values` and put what it makes there; values that nobody needs any more are dropped.

        weights: other weight and bias; reads: values that this piece reads rounded; outputs: made values to round.
        """
        values.update(self.made_rounded(index, values, weights, reads, outputs))
        self.drop(values, index)

    def made_rounded(
        self,
        index: int,
        values: Mapping[str, OrtValue],
        weights: Weights | None,
        reads: Mapping[str, Affine],
        outputs: Mapping[str, Affine],
    ) -> Values:
        """What `run_step` puts there, from `values` that stay as they are."""
        made = self.made(index, values, weights, reads)
        return {name: self.round(value, outputs[name]) if name in outputs else value for name, value in made.items()}

    def reads(self, index: int) -> tuple[str, ...]:
        """Names of the values that one piece reads."""
        return self._pieces[index].inputs

    def makes(self, index: int) -> tuple[str, ...]:
        """Names of the values that one piece makes."""
        return self._pieces[index].outputs

    def made(
        self,
        index: int,
        values: Mapping[str, OrtValue],
        weights: Weights | None = None,
        reads: Mapping[str, Affine] = MappingProxyType({}),
    ) -> Values:
        """What one piece makes of `values`, which stay as they are; weights and reads as in `run_step`."""
        layer, piece = self._order[index][2], self._pieces[index]
        extra: Values = {}
        if weights is not None and layer is not None:
            is_constant = _gains_from_constants(layer) and not self.room.is_lean
            with_other = self._with_constant if is_constant else self._with_weights
            piece, extra = with_other(layer, *weights)
        if not reads and not extra:
            return piece.run(values)
        local = {name: values[name] for name in piece.inputs if name in values}
        rounded = {name: self.round(values[name], affine) for name, affine in reads.items()}
        return piece.run({**local, **rounded, **extra})

    # --- probes -----------------------------------------------------------------------------------------------

    def after_weights(
        self, base: Mapping[str, OrtValue], layer: Layer, weight: np.ndarray, bias: np.ndarray | None
    ) -> Values:
        """Outputs of the graph when one layer has other weights, from the float values of the same samples."""
        piece, extra = self._with_weights(layer, weight, bias)
        seen = {name: base[name] for name in piece.inputs if name in base} | extra
        return self.after_values(base, piece.run(seen))

    def after_values(self, base: Mapping[str, OrtValue], changed: Values) -> Values:
        """Outputs of the graph when some values are replaced; runs only what the change reaches."""
        dirty = dict(changed)
        for index, piece in enumerate(self._pieces):
            if any(name in dirty for name in piece.inputs) and not all(name in changed for name in piece.outputs):
                seen = {name: dirty[name] if name in dirty else base[name] for name in piece.inputs}
                dirty.update(piece.run(seen))
            self.drop(dirty, index)
        return {name: dirty[name] if name in dirty else base[name] for name in self.graph.output_names}

    def after_sources(
        self,
        base: Mapping[str, OrtValue],
        rounded: Mapping[str, Affine],
        layer: Layer | None = None,
        weights: tuple[np.ndarray, np.ndarray | None] | None = None,
    ) -> Values:
        """Outputs of the graph when tensors are rounded, each as the changes before it leave it, and one layer has
        other weights; runs only what the changes reach. rounded: by root; weights: of `layer`."""
        given = [root for root in rounded if root not in self.graph.producers]
        dirty = {root: self.round(base[root], rounded[root]) for root in given}
        for index, piece in enumerate(self._pieces):
            step = self._order[index][2]
            own = weights if layer is not None and step is not None and step.name == layer.name else None
            made = {name: base[name] for name in piece.outputs if name in rounded}
            if own is not None or any(name in dirty for name in piece.inputs):
                seen = {name: dirty[name] if name in dirty else base[name] for name in self.reads(index)}
                made = self.made(index, seen, own)
            dirty.update(
                {name: self.round(found, rounded[name]) if name in rounded else found for name, found in made.items()}
            )
            self.drop(dirty, index)
        return {name: dirty[name] if name in dirty else base[name] for name in self.graph.output_names}

    def round(self, value: OrtValue, affine: Affine) -> OrtValue:
        """The value quantized and dequantized (onnxruntime's own QuantizeLinear and DequantizeLinear)."""
        return OrtValue.ortvalue_from_numpy(self.rounded(value.numpy(), affine))

    def rounded(self, array: np.ndarray, affine: Affine) -> np.ndarray:
        """`round` on an array."""
        if affine.dtype == BLOCKS:
            return _rounded_blocks(array)
        piece = self._quantizers.get(affine.dtype)
        if piece is None:
            make = _dynamic_quantizer if affine.dtype == DYNAMIC else _quantizer
            piece = self._quantizers.setdefault(affine.dtype, make(affine.dtype))
        if affine.dtype == DYNAMIC:
            return piece.arrays({"x": array})["y"]
        scale, zero_point = np.asarray(affine.scale, np.float32), np.asarray(affine.zero_point, affine.dtype)
        return piece.arrays({"x": array, "scale": scale, "zero_point": zero_point})["y"]

    def core_output(self, layer: Layer, value: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """The layer's main node alone, without bias and activation, on `value` with `weight`."""
        piece = self._cores.get(layer.name)
        if piece is None:
            piece = self._cores.setdefault(layer.name, self._make_core(layer))
        feeds = {layer.inputs[0]: value, layer.weight or "": weight}
        return piece.session.run(None, {k: np.ascontiguousarray(v) for k, v in feeds.items()})[0]

    # --- making pieces ----------------------------------------------------------------------------------------

    def _with_weights(self, layer: Layer, weight: np.ndarray, bias: np.ndarray | None) -> tuple[Piece, Values]:
        piece = self._free_weights.get(layer.name)
        if piece is None:
            free = tuple(name for name in (layer.weight, layer.bias) if name)
            piece = self._free_weights.setdefault(layer.name, self._make_piece(layer.name, layer.nodes, free))
        extra = {layer.weight or "": OrtValue.ortvalue_from_numpy(np.ascontiguousarray(weight))}
        if layer.bias and bias is not None:
            extra[layer.bias] = OrtValue.ortvalue_from_numpy(np.ascontiguousarray(bias))
        return piece, extra

    def _with_constant(self, layer: Layer, weight: np.ndarray, bias: np.ndarray | None) -> tuple[Piece, Values]:
        kept = self._constant_weights.get(layer.name, ())
        piece = next((piece for known, piece in kept if np.array_equal(known, weight)), None)
        if piece is None:
            piece = self._make_constant(layer, weight)
            self._constant_weights[layer.name] = (*kept[-1:], (weight, piece))
        if bias is None:
            return piece, {}
        return piece, {layer.bias or "": OrtValue.ortvalue_from_numpy(bias.reshape(-1, *[1] * (weight.ndim - 2)))}

    def _make_constant(self, layer: Layer, weight: np.ndarray) -> Piece:
        """The layer with other weights as a constant; its bias, shape (channels, 1, 1...), is added behind."""
        nodes, outputs = self._ordered(layer.nodes)
        own = {layer.weight or "": weight}
        if layer.bias is None:
            return self._session(layer.name, nodes, (), outputs, own)
        conv = next(node for node in nodes if node.name == layer.nodes[0])
        made, conv.output[0] = conv.output[0], f"{conv.output[0]}/without bias"
        del conv.input[2:]
        add = onnx.helper.make_node("Add", [conv.output[0], layer.bias], [made])
        nodes.insert(nodes.index(conv) + 1, add)
        return self._session(layer.name, nodes, (layer.bias,), outputs, own)

    def _make_core(self, layer: Layer) -> Piece:
        node = ir.to_proto(self.graph.by_name[layer.nodes[0]])
        del node.input[2:]
        return self._session(layer.name, [node], (layer.weight or "",), [node.output[0]])

    def _make_piece(self, name: str, nodes: Sequence[str], free: Sequence[str]) -> Piece:
        ordered, outputs = self._ordered(nodes)
        return self._session(name, ordered, free, outputs)

    def _ordered(self, nodes: Sequence[str]) -> tuple[list[onnx.NodeProto], list[str]]:
        """The nodes in the order of the graph, and the values that leave them."""
        inside = set(nodes)
        ordered = sorted((self.graph.by_name[n] for n in nodes), key=lambda node: self.graph.position[node.name or ""])
        outputs = []
        for node in ordered:
            for value in node.outputs:
                readers = self.graph.readers.get(value.name or "", ())
                leaves = any(reader.name not in inside for reader in readers)
                if value.name and (leaves or value.name in self.graph.output_names):
                    outputs.append(value.name)
        outputs = outputs or [v.name or "" for v in ordered[-1].outputs if v.name][:1]
        return [ir.to_proto(node) for node in ordered], outputs

    def _session(
        self,
        name: str,
        nodes: list[onnx.NodeProto],
        free: Sequence[str],
        outputs: Sequence[str],
        own: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> Piece:
        """free: constants that become inputs; own: constants with other values."""
        made = {out for node in nodes for out in node.output}
        reads = dict.fromkeys(
            read
            for node in nodes
            for read in (node_inputs(self.graph.by_name[node.name]) if node.name else node.input)
            if read in node.input or node.attribute
        )
        inputs: dict[str, onnx.TypeProto] = {}
        held: dict[str, ir.TensorProtocol] = {name: ir.tensor(array) for name, array in own.items()}
        given: dict[str, np.ndarray] = {}
        for read in reads:
            if read in made or read in own:
                continue
            constant = None if read in free else self.graph.tensor(read)
            if constant is None:
                inputs[read] = self.types[read]
            elif self.room.is_lean and constant.nbytes > aside.LARGE:
                inputs[read], given[read] = self.types[read], constant.numpy()
            else:
                held[read] = constant
        opsets = tuple(self.graph.model.opset_imports.items())
        options = piece_options()
        if all(self._is_pointwise(node) for node in nodes if node.op_type == "Conv"):
            # Without the blocked layout: a convolution of one point is half as fast with its reorders (1.32).
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        constants = hold(held, options)
        model = make_model(nodes, inputs, outputs, constants, opsets, self.graph.model.ir_version)
        return Piece(name, model, options, given)

    def _is_pointwise(self, conv: onnx.NodeProto) -> bool:
        shape = self.graph.shape(conv.input[1])
        return shape is not None and shape[2:] == (1,) * len(shape[2:])

    # --- memory -----------------------------------------------------------------------------------------------

    def _find_last_uses(self) -> list[list[str]]:
        """For each position, the values that no later piece reads."""
        last: dict[str, int] = {}
        for index, piece in enumerate(self._pieces):
            for name in (*piece.inputs, *piece.outputs):
                last[name] = index
        ends: list[list[str]] = [[] for _ in self._pieces]
        for name, index in last.items():
            if name not in self.graph.output_names:
                ends[index].append(name)
        return ends

    def bytes_per_sample(self, feeds: Mapping[str, np.ndarray]) -> int:
        """Bytes of all values of one run; `feeds` holds one sample."""
        values = self.feed_values(feeds)
        total = self.num_bytes(values)
        for index, piece in enumerate(self._pieces):
            made = piece.run(values)
            total += self.num_bytes(made)
            values.update(made)
            self.drop(values, index)
        return total

    @staticmethod
    def num_bytes(values: Values) -> int:
        """Bytes of the arrays, texts left out."""
        return sum(
            int(value.numpy().nbytes)
            for value in values.values()
            if value.is_tensor() and "string" not in value.data_type()
        )

    def drop(self, values: Values, index: int, keep: Callable[[str], bool] = lambda name: False) -> None:
        """Drops values that no piece behind that one reads; never outputs of the graph."""
        for name in self._last_use[index]:
            if name in values and not keep(name):
                del values[name]


def hold(constants: Mapping[str, ir.TensorProtocol], options: onnxruntime.SessionOptions) -> list[onnx.TensorProto]:
    """Initializers for a session with `options`; the bytes of large ones go to it directly, not through the model."""
    protos, large = [], {}
    for name, tensor in constants.items():
        if tensor.nbytes > aside.LARGE and tensor.dtype == ir.DataType.FLOAT:
            proto = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())
            proto.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", "memory"), ("offset", "0"), ("length", str(tensor.nbytes))):
                proto.external_data.add(key=key, value=value)
            large[name] = OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tensor.numpy()))
            protos.append(proto)
        else:
            protos.append(tensor_proto(name, tensor))
    if large:
        options.add_external_initializers(list(large), list(large.values()))
    return protos


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, onnx.TypeProto],
    outputs: Sequence[str],
    constants: Sequence[onnx.TensorProto],
    opsets: Sequence[tuple[str, int]],
    ir_version: int,
) -> onnx.ModelProto:
    """A model of some nodes; onnxruntime finds the types of its outputs."""
    graph = onnx.helper.make_graph(
        nodes,
        "piece",
        [onnx.helper.make_value_info(name, found) for name, found in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        constants,
    )
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


def _gains_from_constants(layer: Layer) -> bool:
    """Whether onnxruntime has a kernel for the layer that is much faster with constant weights: the blocked layout of
    convolutions of more than one point (1.5 to 5 times, 1.32)."""
    return layer.op_type == "Conv" and math.prod(layer.weight_shape[2:]) > 1


@cache
def _share_arena() -> None:
    """One memory arena for all pieces of the process: an arena each would keep a peak each."""
    settings = onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1})
    info = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(info, settings)


def piece_options() -> onnxruntime.SessionOptions:
    _share_arena()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # probes run in parallel instead; a pool per session would spin
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.use_env_allocators", "1")
    return options


def _quantizer(dtype: str) -> Piece:
    elem = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"]),
        onnx.helper.make_node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"]),
    ]
    inputs = [
        onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None),
        onnx.helper.make_tensor_value_info("scale", onnx.TensorProto.FLOAT, []),
        onnx.helper.make_tensor_value_info("zero_point", elem, []),
    ]
    graph = onnx.helper.make_graph(nodes, "round", inputs, [onnx.ValueInfoProto(name="y")])
    opset = 13 if dtype in ("uint8", "int8") else 21
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)
    options = piece_options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return Piece("rounding", model, options)


def _rounded_blocks(array: np.ndarray) -> np.ndarray:
    """Symmetric int8 with one scale for 32 values along the last axis, as MatMulNBits reads its input at the accuracy
    level 4 (mlas, sqnbitgemm, QuantizeARow_CompInt8)."""
    if array.ndim == 0 or array.size == 0:
        return array
    length = array.shape[-1]
    blocks = -(-length // _BLOCK)
    filled = np.zeros((*array.shape[:-1], blocks * _BLOCK), np.float32)
    filled[..., :length] = array
    parts = filled.reshape(*array.shape[:-1], blocks, _BLOCK)
    scale = np.abs(parts).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        rounded = np.where(scale > 0, np.rint(parts / scale) * scale, np.float32(0)).astype(np.float32)
    return np.ascontiguousarray(rounded.reshape(filled.shape)[..., :length])


def _dynamic_quantizer(dtype: str) -> Piece:
    nodes = [
        onnx.helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero_point"]),
        onnx.helper.make_node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"]),
    ]
    inputs = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)]
    graph = onnx.helper.make_graph(nodes, dtype, inputs, [onnx.ValueInfoProto(name="y")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    options = piece_options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return Piece("dynamic rounding", model, options)


def _value_types(graph: Graph) -> dict[str, onnx.TypeProto]:
    """Type without shape of every value that a piece may read; onnxruntime's inference fills what the file lacks."""
    types: dict[str, onnx.TypeProto] = {}
    unknown = []
    for value in [*graph.model.graph.inputs, *graph.model.graph.initializers.values()]:
        if value.dtype is not None:
            types[value.name or ""] = onnx.helper.make_tensor_type_proto(int(value.dtype), None)
    for node in graph.nodes:
        for value in node.outputs:
            if value.dtype is not None and isinstance(value.type, ir.TensorType):
                types[value.name or ""] = onnx.helper.make_tensor_type_proto(int(value.dtype), None)
            elif value.type is not None:
                types[value.name or ""] = ir.serde.serialize_type(value.type)
            elif value.name:
                unknown.append(value.name)
    if unknown:
        types.update(_inferred_types(graph, unknown))
    return types


def _inferred_types(graph: Graph, names: Sequence[str]) -> dict[str, onnx.TypeProto]:
    model = ir.to_proto(graph.model)
    have = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
    options = piece_options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = aside.open_proto(model, aside.folder_of(graph.model), options)
    wanted = set(names)
    return {out.name: _type_proto(out.type) for out in session.get_outputs() if out.name in wanted}


_ORT_TYPES = {
    "float": "FLOAT", "double": "DOUBLE", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "int8": "INT8",
    "uint8": "UINT8", "int16": "INT16", "uint16": "UINT16", "int32": "INT32", "uint32": "UINT32",
    "int64": "INT64", "uint64": "UINT64", "bool": "BOOL", "string": "STRING",
}  # fmt: skip


def _type_proto(text: str) -> onnx.TypeProto:
    inner = text[text.index("(") + 1 : text.rindex(")")] if "(" in text else text
    if text.startswith("tensor(") and inner in _ORT_TYPES:
        return onnx.helper.make_tensor_type_proto(getattr(onnx.TensorProto, _ORT_TYPES[inner]), None)
    if text.startswith("seq("):
        return onnx.helper.make_sequence_type_proto(_type_proto(inner))
    raise UnsupportedModel("values that are tensors", f"a value of type {text}", "Report this model.")
