"""Runs a prepared model piece by piece: one small onnxruntime session a layer, activations handed on as OrtValues.

Because every activation between layers is at hand, a probe runs only what a changed value reaches (suffix execution),
and no session is made per probe: a layer whose weights are probed has a second session that takes them as inputs.

All numbers are the simulation's: float kernels with fake-quantized values. What integer kernels make of the same plan
is a measurement on a target, never taken from here. `OrtValue.numpy()` is a view that dies with its owner, so values
are kept as OrtValues and copied where an array leaves this module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnxruntime import OrtValue

from quantsieve.errors import UnsupportedModel
from quantsieve.model.graph import Graph, node_inputs
from quantsieve.model.units import Layer, Structure

Values = dict[str, OrtValue]


@dataclass(frozen=True, slots=True)
class Affine:
    """An activation format with its range applied: q = saturate(rint(x / scale) + zero_point) in `dtype`."""

    scale: np.float32
    zero_point: int
    dtype: str  # 'uint8' or another integer type that QuantizeLinear takes


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


class Piece:
    """A part of the graph as a session: all its reads as inputs, apart from the constants that it holds."""

    def __init__(self, name: str, model: onnx.ModelProto, options: onnxruntime.SessionOptions):
        self.name = name
        try:
            self.session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise UnsupportedModel(
                "layers that onnxruntime can run one by one",
                f"{name}, which it refuses: {str(error).strip().splitlines()[0][:300]}",
                "Report this model; `evaluate` and `quantize --plan` work without the layer-wise run.",
            ) from error
        self.inputs = tuple(value.name for value in self.session.get_inputs())
        self.outputs = tuple(value.name for value in self.session.get_outputs())
        self._are_arrays = all(value.type in _ARRAY_TYPES for value in self.session.get_outputs())

    def run(self, values: Mapping[str, OrtValue]) -> Values:
        """What the piece makes from its inputs, which are among `values`."""
        feeds = {name: values[name] for name in self.inputs}
        if not self._are_arrays:
            return dict(zip(self.outputs, self.session.run_with_ort_values(self.outputs, feeds), strict=True))
        # `run` costs 3 us a call where `run_with_ort_values` costs 45 (onnxruntime 1.32); neither copies.
        got = self.session.run(self.outputs, feeds)
        return {name: OrtValue.ortvalue_from_numpy(array) for name, array in zip(self.outputs, got, strict=True)}

    def arrays(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As `run`, on arrays; `values` holds the inputs and nothing else."""
        return dict(zip(self.outputs, self.session.run(self.outputs, values), strict=True))


