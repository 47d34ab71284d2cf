"""A plan becomes a QDQ model that computes what was planned, with default session options, at every level.

Three habits of onnxruntime are written against (measured, 1.32): a layer kept float between DQ and Q is quantized at
load unless a one-input Sum stands behind it; a convolution fuses into an integer kernel only when Q/DQ stand behind its
activation; a DQ in front of a layout op is only carried to the kernel when a pair with the same parameters follows.
Names of inputs, outputs, kept nodes and weights stay; new names are short, since small models pay for every byte.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx

from quantsieve.model.execute import BLOCKS, DYNAMIC, Affine
from quantsieve.model.units import Layer, Tensor, layout_root
from quantsieve.plan import Options, Placement, Plan, Read, Rounded, place
from quantsieve.schemes._affine import BlockedWeight, QuantizedBias, QuantizedLayer, QuantizedWeight, along_axis
from quantsieve.schemes._formats import SYMMETRIC, integer_type
from quantsieve.search.prices import Costs
from quantsieve.weights import Ingredients

VERSION = 3
MICROSOFT = "com.microsoft"
FAST_LEVEL = 4  # of MatMulNBits: activations in 8 bits, blocks multiplied as integers
OPSET_OF_16_BIT = 21  # from which ONNX's own QuantizeLinear takes 16 bits; onnxruntime's takes them at every opset

FLOAT_PLAN = Plan({})


def write_plan(parts: Ingredients, plan: Plan) -> onnx.ModelProto:
    """A new model with the plan's layers quantized; the prepared model is not touched.

    A plan without quantized layers gives a model with the prepared model's nodes and weights, bit for bit.
    """
    model = onnx.ModelProto()
    model.CopyFrom(parts.graph.skeleton)
    if any(plan.is_quantized(layer.name) for layer in parts.structure.quantizable):
        _Writer(model.graph, parts, plan, place(parts.graph, parts.structure, plan, parts.schemes)).write()
        used = {node.domain for node in model.graph.node}
        if MICROSOFT in used and all(opset.domain != MICROSOFT for opset in model.opset_import):
            model.opset_import.add(domain=MICROSOFT, version=1)
    else:
        model.graph.initializer.extend(map(parts.graph.constant_proto, parts.graph.constants))
    return model


class _Writer:
    """Edits one graph without initializers, and adds them; lives for one call."""

    def __init__(self, graph: onnx.GraphProto, parts: Ingredients, plan: Plan, placement: Placement):
        self.graph = graph
        self.parts = parts
        self.plan = plan
        self.placement = placement
        self.before: dict[str, list[onnx.NodeProto]] = {}  # new nodes, by the node that they stand in front of
        self.after: dict[str, list[onnx.NodeProto]] = {}
        self.first: list[onnx.NodeProto] = []
        self.nodes = {node.name: node for node in graph.node}
        self.producers = {name: node.name for node in graph.node for name in node.output}
        self.readers = _readers(graph.node)
        self.constants: list[onnx.TensorProto] = []
        self.shared: dict[tuple[str, bytes], str] = {}
        self.dynamic: dict[str, onnx.NodeProto] = {}  # by value, what rounds it in its own range
        values = {value.name for value in graph.input} | set(self.producers) | set(parts.graph.constants)
        self.taken = {name for name in values | set(self.nodes) if name}
        self.count = 0

    def write(self) -> None:
        quantized = [x for x in self.parts.structure.quantizable if self.plan.is_quantized(x.name)]
        for layer in quantized:
            if layer.weight is not None and not self._is_dynamic(layer):
                self._write_weights(layer)
        now = {root: self._round_output(root, form) for root, form in self.placement.outputs.items()}
        made: dict[Read, str] = {}
        for layer in quantized:
            for read in (*self.placement.reads.get(layer.name, ()), *self._repeated(layer)):
                if read.form == BLOCKS:  # the kernel itself does it
                    continue
                source = now.get(read.name, read.name)
                if self._is_dynamic(layer):
                    self._write_dynamic(layer, read, source)
                    continue
                if read not in made:
                    made[read] = self._round_read(read, source)
                _rename_input(self.nodes[layer.nodes[0]], source, made[read])
        self._put_together()

    def _repeated(self, layer: Layer) -> Iterator[Read]:
        """What the layer reads rounded behind layout ops: there the pair is repeated, so that the kernel finds it."""
        form = self.parts.schemes[self.plan.scheme(layer.name)].activation
        for name in layer.inputs:
            root = layout_root(self.parts.graph, name)
            if form is not None and name != root and self.placement.outputs.get(root) == form:
                yield Read(name, root, form)

    # --- parts of the edit ------------------------------------------------------------------------------------

    def _write_weights(self, layer: Layer) -> None:
        made = self.parts.integers(layer, self.plan.scheme(layer.name))
        node = self.nodes[layer.nodes[0]]
        weight = made.weight
        is_corrected = self.parts.corrections.shift(self.plan.scheme(layer.name), layer.name) is not None
        if isinstance(weight, BlockedWeight):
            return self._write_blocks(layer, node, made)
        if layer.is_lookup:
            self._look_up(node, weight)
        elif _is_folded(self.parts, layer, self.plan.scheme(layer.name)):
            self._multiply(node, weight)
        else:
            ints, zero = weight.stored(self.parts.weight_type == "u8")
            self._dequantize(node, 1, ints, weight.scale, zero, weight.axis)
        if isinstance(made.bias, QuantizedBias):
            axis = 0 if made.bias.scale.ndim else None
            self._dequantize(node, 2, made.bias.values, made.bias.scale, None, axis)
        elif made.bias is not None and is_corrected:
            node.input[2] = self._constant("b", made.bias)

    def _dequantize(
        self,
        node: onnx.NodeProto,
        index: int,
        ints: np.ndarray,
        scale: np.ndarray,
        zero_point: np.ndarray | None,
        axis: int | None,
    ) -> None:
        inputs = [self._constant("w", ints), self._shared_constant("s", scale)]
        if zero_point is not None:
            inputs.append(self._shared_constant("z", zero_point))
        made = self._node("DequantizeLinear", inputs, "D")
        if axis not in (None, 1):  # 1 is the default
            made.attribute.append(onnx.helper.make_attribute("axis", axis))
        self.before.setdefault(node.name, []).append(made)
        node.input[index] = made.output[0]

    def _is_dynamic(self, layer: Layer) -> bool:
        return self.parts.schemes[self.plan.scheme(layer.name)].activation == DYNAMIC

    def _write_dynamic(self, layer: Layer, read: Read, source: str) -> None:
        """The layer's main node as MatMulInteger on what DynamicQuantizeLinear makes of `source`, then Cast, and Mul by
        both scales: the pattern of which onnxruntime makes one kernel."""
        if source not in self.dynamic:
            rounding = self._node("DynamicQuantizeLinear", [source], "Q")
            rounding.output.extend([self._fresh("s"), self._fresh("z")])
            producer = self.producers.get(read.name)
            (self.first if producer is None else self.after.setdefault(producer, [])).append(rounding)
            self.dynamic[source] = rounding
        values, scale, zero_point = self.dynamic[source].output
        node, made = self.nodes[layer.nodes[0]], self.parts.integers(layer, self.plan.scheme(layer.name))
        assert isinstance(made.weight, QuantizedWeight)
        ints, zeros = made.weight.stored(self.parts.weight_type == "u8")
        ints = ints.T if made.weight.axis == 0 else ints  # [read, made]
        zero = self._shared_constant("z", zeros.reshape(-1)[0])  # symmetric: the same for all
        result, bias = self._split_bias(layer, node, made)
        node.op_type = "MatMulInteger"
        del node.attribute[:]
        node.input[:] = [values, self._constant("w", np.ascontiguousarray(ints)), zero_point, zero]
        cast = self._node("Cast", [node.output[0]], "C")
        cast.attribute.append(onnx.helper.make_attribute("to", onnx.TensorProto.FLOAT))
        scales = self._node("Mul", [scale, self._shared_constant("s", made.weight.scale)], "M")
        product = self._node("Mul", [cast.output[0], scales.output[0]], "M", "" if bias else result)
        added = [self._node("Add", [product.output[0], bias], "A", result)] if bias else []
        self.after[node.name] = [cast, scales, product, *added, *self.after.get(node.name, ())]

    def _split_bias(self, layer: Layer, node: onnx.NodeProto, made: QuantizedLayer) -> tuple[str, str]:
        """(name of what the layer's main node is to make, name of the bias that is to be added behind it or ''), for a
        node that will make something new without it."""
        bias = node.input[2] if len(node.input) > 2 else ""
        if bias and self.parts.corrections.shift(self.plan.scheme(layer.name), layer.name) is not None:
            assert isinstance(made.bias, np.ndarray)
            bias = self._constant("b", made.bias)
        result, node.output[0] = node.output[0], self._fresh("i")
        return result, bias

    def _write_blocks(self, layer: Layer, node: onnx.NodeProto, made: QuantizedLayer) -> None:
        """The layer's main node as MatMulNBits, which reads and makes floats."""
        weight = made.weight
        assert isinstance(weight, BlockedWeight)
        result, bias = self._split_bias(layer, node, made)
        if not bias:
            node.output[0] = result
        node.op_type, node.domain = "MatMulNBits", MICROSOFT
        del node.attribute[:]
        node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in _blocks(weight).items())
        packed, scales = self._constant("w", weight.packed()), self._constant("s", weight.scale.reshape(-1))
        node.input[:] = [node.input[0], packed, scales]
        if bias:
            self.after[node.name] = [
                self._node("Add", [node.output[0], bias], "A", result),
                *self.after.get(node.name, ()),
            ]

    def _multiply(self, node: onnx.NodeProto, weight: QuantizedWeight) -> None:
        """Cast and Mul in front of the weight: a target folds them when it loads the file, as it never does a DQ."""
        cast = self._node("Cast", [self._constant("w", weight.values)], "C")
        cast.attribute.append(onnx.helper.make_attribute("to", onnx.TensorProto.FLOAT))
        scale = along_axis(weight.scale, weight.axis, weight.values.ndim)
        product = self._node("Mul", [cast.output[0], self._shared_constant("s", scale)], "M")
        self.before.setdefault(node.name, []).extend([cast, product])
        node.input[1] = product.output[0]

    def _look_up(self, node: onnx.NodeProto, weight: QuantizedWeight) -> None:
        """Rows of integers, and behind them Cast and Mul with the scales of the rows, looked up alike."""
        made, node.output[0] = node.output[0], self._fresh("i")
        node.input[0] = self._constant("w", weight.values)
        cast = self._node("Cast", [node.output[0]], "C")
        cast.attribute.append(onnx.helper.make_attribute("to", onnx.TensorProto.FLOAT))
        scales = self._node("Gather", [self._constant("s", weight.scale[:, None]), node.input[1]], "L")
        product = self._node("Mul", [cast.output[0], scales.output[0]], "M", made)
        self.after.setdefault(node.name, []).extend([cast, scales, product])

    def _round_output(self, root: str, form: str) -> str:
        """Round a value for all who read it, the world included; the name of what they read then. Its layer is
        quantized and needs no guard, unless its weights are floats once the file is loaded."""
        producer, affine = self.producers[root], self.parts.affine(root, form)
        maker = next(layer for layer in self.parts.structure.quantizable if producer in layer.nodes)
        is_float = maker.is_product and _is_folded(self.parts, maker, self.plan.scheme(maker.name))
        if _has_pair_inside(self.parts, maker, form):
            activation = self.nodes[maker.nodes[-1]]
            inside = self._pair(activation.input[0], affine)
            self.before.setdefault(activation.name, []).extend(inside)
            activation.input[0] = inside[-1].output[0]
        if root in self.parts.graph.output_names:  # the rounded value takes the name
            source = self._fresh("o")
            outputs = self.nodes[producer].output
            outputs[list(outputs).index(root)] = source
            guard = [self._node("Sum", [source], "G")] if is_float else []
            made = [*guard, *self._pair(guard[0].output[0] if guard else source, affine, root)]
        else:
            guard = [self._node("Sum", [root], "G")] if is_float else []
            made = [*guard, *self._pair(guard[0].output[0] if guard else root, affine)]
            for node in self.readers.get(root, ()):
                _rename_input(node, root, made[-1].output[0])
        self.after.setdefault(producer, []).extend(made)
        return made[-1].output[0]

    def _round_read(self, read: Read, source: str) -> str:
        """Round a value for some of its readers; the name of what they read then. source: what holds it now."""
        producer = self.producers.get(read.name)
        made = [self._node("Sum", [source], "G")] if self._is_guarded(read) else []
        made += self._pair(made[0].output[0] if made else source, self.parts.affine(read.root, read.form))
        (self.first if producer is None else self.after.setdefault(producer, [])).extend(made)
        return made[-1].output[0]

    def _pair(self, source: str, affine: Affine, rounded: str = "") -> list[onnx.NodeProto]:
        """Q and DQ behind `source`; the name of what they make is new unless it is given."""
        scale = self._shared_constant("s", np.asarray(affine.scale, np.float32))
        zero = self._shared_constant("z", np.asarray(affine.zero_point, affine.dtype))
        quantize = self._node("QuantizeLinear", [source, scale, zero], "Q")
        made = [quantize, self._node("DequantizeLinear", [quantize.output[0], scale, zero], "D", rounded)]
        if np.dtype(affine.dtype).itemsize > 1 and self.parts.graph.opset < OPSET_OF_16_BIT:
            for node in made:
                node.domain = MICROSOFT
        return made

    def _is_guarded(self, read: Read) -> bool:
        """Whether a one-input Sum is needed behind the value: behind a layer that runs in float and that onnxruntime
        would otherwise quantize at load, and behind a pair of another format, which it would merge with this one.

        That is Conv, ConvTranspose, Gemm and MatMul with constant weights (RUNTIME.md section 1 lists what was
        tried and does not hold); a layout op between it and Q does not protect, since Q is moved in front of it.
        """
        form = self.placement.outputs.get(read.root)
        if form is not None:
            return form != read.form
        maker = next((x for x in self.parts.structure.layers if x.output == read.root), None)
        return maker is not None and maker.is_product

    def _put_together(self) -> None:
        """New nodes among the old ones, and the constants that are still read."""
        nodes = [*self.first]
        for node in self.graph.node:
            nodes += [*self.before.get(node.name, ()), node, *self.after.get(node.name, ())]
        used = {*_readers(nodes), *(value.name for value in [*self.graph.input, *self.graph.output])}
        del self.graph.node[:]
        self.graph.node.extend(nodes)
        source = self.parts.graph
        self.graph.initializer.extend(source.constant_proto(name) for name in source.constants if name in used)
        self.graph.initializer.extend(self.constants)

    # --- nodes, constants and names ---------------------------------------------------------------------------

    def _node(self, op_type: str, inputs: Sequence[str], prefix: str, output: str = "") -> onnx.NodeProto:
        return onnx.NodeProto(
            op_type=op_type, input=inputs, name=self._fresh(prefix), output=[output or self._fresh(prefix.lower())]
        )

    def _constant(self, prefix: str, array: np.ndarray) -> str:
        # A scalar stays one: with [1] for a scale Clip does not fuse.
        self.constants.append(onnx.numpy_helper.from_array(array, self._fresh(prefix)))
        return self.constants[-1].name

    def _shared_constant(self, prefix: str, array: np.ndarray) -> str:
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


