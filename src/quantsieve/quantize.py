"""A plan becomes a QDQ model that computes what was planned, with default session options, at every level.

Three habits of onnxruntime are written against (measured, 1.32): a layer kept float between DQ and Q is quantized at
load unless a one-input Sum stands behind it; a convolution fuses into an integer kernel only when Q/DQ stand behind its
activation; a DQ in front of a layout op is only carried to the kernel when a pair with the same parameters follows.
Names of inputs, outputs, kept nodes and weights stay; new names are short, since small models pay for every byte.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quantsieve.calibrate import Calibration
from quantsieve.model.execute import Affine, Executor
from quantsieve.model.graph import Graph
from quantsieve.model.units import Layer, Structure, layout_root
from quantsieve.plan import FLOAT, Placement, Plan, place
from quantsieve.schemes import Scheme
from quantsieve.schemes._affine import QuantizedLayer
from quantsieve.weights import Corrections, constants, integers

VERSION = 1
WEIGHT_TYPES = ("s8", "u8")


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What a plan is written or simulated with: the prepared model and the facts about it."""

    graph: Graph
    structure: Structure
    calibration: Calibration
    corrections: Corrections
    schemes: Mapping[str, Scheme]
    weight_type: str = "s8"  # 's8' or 'u8': the same numbers, in the type that the target multiplies exactly

    def affine(self, root: str) -> Affine:
        form = next(iter(self.schemes.values())).activation
        return self.calibration.ranges[root].affine(form)

    def integers(self, layer: Layer, scheme: str) -> QuantizedLayer:
        return integers(self.graph, layer, self.schemes[scheme], self.calibration, self.corrections)


def simulate(executor: Executor, parts: Ingredients, plan: Plan, feeds: Mapping[str, np.ndarray]) -> dict:
    """Outputs of the plan in float arithmetic with fake quantization, as OrtValues by name; feeds: one batch."""
    placement = place(parts.graph, parts.structure, plan)
    weights = {}
    for layer in parts.structure.quantizable:
        if plan.is_quantized(layer.name) and layer.weight is not None:
            made = parts.integers(layer, plan.scheme(layer.name))
            bias = made.bias.dequantized() if made.bias is not None else constants(parts.graph, layer)[1]
            weights[layer.name] = (made.weight.dequantized(), bias)
    outputs = {root: parts.affine(root) for root in placement.outputs}
    reads = {
        layer: {name: parts.affine(root) for name, root in pairs} for layer, pairs in placement.reads.items()
    }
    return executor.simulate(feeds, weights, outputs, reads)


def write_plan(parts: Ingredients, plan: Plan) -> ir.Model:
    """A new model with the plan's layers quantized; the prepared model is not touched.

    A plan without quantized layers gives a model with the prepared model's nodes and weights, bit for bit.
    """
    model = ir.from_proto(ir.to_proto(parts.graph.model))
    if any(plan.is_quantized(layer.name) for layer in parts.structure.quantizable):
        _Writer(model, parts, plan, place(parts.graph, parts.structure, plan)).write()
    _forget_inferred_types(model)
    return model


class _Writer:
    """Edits one model; lives for one call."""

    def __init__(self, model: ir.Model, parts: Ingredients, plan: Plan, placement: Placement):
        self.graph = model.graph
        self.parts = parts
        self.plan = plan
        self.placement = placement
        self.values = {v.name: v for node in model.graph for v in node.outputs if v.name}
        self.values |= {v.name: v for v in [*model.graph.inputs, *model.graph.initializers.values()]}
        self.nodes = {node.name: node for node in model.graph}
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
        value = ir.Value(name=name, const_value=ir.tensor(np.ascontiguousarray(array), name=name))
        value.shape, value.dtype = value.const_value.shape, value.const_value.dtype  # type: ignore[union-attr]
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


def float_layers(structure: Structure, plan: Plan) -> tuple[Layer, ...]:
    """Layers that the plan keeps float although they could be quantized."""
    return tuple(layer for layer in structure.quantizable if plan.scheme(layer.name) == FLOAT)
