"""A plan becomes a QDQ model that computes what was planned, with default session options, at every level.

Three habits of onnxruntime are written against (measured, 1.32): a layer kept float between DQ and Q is quantized at
load unless a one-input Sum stands behind it; a convolution fuses into an integer kernel only when Q/DQ stand behind its
activation; a DQ in front of a layout op is only carried to the kernel when a pair with the same parameters follows.
Names of inputs, outputs, kept nodes and weights stay; new names are short, since small models pay for every byte.
"""

import numpy as np
import onnx
import onnx_ir as ir

from quantsieve.model import aside
from quantsieve.model.execute import Affine
from quantsieve.model.units import Layer, Tensor, layout_root
from quantsieve.plan import Options, Placement, Plan, place
from quantsieve.search.prices import Costs
from quantsieve.weights import Ingredients

VERSION = 1


FLOAT_PLAN = Plan({})


def write_plan(parts: Ingredients, plan: Plan) -> ir.Model:
    """A new model with the plan's layers quantized; the prepared model is not touched.

    A plan without quantized layers gives a model with the prepared model's nodes and weights, bit for bit.
    """
    model = aside.copied(parts.graph.model)
    if any(plan.is_quantized(layer.name) for layer in parts.structure.quantizable):
        _Writer(model, parts, plan, place(parts.graph, parts.structure, plan)).write()
    _forget_inferred_types(model)
    return ir.external_data.load_to_model(model)