def _rename_input(node: onnx.NodeProto, old: str, new: str) -> None:
    for index, name in enumerate(node.input):
        if name == old:
            node.input[index] = new


def _readers(nodes: Iterable[onnx.NodeProto]) -> dict[str, list[onnx.NodeProto]]:
    """The nodes that read each value, those of subgraphs with what they take from outside; [] where only the outputs
    of a subgraph name it."""
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            found.setdefault(name, []).append(node)
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                made = {name for made in inner.node for name in made.output}
                made.update(value.name for value in (*inner.input, *inner.initializer))
                outside = {**{value.name: [] for value in inner.output}, **_readers(inner.node)}
                for name, readers in outside.items():
                    if name not in made:
                        found.setdefault(name, []).extend(readers)
    return found


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
    forms = dict.fromkeys(form for form in options.forms.values() if form is not None)
    tensors = {
        Rounded(tensor.root, form): _tensor_bytes(parts, tensor, form)
        for tensor in parts.structure.tensors
        for form in forms
    }
    return Costs(float_bytes, layers, tensors, {}, {})


NAME = "w999"


def _blocks(weight: BlockedWeight) -> dict[str, int]:
    """Attributes of a MatMulNBits."""
    made, summed = weight.values.shape[1 - weight.axis], weight.values.shape[weight.axis]
    return {"K": summed, "N": made, "bits": weight.bits, "block_size": weight.block, "accuracy_level": FAST_LEVEL}