class Executor:
    """The pieces of one model. Thread-safe: sessions are, and a run holds its values itself."""

    def __init__(self, graph: Graph, structure: Structure):
        self.graph = graph
        self.structure = structure
        self._owner = {name: layer for layer in structure.layers for name in layer.nodes}
        self.types = _value_types(graph)
        self._options = piece_options()
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
        self._cores: dict[str, Piece] = {}
        self._quantizers: dict[str, Piece] = {}
        self._last_use = self._find_last_uses()

    # --- whole runs -------------------------------------------------------------------------------------------

    def forward(self, feeds: Mapping[str, np.ndarray], keep: Callable[[str], bool] | None = None) -> Values:
        """Float values by name: all of them, or those that `keep` says yes to and the graph's outputs."""
        values = self.feed_values(feeds)
        for index, piece in enumerate(self._pieces):
            values.update(piece.run(values))
            if keep is not None:
                self._drop(values, index, keep)
        return values

    def feed_values(self, feeds: Mapping[str, np.ndarray]) -> Values:
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
        weights: tuple[np.ndarray, np.ndarray | None] | None = None,
        reads: Mapping[str, Affine] = MappingProxyType({}),
        outputs: Mapping[str, Affine] = MappingProxyType({}),
    ) -> None:
        """Run one piece on `values` and put what it makes there; values that nobody needs any more are dropped.

        weights: other weight and bias; reads: values that this piece reads rounded; outputs: made values to round.
        """
        made = self.made(index, values, weights, reads)
        for name, affine in outputs.items():
            if name in made:
                made[name] = self.round(made[name], affine)
        values.update(made)
        self._drop(values, index, lambda name: False)

    def reads(self, index: int) -> tuple[str, ...]:
        """Names of the values that one piece reads."""
        return self._pieces[index].inputs

    def made(
        self,
        index: int,
        values: Mapping[str, OrtValue],
        weights: tuple[np.ndarray, np.ndarray | None] | None = None,
        reads: Mapping[str, Affine] = MappingProxyType({}),
    ) -> Values:
        """What one piece makes of `values`, which stay as they are; weights and reads as in `run_step`."""
        layer, piece = self._order[index][2], self._pieces[index]
        extra: Values = {}
        if weights is not None and layer is not None:
            piece, extra = self._with_weights(layer, *weights)
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
            self._drop(dirty, index, lambda name: False)
        return {name: dirty[name] if name in dirty else base[name] for name in self.graph.output_names}

    def round(self, value: OrtValue, affine: Affine) -> OrtValue:
        """The value quantized and dequantized (onnxruntime's own QuantizeLinear and DequantizeLinear)."""
        return OrtValue.ortvalue_from_numpy(self.rounded(value.numpy(), affine))

    def rounded(self, array: np.ndarray, affine: Affine) -> np.ndarray:
        """`round` on an array."""
        piece = self._quantizers.get(affine.dtype)
        if piece is None:
            piece = self._quantizers.setdefault(affine.dtype, _quantizer(affine.dtype))
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

    def _make_core(self, layer: Layer) -> Piece:
        node = ir.to_proto(self.graph.by_name[layer.nodes[0]])
        del node.input[2:]
        return self._session(layer.name, [node], (layer.weight or "",), [node.output[0]])

    def _make_piece(self, name: str, nodes: Sequence[str], free: Sequence[str]) -> Piece:
        inside = set(nodes)
        found = [self.graph.by_name[n] for n in nodes]
        ordered = sorted(found, key=lambda node: self.graph.position[node.name or ""])
        outputs = []
        for node in ordered:
            for value in node.outputs:
                readers = self.graph.readers.get(value.name or "", ())
                leaves = any(reader.name not in inside for reader in readers)
                if value.name and (leaves or value.name in self.graph.output_names):
                    outputs.append(value.name)
        outputs = outputs or [v.name or "" for v in ordered[-1].outputs if v.name][:1]
        return self._session(name, [ir.to_proto(node) for node in ordered], free, outputs)

    def _session(self, name: str, nodes: list[onnx.NodeProto], free: Sequence[str], outputs: Sequence[str]) -> Piece:
        made = {out for node in nodes for out in node.output}
        reads = dict.fromkeys(
            read
            for node in nodes
            for read in node_inputs(self.graph.by_name.get(node.name) or _missing(node.name))
            if read in node.input or node.attribute
        )
        inputs, constants = {}, []
        for read in reads:
            if read in made:
                continue
            if self.graph.is_constant(read) and read not in free:
                constants.append(self._constant_proto(read))
            else:
                inputs[read] = self.types[read]
        opsets = tuple(self.graph.model.opset_imports.items())
        model = make_model(nodes, inputs, outputs, constants, opsets, self.graph.model.ir_version)
        return Piece(name, model, self._options)

    def _constant_proto(self, name: str) -> onnx.TensorProto:
        tensor = self.graph.model.graph.initializers[name].const_value
        assert tensor is not None
        if tensor.dtype == ir.DataType.STRING:
            return onnx.numpy_helper.from_array(tensor.numpy(), name)
        return onnx.TensorProto(
            name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy(), raw_data=tensor.tobytes()
        )

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
        return sum(_num_bytes(value) for value in self.forward(feeds).values())

    def _drop(self, values: Values, index: int, keep: Callable[[str], bool]) -> None:
        for name in self._last_use[index]:
            if name in values and not keep(name):
                del values[name]


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


def _missing(name: str) -> ir.Node:
    raise KeyError(name)


def _num_bytes(value: OrtValue) -> int:
    return int(value.numpy().nbytes) if value.is_tensor() and "string" not in value.data_type() else 0


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
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
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
