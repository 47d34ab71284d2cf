"""Rules (see `_rules.py`) of the operators that read windows: convolutions, pools, Resize."""

from collections.abc import Sequence

import numpy as np

from quantsieve.sensitivity._backward import Builder, Cotangents, Node, NoGradient


def _pads(node: Node, kernel: Sequence[int], inside: Sequence[int], outside: Sequence[int]) -> list[int]:
    """Begins, then ends, as explicit numbers. inside, outside: spatial shapes of input and output."""
    rank = len(kernel)
    strides, dilations = ints(node, "strides", rank, 1), ints(node, "dilations", rank, 1)
    mode = node.get("auto_pad", b"NOTSET")
    if mode in (b"SAME_UPPER", b"SAME_LOWER"):
        total = [
            max((o - 1) * s + d * (k - 1) + 1 - i, 0)
            for i, o, s, d, k in zip(inside, outside, strides, dilations, kernel, strict=True)
        ]
        less, more = [t // 2 for t in total], [t - t // 2 for t in total]
        return [*less, *more] if mode == b"SAME_UPPER" else [*more, *less]
    return ints(node, "pads", 2 * rank, 0)


def ints(node: Node, name: str, count: int, default: int) -> list[int]:
    found = node.get(name)
    return list(found) if found else [default] * count


def conv(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    weight, group = b.constant(node, 1), int(node.get("group", 1))
    return {0: _unconvolved(b, node, c[0] or "", weight, group)}


def _unconvolved(b: Builder, node: Node, cotangent: str, weight: np.ndarray, group: int) -> str:
    kernel = weight.shape[2:]
    rank, inside, outside = len(kernel), b.shape(node.inputs[0])[2:], b.shape(node.outputs[0])[2:]
    strides, dilations = ints(node, "strides", rank, 1), ints(node, "dilations", rank, 1)
    pads = _pads(node, kernel, inside, outside)
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    sizes = tuple(enumerate(zip(inside, outside, strides, reach, strict=True)))
    for a, (i, o, s, r) in sizes:  # the last window may stand out: of ceil_mode, or of a kernel larger than its input
        pads[a + rank] = max(pads[a + rank], (o - 1) * s + r + 1 - pads[a] - i)
    others = [size - pad for size, pad in zip([*reach, *reach], pads, strict=True)]
    if max(strides) == 1 and min(others) >= 0:  # onnxruntime runs a convolution some times faster than its transpose
        split = weight.reshape(group, -1, *weight.shape[1:])
        flipped = np.flip(np.swapaxes(split, 1, 2), axis=tuple(range(3, 3 + rank)))
        whole = b.array(flipped.reshape(-1, *flipped.shape[2:]))
        return b.op("Conv", cotangent, whole, pads=others, dilations=dilations, group=group)
    rest = [i - ((o - 1) * s + r + 1 - pads[a] - pads[a + rank]) for a, (i, o, s, r) in sizes]
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "output_padding": rest, "group": group}
    return b.op("ConvTranspose", cotangent, b.array(weight), **attributes)


def conv_transpose(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    weight = b.constant(node, 1)
    rank = weight.ndim - 2
    if node.get("output_shape") or node.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise NoGradient("the operator ConvTranspose has no explicit pads")
    attributes = {name: ints(node, name, rank, 1) for name in ("strides", "dilations")}
    pads, group = ints(node, "pads", 2 * rank, 0), int(node.get("group", 1))
    return {0: b.op("Conv", c[0] or "", b.array(weight), pads=pads, group=group, **attributes)}


def average_pool(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    kernel = list(node.get("kernel_shape"))
    shape = b.shape(node.inputs[0])
    inside, outside = shape[2:], b.shape(node.outputs[0])[2:]
    pads, strides = _pads(node, kernel, inside, outside), ints(node, "strides", len(kernel), 1)
    dilations = ints(node, "dilations", len(kernel), 1)
    if node.get("ceil_mode", 0) and node.get("count_include_pad", 0):
        raise NoGradient("the operator AveragePool rounds its size up and counts its pads")
    counts = np.ones(outside, np.float32)
    for axis, (size, out, step, spread, k) in enumerate(zip(inside, outside, strides, dilations, kernel, strict=True)):
        places = np.arange(out)[:, None] * step - pads[axis] + np.arange(k) * spread
        low, high = (-pads[axis], size + pads[axis + len(kernel)]) if node.get("count_include_pad", 0) else (0, size)
        along = ((places >= low) & (places < high)).sum(axis=1)
        counts *= along.reshape([-1 if a == axis else 1 for a in range(len(kernel))]).astype(np.float32)
    shared = b.op("Div", c[0] or "", b.array(counts))
    ones = np.ones((shape[1], 1, *kernel), np.float32)
    return {0: _unconvolved(b, node, shared, ones, shape[1])}


def global_pool(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    shape = b.shape(node.inputs[0])
    share = b.op("Div", c[0] or "", b.number(float(np.prod(shape[2:]))))
    return {0: b.op("Expand", share, b.ints(*shape))}


def max_pool(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    """To where the largest value stood, added up where windows overlap."""
    shape, made = b.shape(node.inputs[0]), b.shape(node.outputs[0])
    kept = {name: value for name, value in node.attributes.items() if name != "storage_order"}
    places = b.second("MaxPool", b.value(node.inputs[0]), **kept)
    zeros = b.op("Expand", b.number(0), b.ints(int(np.prod(shape))))
    count = b.ints(int(np.prod(made)))
    flat = b.op("Reshape", places, count), b.op("Reshape", c[0] or "", count)
    return {0: b.op("Reshape", b.op("ScatterElements", zeros, *flat, reduction="add"), b.ints(*shape))}


def resize(b: Builder, node: Node, c: Cotangents) -> dict[int, str]:
    """Of the nearest element by whole factors: sums over what it was spread to."""
    shape, made = b.shape(node.inputs[0]), b.shape(node.outputs[0])
    factors = [after // before for before, after in zip(shape, made, strict=True)]
    is_whole = all(f * before == after for f, before, after in zip(factors, shape, made, strict=True))
    if node.get("mode", b"nearest") != b"nearest" or not is_whole:
        raise NoGradient(f"the operator {node.op_type} is not one of nearest elements by whole factors")
    split = [size for pair in zip(shape, factors, strict=True) for size in pair]
    parts = b.op("Reshape", c[0] or "", b.ints(*split))
    return {0: b.op("ReduceSum", parts, b.ints(*range(1, 2 * len(shape), 2)), keepdims=0)}