def _has_pair_inside(parts: Ingredients, layer: Layer, form: str) -> bool:
    """Whether the output of the layer is rounded in front of its Relu or Clip as well: rounded behind it alone, it
    is fused only where the zero point is the least value (1.32: 4.5 times as slow otherwise). No number changes: where
    zero is exact, rounding and cutting off what is negative or above a limit can change places."""
    last = parts.graph.by_name[layer.nodes[-1]].op_type
    return len(layer.nodes) > 1 and last in ("Relu", "Clip") and form.endswith(SYMMETRIC)


def _is_folded(parts: Ingredients, layer: Layer, scheme: str) -> bool:
    """Whether the layer's weights are to be floats once the file is loaded: weights alone, since a convolution runs
    three times as long on weights that are no constants (1.32); and those of a MatMul or Gemm in float, since
    onnxruntime would make a MatMulNBits of it, which rounds what it reads to 8 bits."""
    form = parts.schemes[scheme].activation
    return form is None or (form == "uint16" and layer.op_type in ("MatMul", "Gemm"))


def _layer_bytes(parts: Ingredients, layer: Layer, scheme: str) -> int:
    if layer.weight is None:
        return 0
    made = parts.integers(layer, scheme)
    scale = made.weight.scale
    if isinstance(made.weight, BlockedWeight):
        node = node_bytes("MatMulNBits", 3, _blocks(made.weight)) + framed(len(MICROSOFT))
        node += (node_bytes("Add", 2, {}) if layer.bias is not None else 0) - node_bytes(layer.op_type, 2, {})
        gone = _constant_bytes(parts, layer.weight) + len(layer.weight) - len(NAME)
        return node + array_bytes(made.weight.packed()) + array_bytes(scale.reshape(-1)) - gone
    if parts.schemes[scheme].activation == DYNAMIC:
        node = node_bytes("MatMulInteger", 4, {}) - node_bytes(layer.op_type, 2, {})
        node += node_bytes("Cast", 1, {"to": 1}) + 2 * node_bytes("Mul", 2, {})
        node += node_bytes("Add", 2, {}) if layer.bias is not None else 0
    elif layer.is_lookup:
        scale = scale[:, None]
        node = node_bytes("Cast", 1, {"to": 1}) + node_bytes("Gather", 2, {}) + node_bytes("Mul", 2, {})
    elif _is_folded(parts, layer, scheme):
        scale = along_axis(scale, made.weight.axis, made.weight.values.ndim)
        node = node_bytes("Cast", 1, {"to": 1}) + node_bytes("Mul", 2, {})
    else:
        node = node_bytes("DequantizeLinear", 3, {"axis": 0} if made.weight.axis not in (None, 1) else {})
    added = array_bytes(made.weight.values) + array_bytes(scale) + node
    if made.weight.zero_point is not None:
        added += array_bytes(made.weight.zero_point)
    gone = _constant_bytes(parts, layer.weight) + len(layer.weight) - len(NAME)
    if isinstance(made.bias, QuantizedBias) and layer.bias is not None:
        added += array_bytes(made.bias.values) + array_bytes(made.bias.scale)
        added += node_bytes("DequantizeLinear", 2, {"axis": 0} if made.bias.scale.ndim else {})
        gone += _constant_bytes(parts, layer.bias) + len(layer.bias) - len(NAME)
    return added - gone


