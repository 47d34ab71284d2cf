"""For each operator, what a node adds to the cotangents of its inputs: J^T c, where J is its derivative.

A rule gets the node and the cotangents of its outputs (None where nothing reads one) and gives those of its inputs by
position, shaped as the inputs. It may give cotangents that nobody asked for; they are dropped.
"""

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from quantsieve.sensitivity._backward import Builder, Cotangents, Node, NoGradient
from quantsieve.sensitivity._windows import average_pool, conv, conv_transpose, global_pool, ints, max_pool, resize

Rule = Callable[[Builder, Node, Cotangents], dict[int, str]]


# --- one operand, element by element --------------------------------------------------------------------------------


def _pointwise(slope: Callable[[Builder, Node], str]) -> Rule:
    """slope: the derivative at every element."""
    return lambda b, node, c: {0: b.op("Mul", c[0] or "", slope(b, node))}


def _mask(b: Builder, condition: str) -> str:
    return b.op("Cast", condition, to=TensorProto.FLOAT)


def _relu(b: Builder, node: Node) -> str:
    return b.op("Sign", b.value(node.outputs[0]))


def _clip(b: Builder, node: Node) -> str:
    """1 where the value passed: there input and output are equal, and strictly between the limits."""
    y = b.value(node.outputs[0])
    inside = None
    for index, name, op_type in ((1, "min", "Greater"), (2, "max", "Less")):
        limit = b.value(node.inputs[index]) if len(node.inputs) > index and node.inputs[index] else None
        if limit is None and node.get(name) is not None:
            limit = b.number(float(node.get(name)))
        if limit is not None:
            one = b.op(op_type, y, limit)
            inside = one if inside is None else b.op("And", inside, one)
    return b.array(np.ones((), np.float32)) if inside is None else _mask(b, inside)


def _leaky(b: Builder, node: Node) -> str:
    slope = b.number(float(node.get("alpha", 0.01)))
    return b.op("Where", b.op("Greater", b.value(node.inputs[0]), b.number(0)), b.number(1), slope)


def _elu(b: Builder, node: Node) -> str:
    """exp(x) alpha below 0, which is y + alpha."""
    y, alpha = b.value(node.outputs[0]), b.number(float(node.get("alpha", 1.0)))
    return b.op("Where", b.op("Greater", y, b.number(0)), b.number(1), b.op("Add", y, alpha))


def _sigmoid_slope(b: Builder, y: str) -> str:
    return b.op("Mul", y, b.op("Sub", b.number(1), y))


def _tanh(b: Builder, node: Node) -> str:
    y = b.value(node.outputs[0])
    return b.op("Sub", b.number(1), b.op("Mul", y, y))


def _hard_sigmoid(b: Builder, node: Node) -> str:
    y = b.value(node.outputs[0])
    inside = b.op("And", b.op("Greater", y, b.number(0)), b.op("Less", y, b.number(1)))
    return b.op("Mul", _mask(b, inside), b.number(float(node.get("alpha", 0.2))))


def _hard_swish(b: Builder, node: Node) -> str:
    x = b.value(node.inputs[0])
    line = b.op("Div", b.op("Add", b.op("Mul", x, b.number(2)), b.number(3)), b.number(6))
    upper = b.op("Where", b.op("Less", x, b.number(3)), line, b.number(1))
    return b.op("Where", b.op("Greater", x, b.number(-3)), upper, b.number(0))


def _erf(b: Builder, node: Node) -> str:
    x = b.value(node.inputs[0])
    return b.op("Mul", b.op("Exp", b.op("Neg", b.op("Mul", x, x))), b.number(2 / np.sqrt(np.pi)))


def _gelu(b: Builder, node: Node) -> str:
    """Phi(x) + x phi(x); the tanh form differs from it by less than 1e-3."""
    x = b.value(node.inputs[0])
    half = b.op("Mul", b.op("Add", b.op("Erf", b.op("Mul", x, b.number(np.sqrt(0.5)))), b.number(1)), b.number(0.5))
    bell = b.op("Exp", b.op("Mul", b.op("Mul", x, x), b.number(-0.5)))
    return b.op("Add", half, b.op("Mul", b.op("Mul", x, bell), b.number(1 / np.sqrt(2 * np.pi))))


