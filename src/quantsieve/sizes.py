"""What choices change in a file of integer operators, from what they change in one of Q/DQ pairs.

Where both sides of a pair are operators its two nodes go; an operator has the scales and zero points for inputs.
Counted as if all neighbours were operators, so a plan that leaves some of them float is a few bytes larger.
"""

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quantsieve.model.execute import OWN_RANGE
from quantsieve.model.units import Layer
from quantsieve.operators import MICROSOFT
from quantsieve.plan import Options
from quantsieve.schemes._affine import QuantizedBias
from quantsieve.schemes._formats import SYMMETRIC, integer_type
from quantsieve.search.prices import Costs
from quantsieve.weights import Ingredients
from quantsieve.writing import NAME, array_bytes, framed, node_bytes

_PAIR = node_bytes("QuantizeLinear", 3, {}) + node_bytes("DequantizeLinear", 3, {})
# By operator: the integer one, its domain, and how many inputs it has more.
_OPERATORS = {
    "Conv": ("QLinearConv", "", 6),
    "Gemm": ("QGemm", MICROSOFT, 4),
    "MatMul": ("MatMulIntegerToFloat", MICROSOFT, 4),
    "Add": ("QLinearAdd", MICROSOFT, 6),
    "Mul": ("QLinearMul", MICROSOFT, 6),
    "Concat": ("QLinearConcat", MICROSOFT, 6),
    "AveragePool": ("QLinearAveragePool", MICROSOFT, 4),
    "GlobalAveragePool": ("QLinearGlobalAveragePool", MICROSOFT, 4),
    "LeakyRelu": ("QLinearLeakyRelu", MICROSOFT, 4),
    "Sigmoid": ("QLinearSigmoid", MICROSOFT, 4),
}


def operator_costs(parts: Ingredients, options: Options, costs: Costs) -> Costs:
    """The costs in the form `operators.as_operators` gives files. costs: of the same plans in Q/DQ pairs."""
    named = {layer.name: layer for layer in parts.structure.quantizable}
    layers = {
        name: {scheme: found + _layer_change(parts, named[name], scheme) for scheme, found in own.items()}
        for name, own in costs.layer_bytes.items()
    }
    made = {layer.output: layer for layer in parts.structure.quantizable if layer.op_type in _OPERATORS}
    tensors = {}
    for tensor, found in costs.tensor_bytes.items():
        is_integer = _is_8_bit(tensor.form)
        gone = (_PAIR if tensor.root in made else node_bytes("DequantizeLinear", 3, {})) if is_integer else 0
        tensors[tensor] = found - gone
    return replace(costs, layer_bytes=layers, tensor_bytes=tensors)


def _is_8_bit(form: str | None) -> bool:
    return form not in (None, *OWN_RANGE) and np.dtype(integer_type(str(form))).itemsize == 1


def _layer_change(parts: Ingredients, layer: Layer, scheme: str) -> int:
    form = parts.schemes[scheme].activation
    if not _is_8_bit(form) or layer.op_type not in _OPERATORS:
        return 0
    name, domain, inputs = _OPERATORS[layer.op_type]
    change = len(name) - len(layer.op_type) + inputs * (len(NAME) + 2) + (framed(len(domain)) if domain else 0)
    last = parts.graph.by_name[layer.nodes[-1]]
    if len(layer.nodes) > 1 and last.op_type in ("Relu", "Clip") and not str(form).endswith(SYMMETRIC):
        change -= framed(ir.to_proto(last).ByteSize())
    if layer.weight is None:
        return change
    made = parts.integers(layer, scheme)
    change -= node_bytes("DequantizeLinear", 3, {"axis": 0} if made.weight.axis == 0 else {})
    if isinstance(made.bias, QuantizedBias):
        change -= node_bytes("DequantizeLinear", 2, {"axis": 0} if made.bias.scale.ndim else {})
        change -= array_bytes(made.bias.scale)
    return change