def _tensor_bytes(parts: Ingredients, tensor: Tensor, form: str) -> int:
    if form == BLOCKS:
        return 0
    if form == DYNAMIC:
        return node_bytes("DynamicQuantizeLinear", 1, {}) + 2 * (len(NAME) + 2)
    pair = node_bytes("QuantizeLinear", 3, {}) + node_bytes("DequantizeLinear", 3, {})
    if np.dtype(integer_type(form)).itemsize > 1 and parts.graph.opset < OPSET_OF_16_BIT:
        pair += 2 * framed(len(MICROSOFT))
    pair += array_bytes(np.zeros((), np.float32))
    maker = next((x for x in parts.structure.layers if x.name == tensor.producer and x.output == tensor.root), None)
    if maker is not None and _has_pair_inside(parts, maker, form):
        pair += node_bytes("QuantizeLinear", 3, {}) + node_bytes("DequantizeLinear", 3, {})
    readers = sum(len(parts.graph.readers.get(name, ())) for name in tensor.members[:1])
    return pair - readers * (len(tensor.root) - len(NAME))


def array_bytes(array: np.ndarray) -> int:
    """Of an initializer in a file."""
    return framed(onnx.numpy_helper.from_array(array, NAME).ByteSize())


def _constant_bytes(parts: Ingredients, name: str) -> int:
    tensor = parts.graph.model.graph.initializers[name].const_value
    assert tensor is not None
    head = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())
    return framed(head.ByteSize() + framed(int(tensor.nbytes)))


def node_bytes(op_type: str, num_inputs: int, attributes: dict[str, int]) -> int:
    """Of a node with one output in a file."""
    node = onnx.helper.make_node(op_type, [NAME] * num_inputs, [NAME], name=NAME)
    node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in attributes.items())
    return framed(node.ByteSize())


def framed(size: int) -> int:
    """With protobuf's tag and length in front."""
    return size + 1 + max(1, -(-size.bit_length() // 7))