def _power(b: Builder, node: Node) -> str:
    exponent = b.constant(node, 1)
    if exponent.size != 1:
        raise NoGradient("the operator Pow has an exponent for every element")
    value = float(exponent.reshape(()))
    return b.op("Mul", b.op("Pow", b.value(node.inputs[0]), b.number(value - 1)), b.number(value))


def _of_output(slope: Callable[[Builder, str], str]) -> Rule:
    return _pointwise(lambda b, node: slope(b, b.value(node.outputs[0])))


def _of_input(slope: Callable[[Builder, str], str]) -> Rule:
    return _pointwise(lambda b, node: slope(b, b.value(node.inputs[0])))


def _passed(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    return {0: c[0] or ""}


def _nothing(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    """Of steps: flat wherever they have a slope."""
    return {}


def _prelu(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    below = b.op("Mul", c[0] or "", b.array(b.constant(node, 1)))
    return {0: b.op("Where", b.op("Greater", b.value(node.inputs[0]), b.number(0)), c[0] or "", below)}


# --- two operands ---------------------------------------------------------------------------------------------------


def _combined(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    """Add, Sub, Mul, Div and Sum, whose operands are broadcast."""
    shape, found = b.shape(node.outputs[0]), {}
    for index, name in enumerate(node.inputs):
        if name in b.wanted:
            found[index] = b.summed(_operand(b, node, c[0] or "", index), shape, b.shape(name))
    return found


def _operand(b: Builder, node: Node, cotangent: str, index: int) -> str:
    if node.op_type == "Mul":
        return b.op("Mul", cotangent, b.value(node.inputs[1 - index]))
    if node.op_type == "Sub":
        return b.op("Neg", cotangent) if index else cotangent
    if node.op_type == "Div":
        share = b.op("Div", cotangent, b.value(node.inputs[1]))
        return b.op("Neg", b.op("Mul", share, b.value(node.outputs[0]))) if index else share
    return cotangent


def _where(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    condition, zero, shape = b.value(node.inputs[0]), b.number(0), b.shape(node.outputs[0])
    sides = {1: b.op("Where", condition, c[0] or "", zero), 2: b.op("Where", condition, zero, c[0] or "")}
    return {index: b.summed(side, shape, b.shape(node.inputs[index])) for index, side in sides.items()}


def _gemm(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    turned_a, turned_b = int(node.get("transA", 0)), int(node.get("transB", 0))
    alpha = {"alpha": float(node.get("alpha", 1.0))}
    left, right, found = node.inputs[0], node.inputs[1], {}
    d = c[0] or ""
    if left in b.wanted:
        value = b.value(right)
        found[0] = (
            b.op("Gemm", value, d, transA=turned_b, transB=1, **alpha)
            if turned_a
            else b.op("Gemm", d, value, transB=1 - turned_b, **alpha)
        )
    if right in b.wanted:
        value = b.value(left)
        found[1] = (
            b.op("Gemm", d, value, transA=1, transB=turned_a, **alpha)
            if turned_b
            else b.op("Gemm", value, d, transA=1 - turned_a, **alpha)
        )
    if len(node.inputs) > 2 and node.inputs[2] in b.wanted:
        scaled = b.op("Mul", d, b.number(float(node.get("beta", 1.0))))
        found[2] = b.summed(scaled, b.shape(node.outputs[0]), b.shape(node.inputs[2]))
    return found


def _matmul(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    left, right = node.inputs
    shapes = [b.shape(left), b.shape(right)]
    if min(map(len, shapes)) < 2:
        raise NoGradient("the operator MatMul reads a vector")
    lead = b.shape(node.outputs[0])[:-2]
    found = {}
    if left in b.wanted:
        product = b.op("MatMul", c[0] or "", _turned(b, right))
        found[0] = b.summed(product, (*lead, *shapes[0][-2:]), shapes[0])
    if right in b.wanted:
        product = b.op("MatMul", _turned(b, left), c[0] or "")
        found[1] = b.summed(product, (*lead, *shapes[1][-2:]), shapes[1])
    return found


def _turned(b: Builder, name: str) -> str:
    constant = b.graph.constant(name)
    if constant is not None:
        return b.array(np.swapaxes(constant, -1, -2))
    rank = len(b.shape(name))
    return b.op("Transpose", b.value(name), perm=[*range(rank - 2), rank - 1, rank - 2])


# --- sums and norms -------------------------------------------------------------------------------------------------


def _reduced(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    """ReduceMean and ReduceSum."""
    shape = b.shape(node.inputs[0])
    given = node.get("axes")
    if given is None and len(node.inputs) > 1 and node.inputs[1]:
        given = b.constant(node, 1).reshape(-1).tolist()
    if not given and node.get("noop_with_empty_axes", 0):
        return {0: c[0] or ""}
    axes = {axis % len(shape) for axis in given} if given else set(range(len(shape)))
    kept = b.op("Reshape", c[0] or "", b.ints(*(1 if a in axes else size for a, size in enumerate(shape))))
    if node.op_type == "ReduceMean":
        kept = b.op("Div", kept, b.number(float(np.prod([shape[a] for a in axes]))))
    return {0: b.op("Expand", kept, b.ints(*shape))}


def _softmax(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    """y (c - sum y c); for its logarithm c - exp(y) sum c."""
    y, axis = b.value(node.outputs[0]), b.ints(int(node.get("axis", -1)))
    if node.op_type == "LogSoftmax":
        total = b.op("ReduceSum", c[0] or "", axis, keepdims=1)
        return {0: b.op("Sub", c[0] or "", b.op("Mul", b.op("Exp", y), total))}
    total = b.op("ReduceSum", b.op("Mul", y, c[0] or ""), axis, keepdims=1)
    return {0: b.op("Mul", y, b.op("Sub", c[0] or "", total))}


def _layer_norm(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    """With n = (x - mean) / deviation and g = c scale: (g - mean g - n mean(g n)) / deviation."""
    x, rank = b.value(node.inputs[0]), len(b.shape(node.inputs[0]))
    first = int(node.get("axis", -1)) % rank
    axes = b.ints(*range(first, rank))

    def mean(name: str) -> str:
        return b.op("ReduceMean", name, axes, keepdims=1)

    centred = b.op("Sub", x, mean(x))
    spread = b.op("Add", mean(b.op("Mul", centred, centred)), b.number(float(node.get("epsilon", 1e-5))))
    deviation = b.op("Sqrt", spread)
    normal, scaled = b.op("Div", centred, deviation), b.op("Mul", c[0] or "", b.array(b.constant(node, 1)))
    rest = b.op("Sub", b.op("Sub", scaled, mean(scaled)), b.op("Mul", normal, mean(b.op("Mul", scaled, normal))))
    return {0: b.op("Div", rest, deviation)}


def _batch_norm(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    scale, variance = b.constant(node, 1), b.constant(node, 4)
    slope = scale / np.sqrt(variance + float(node.get("epsilon", 1e-5)))
    rank = len(b.shape(node.inputs[0]))
    return {0: b.op("Mul", c[0] or "", b.array(slope.reshape(-1, *[1] * (rank - 2)).astype(np.float32)))}


# --- the same numbers elsewhere -------------------------------------------------------------------------------------


def _reshaped(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    return {0: b.op("Reshape", c[0] or "", b.ints(*b.shape(node.inputs[0])))}


def _transposed(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    rank = len(b.shape(node.inputs[0]))
    perm = ints(node, "perm", 0, 0) or list(range(rank))[::-1]
    return {0: b.op("Transpose", c[0] or "", perm=np.argsort(perm).tolist())}


def _expanded(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    return {0: b.summed(c[0] or "", b.shape(node.outputs[0]), b.shape(node.inputs[0]))}


def _concat(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    axis = int(node.get("axis"))
    found, start = {}, 0
    for index, name in enumerate(node.inputs):
        end = start + b.shape(name)[axis]
        if name in b.wanted:
            found[index] = b.op("Slice", c[0] or "", b.ints(start), b.ints(end), b.ints(axis))
        start = end
    return found


def _split(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    parts = [
        part or b.op("Expand", b.number(0), b.ints(*b.shape(name))) for part, name in zip(c, node.outputs, strict=True)
    ]
    return {0: b.op("Concat", *parts, axis=int(node.get("axis", 0)))}


def _taken(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    """Gather, Slice and other pure choices of elements: each cotangent goes to the place its element came from,
    which the operator itself finds from the numbers of all places."""
    shape, made = b.shape(node.inputs[0]), b.shape(node.outputs[0])
    count = int(np.prod(shape))
    numbers = b.array(np.arange(count, dtype=np.int64).reshape(shape))
    places = b.op(
        node.op_type, numbers, *(b.value(name) if name else "" for name in node.inputs[1:]), **node.attributes
    )
    total = b.ints(int(np.prod(made)))
    flat = b.op("Reshape", places, total), b.op("Reshape", c[0] or "", total)
    zeros = b.op("Expand", b.number(0), b.ints(count))
    return {0: b.op("Reshape", b.op("ScatterElements", zeros, *flat, reduction="add"), b.ints(*shape))}


def _padded(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    if node.get("mode", b"constant") != b"constant" or len(node.inputs) > 3:
        raise NoGradient("the operator Pad repeats elements or names its axes")
    pads = [int(p) for p in b.constant(node, 1).reshape(-1)]
    shape = b.shape(node.inputs[0])
    if min(pads) < 0:
        raise NoGradient("the operator Pad cuts off elements")
    starts = pads[: len(shape)]
    ends = [start + size for start, size in zip(starts, shape, strict=True)]
    return {0: b.op("Slice", c[0] or "", b.ints(*starts), b.ints(*ends), b.ints(*range(len(shape))))}


RULES: dict[str, Rule] = {
    "Relu": _pointwise(_relu), "Clip": _pointwise(_clip), "LeakyRelu": _pointwise(_leaky), "Elu": _pointwise(_elu),
    "PRelu": _prelu, "HardSigmoid": _pointwise(_hard_sigmoid), "HardSwish": _pointwise(_hard_swish),
    "Sigmoid": _of_output(_sigmoid_slope), "Tanh": _pointwise(_tanh), "Erf": _pointwise(_erf),
    "Gelu": _pointwise(_gelu), "Pow": _pointwise(_power),
    "Softplus": _of_input(lambda b, x: b.op("Sigmoid", x)), "Exp": _of_output(lambda b, y: y),
    "Log": _of_input(lambda b, x: b.op("Reciprocal", x)), "Abs": _of_input(lambda b, x: b.op("Sign", x)),
    "Sqrt": _of_output(lambda b, y: b.op("Div", b.number(0.5), y)),
    "Reciprocal": _of_output(lambda b, y: b.op("Neg", b.op("Mul", y, y))),
    "Neg": lambda b, node, c: {0: b.op("Neg", c[0] or "")},
    "Identity": _passed, "Dropout": _passed, "Cast": _passed,
    "Floor": _nothing, "Ceil": _nothing, "Round": _nothing, "Sign": _nothing,
    "Add": _combined, "Sub": _combined, "Mul": _combined, "Div": _combined, "Sum": _combined, "Where": _where,
    "Gemm": _gemm, "MatMul": _matmul, "Conv": conv, "ConvTranspose": conv_transpose,
    "AveragePool": average_pool, "GlobalAveragePool": global_pool, "MaxPool": max_pool, "Resize": resize,
    "ReduceMean": _reduced, "ReduceSum": _reduced, "Softmax": _softmax, "LogSoftmax": _softmax,
    "LayerNormalization": _layer_norm, "BatchNormalization": _batch_norm,
    "Reshape": _reshaped, "Flatten": _reshaped, "Squeeze": _reshaped, "Unsqueeze": _reshaped,
    "Transpose": _transposed, "Expand": _expanded, "Concat": _concat, "Split": _split, "Pad": _padded,
    "Gather": _taken, "Slice": _taken,
}  # fmt: skip