class _Writer:
    """Edits one model; lives for one call."""

    def __init__(self, model: ir.Model, parts: Ingredients, plan: Plan, placement: Placement):
        self.graph = model.graph
        self.parts = parts
        self.plan = plan
        self.placement = placement
        self.values: dict[str, ir.Value] = {v.name: v for node in model.graph for v in node.outputs if v.name}
        self.values |= {v.name or "": v for v in [*model.graph.inputs, *model.graph.initializers.values()]}
        self.nodes = {node.name or "": node for node in model.graph}
        self.taken = {name for name in self.values if name} | {name for name in self.nodes if name}
        self.shared: dict[tuple[str, bytes], ir.Value] = {}
        self.count = 0

    def write(self) -> None:
        quantized = [x for x in self.parts.structure.quantizable if self.plan.is_quantized(x.name)]
        for layer in quantized:
            if layer.weight is not None:
                self._write_weights(layer)
        for root in self.placement.outputs:
            self._round_output(root)
        pairs: dict[str, ir.Value] = {}
        for layer in quantized:
            for name, root in self.placement.reads.get(layer.name, ()):
                if name not in pairs:
                    pairs[name] = self._pair(self.values[name], self.parts.affine(root), None)
                self._replace_reads(layer, name, pairs[name])
        again: dict[str, ir.Value] = {}
        rounded = set(self.placement.outputs)
        for layer in quantized:  # behind layout ops the pair is repeated, so that the kernel finds it
            for name in layer.inputs:
                root = layout_root(self.parts.graph, name)
                if root in rounded and name != root:
                    if name not in again:
                        again[name] = self._pair(self.values[name], self.parts.affine(root), None)
                    self._replace_reads(layer, name, again[name])
        self._remove_unused_constants()

    # --- parts of the edit ------------------------------------------------------------------------------------

    def _write_weights(self, layer: Layer) -> None:
        made = self.parts.integers(layer, self.plan.scheme(layer.name))
        node = self.nodes[layer.nodes[0]]
        weight = made.weight
        unsigned = self.parts.weight_type == "u8"
        ints = (weight.values.astype(np.int16) + 128).astype(np.uint8) if unsigned else weight.values
        zero = np.full(weight.scale.shape, 128 if unsigned else 0, ints.dtype)
        self._dequantize(node, 1, ints, weight.scale, zero, weight.axis)
        if made.bias is not None:
            axis = 0 if made.bias.scale.ndim else None
            self._dequantize(node, 2, made.bias.values, made.bias.scale, None, axis)

    def _dequantize(
        self,
        node: ir.Node,
        index: int,
        ints: np.ndarray,
        scale: np.ndarray,
        zero_point: np.ndarray | None,
        axis: int | None,
    ) -> None:
        inputs = [self._constant("w", ints), self._shared_constant("s", scale)]
        if zero_point is not None:
            inputs.append(self._shared_constant("z", zero_point))
        attributes = {"axis": axis} if axis not in (None, 1) else {}  # 1 is the default
        made = ir.node("DequantizeLinear", inputs, name=self._fresh("D"), attributes=attributes)
        made.outputs[0].name = self._fresh("d")
        self.graph.insert_before(node, made)
        node.replace_input_with(index, made.outputs[0])

    def _round_output(self, root: str) -> None:
        value = self.values[root]
        readers = [(node, i) for node, i in value.uses()]
        is_output = value.is_graph_output()
        source = self._guard(value, root)
        rounded = self._pair(source, self.parts.affine(root), source.producer())
        for node, index in readers:
            node.replace_input_with(index, rounded)
        if is_output:
            rounded.name, value.name = root, self._fresh("o")
            rounded.type, rounded.shape = value.type, value.shape
            for i, output in enumerate(self.graph.outputs):
                if output is value:
                    self.graph.outputs[i] = rounded

    def _pair(self, value: ir.Value, affine: Affine, after: ir.Node | None) -> ir.Value:
        """Q and DQ behind `value`; returns the rounded value. A float layer in front is guarded."""
        source = value if after is not None else self._guard(value, value.name or "")
        scale = self._shared_constant("s", np.asarray(affine.scale, np.float32))
        zero = self._shared_constant("z", np.asarray(affine.zero_point, affine.dtype))
        quantize = ir.node("QuantizeLinear", [source, scale, zero], name=self._fresh("Q"))
        quantize.outputs[0].name = self._fresh("q")
        dequantize = ir.node("DequantizeLinear", [quantize.outputs[0], scale, zero], name=self._fresh("D"))
        dequantize.outputs[0].name = self._fresh("d")
        producer = source.producer()
        if producer is not None:
            self.graph.insert_after(producer, [quantize, dequantize])
        else:
            self.graph.insert_before(self.graph.node(0), [quantize, dequantize])
        return dequantize.outputs[0]

    def _guard(self, value: ir.Value, name: str) -> ir.Value:
        """A one-input Sum behind a layer that stays float and that onnxruntime would otherwise quantize at load.

        Needed for Conv, ConvTranspose, Gemm and MatMul with constant weights (RUNTIME.md section 1 lists what was
        tried and does not hold); a layout op between it and Q does not protect, since Q is moved in front of it.
        """
        root = layout_root(self.parts.graph, name)
        maker = next((x for x in self.parts.structure.layers if x.output == root), None)
        if maker is None or maker.weight is None or self.plan.is_quantized(maker.name):
            return value
        guard = ir.node("Sum", [value], name=self._fresh("G"))
        guard.outputs[0].name = self._fresh("g")
        producer = value.producer()
        assert producer is not None
        self.graph.insert_after(producer, guard)
        return guard.outputs[0]

    def _replace_reads(self, layer: Layer, name: str, value: ir.Value) -> None:
        node = self.nodes[layer.nodes[0]]
        for index, found in enumerate(node.inputs):
            if found is not None and found is self.values[name]:
                node.replace_input_with(index, value)

    # --- constants and names ----------------------------------------------------------------------------------

    def _constant(self, prefix: str, array: np.ndarray) -> ir.Value:
        name = self._fresh(prefix)
        # Not ascontiguousarray: it makes a vector of a scalar, and with [1] for a scale Clip does not fuse.
        tensor = ir.tensor(np.array(array, order="C"), name=name)
        shape = ir.Shape(array.shape)
        value = ir.Value(name=name, const_value=tensor, shape=shape, type=ir.TensorType(tensor.dtype))

        self.graph.register_initializer(value)
        return value

    def _shared_constant(self, prefix: str, array: np.ndarray) -> ir.Value:
        """One initializer for equal scales or zero points."""
        key = (f"{array.dtype.str}{array.shape}", array.tobytes())
        if key not in self.shared:
            self.shared[key] = self._constant(prefix, array)
        return self.shared[key]

    def _fresh(self, prefix: str) -> str:
        while True:
            self.count += 1
            name = f"{prefix}{self.count}"
            if name not in self.taken:
                self.taken.add(name)
                return name

    def _remove_unused_constants(self) -> None:
        outputs = set(map(id, self.graph.outputs))
        for name, value in list(self.graph.initializers.items()):
            if not value.uses() and id(value) not in outputs and not value.is_graph_input():
                del self.graph.initializers[name]


def _forget_inferred_types(model: ir.Model) -> None:
    """Drop shapes of values in between: they cost bytes, and every runtime infers them."""
    kept = {id(value) for value in [*model.graph.inputs, *model.graph.outputs]}
    for node in model.graph:
        for value in node.outputs:
            if id(value) not in kept:
                value.shape = None
                value.type = None


def count_bytes(parts: Ingredients, options: Options, float_bytes: int) -> Costs:
    """What each choice changes in the file, in bytes, scales and zero points and the nodes around them included.

    Names are counted with the length that the writer gives them; constants that several places share count once
    each place, and guards behind float layers are not counted: both are a few bytes a layer.
    """
    layers = {
        layer.name: {scheme: _layer_bytes(parts, layer, scheme) for scheme in options.schemes[layer.name]}
        for layer in parts.structure.quantizable
        if layer.name in options.schemes
    }
    tensors = {tensor.root: _tensor_bytes(parts, tensor) for tensor in parts.structure.tensors}
    return Costs(float_bytes, layers, tensors, {}, {})


_NAME = "w999"


def _layer_bytes(parts: Ingredients, layer: Layer, scheme: str) -> int:
    if layer.weight is None:
        return 0
    made = parts.integers(layer, scheme)
    node = _node_bytes("DequantizeLinear", 3, {"axis": 0} if made.weight.axis not in (None, 1) else {})
    added = _array_bytes(made.weight.values) + _array_bytes(made.weight.scale) + node
    gone = _constant_bytes(parts, layer.weight) + len(layer.weight) - len(_NAME)
    if made.bias is not None and layer.bias is not None:
        added += _array_bytes(made.bias.values) + _array_bytes(made.bias.scale)
        added += _node_bytes("DequantizeLinear", 2, {"axis": 0} if made.bias.scale.ndim else {})
        gone += _constant_bytes(parts, layer.bias) + len(layer.bias) - len(_NAME)
    return added - gone


def _tensor_bytes(parts: Ingredients, tensor: Tensor) -> int:
    pair = _node_bytes("QuantizeLinear", 3, {}) + _node_bytes("DequantizeLinear", 3, {})
    pair += _array_bytes(np.zeros((), np.float32))
    readers = sum(len(parts.graph.readers.get(name, ())) for name in tensor.members[:1])
    return pair - readers * (len(tensor.root) - len(_NAME))


def _array_bytes(array: np.ndarray) -> int:
    return _framed(onnx.numpy_helper.from_array(array, _NAME).ByteSize())


def _constant_bytes(parts: Ingredients, name: str) -> int:
    tensor = parts.graph.model.graph.initializers[name].const_value
    assert tensor is not None
    head = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())
    return _framed(head.ByteSize() + _framed(int(tensor.nbytes)))


def _node_bytes(op_type: str, num_inputs: int, attributes: dict[str, int]) -> int:
    node = onnx.helper.make_node(op_type, [_NAME] * num_inputs, [_NAME], name=_NAME)
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in attributes.items())
    return _framed(node.ByteSize())


def _framed(size: int) -> int:
    """With protobuf's tag and length in front."""
    return size + 1 + max(1, -(-size.bit_length() // 7))
