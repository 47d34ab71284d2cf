"""Affine number formats: q = saturate(rint(x / scale) + zero_point), x' = (q - zero_point) * scale.

Weights are 8-bit integers, symmetric or not, signed as they are told here; stored unsigned they and their zero points
are 128 more, the same numbers. Activations have 8 or 16 bits, unsigned or signed, symmetric or not. Zero is exact.
Rounding is half to even, as ONNX's QuantizeLinear does.
"""

from dataclasses import dataclass

import numpy as np

from quantsieve.schemes._formats import SYMMETRIC, SYMMETRIC_8, Grid, integer_type

BIAS_LIMIT = 2**30  # of int32's 2**31: room for the sum of products that the bias is added to
_TINY = np.float32(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Integers with their scales. values: int8, shape of the weight; scale: float32, () or (channels,); zero_point:
    int8, as scale, or None for 0 throughout."""

    values: np.ndarray
    scale: np.ndarray
    axis: int | None  # of the channels; None when one scale serves all
    zero_point: np.ndarray | None = None

    def dequantized(self) -> np.ndarray:
        """float32, shape of the weight."""
        values = self.values.astype(np.float32)
        if self.zero_point is not None:
            values -= along_axis(self.zero_point, self.axis, self.values.ndim)
        return values * self.steps()

    def stored(self, is_unsigned: bool) -> tuple[np.ndarray, np.ndarray]:
        """(values, zero points) as int8, or as the uint8 that are 128 more."""
        zero = np.zeros(self.scale.shape, np.int8) if self.zero_point is None else self.zero_point
        if not is_unsigned:
            return self.values, zero
        return (self.values.astype(np.int16) + 128).astype(np.uint8), (zero.astype(np.int16) + 128).astype(np.uint8)

    def steps(self) -> np.ndarray:
        """float32, the scale of each value, shaped to broadcast against the weight."""
        return along_axis(self.scale, self.axis, self.values.ndim)


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """Integers of few bits with a scale for each block. values: int8, shape of the weight, a matrix; scale: float32
    [made, blocks]; axis: the one that is summed, along which `block` values have one scale, the last block fewer."""

    values: np.ndarray
    scale: np.ndarray
    axis: int
    block: int
    bits: int

    def dequantized(self) -> np.ndarray:
        """float32, shape of the weight."""
        return self.values.astype(np.float32) * self.steps()

    def steps(self) -> np.ndarray:
        """float32, shape of the weight: the scale of each value."""
        steps = np.repeat(self.scale, self.block, axis=1)[:, : self.values.shape[self.axis]]
        return steps if self.axis == 1 else steps.T

    def packed(self) -> np.ndarray:
        """uint8 [made, blocks, block * bits / 8], as MatMulNBits wants it: values + 2^(bits - 1), the first of a byte
        in its low bits; what fills up the last block stands for 0."""
        rows = self.values if self.axis == 1 else self.values.T
        offset, blocks = 1 << (self.bits - 1), self.scale.shape[1]
        filled = np.full((rows.shape[0], blocks * self.block), offset, np.uint8)
        filled[:, : rows.shape[1]] = rows.astype(np.int16) + offset
        each = 8 // self.bits
        parts = filled.reshape(rows.shape[0], blocks, self.block // each, each)
        shifts = np.arange(each, dtype=np.uint8) * self.bits
        return np.bitwise_or.reduce(parts << shifts, axis=-1).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class QuantizedBias:
    """values: int32 (channels,); scale: float32, () or (channels,), input scale times weight scale."""

    values: np.ndarray
    scale: np.ndarray

    def dequantized(self) -> np.ndarray:
        return (self.values.astype(np.float32) * self.scale).astype(np.float32)


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """bias: integers, or float32 (channels,) where the scheme keeps it float; None for a layer without."""

    weight: QuantizedWeight | BlockedWeight
    bias: QuantizedBias | np.ndarray | None

    def dequantized(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Weight and bias that this stands for, float32."""
        bias = self.bias.dequantized() if isinstance(self.bias, QuantizedBias) else self.bias
        return self.weight.dequantized(), bias


def along_axis(scale: np.ndarray, axis: int | None, rank: int) -> np.ndarray:
    """The scales shaped so that they broadcast against a weight of that rank."""
    if axis is None:
        return scale
    return scale.reshape([-1 if i == axis else 1 for i in range(rank)])


def weight_scale(weight: np.ndarray, axis: int | None, grid: Grid = SYMMETRIC_8) -> np.ndarray:
    """float32, () or (channels,): max|w| over the largest integer, or the range with zero over that of the integers; 1
    where all weights are zero or too small to have a scale."""
    low, high = _ends(weight, axis)
    if grid.is_symmetric:
        scale = np.maximum(-low, high) / np.float32(grid.most)
    else:
        scale = (high - low) / np.float32(grid.most - grid.least)
    # A subnormal scale has too few bits: the peak would clip and break |w - w'| <= scale / 2.
    return np.where(scale >= _TINY, scale, np.float32(1)).astype(np.float32)


def _ends(weight: np.ndarray, axis: int | None) -> tuple[np.ndarray, np.ndarray]:
    """float32, () or (channels,): least and largest weight, zero among them."""
    others = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)
    low, high = weight.min(axis=others, initial=0), weight.max(axis=others, initial=0)
    return np.asarray(low, np.float32), np.asarray(high, np.float32)


def quantize_layer(
    weight: np.ndarray, bias: np.ndarray | None, axis: int | None, input_scale: np.float32, grid: Grid = SYMMETRIC_8
) -> QuantizedLayer:
    """Weight and bias in integers; a weight scale is raised where the bias would not fit int32 otherwise.

    weight: float32, any rank; bias: float32 (channels,) or None; axis: of the output channels, None for one scale.
    A zero point of the weights does not move the bias: kernels take it off each product.
    """
    scale = weight_scale(weight, axis, grid)
    if bias is not None:
        peak = np.abs(bias).astype(np.float64)
        needed = (peak if axis is not None else peak.max(initial=0.0)) / (BIAS_LIMIT * float(input_scale))
        scale = np.maximum(scale, needed.astype(np.float32) if isinstance(needed, np.ndarray) else np.float32(needed))
    rounded = round_weight(weight, np.asarray(scale, np.float32), axis, grid)
    if bias is None:
        return QuantizedLayer(rounded, None)
    bias_scale = np.asarray(rounded.scale * input_scale, np.float32)
    bias_scale = np.where(bias_scale >= _TINY, bias_scale, _TINY).astype(np.float32)
    limit = 2**31 - 1
    bias_values = np.clip(np.rint(bias.astype(np.float64) / bias_scale), -limit, limit).astype(np.int32)
    return QuantizedLayer(rounded, QuantizedBias(bias_values, bias_scale))


def round_weight(weight: np.ndarray, scale: np.ndarray, axis: int | None, grid: Grid = SYMMETRIC_8) -> QuantizedWeight:
    """float32 weight, any rank, in integers of the grid. scale: float32, () or (channels,) along `axis`, at least
    `weight_scale`."""
    ratio = np.rint(weight / along_axis(scale, axis, weight.ndim))
    if grid.is_symmetric:
        return QuantizedWeight(np.clip(ratio, grid.least, grid.most).astype(np.int8), scale, axis)
    low, _ = _ends(weight, axis)
    zero = np.clip(np.rint(-low / scale) + grid.least, grid.least, grid.most).astype(np.int8)
    values = np.clip(ratio + along_axis(zero, axis, weight.ndim), grid.least, grid.most).astype(np.int8)
    return QuantizedWeight(values, scale, axis, zero)


def round_blocks(weight: np.ndarray, axis: int, block: int, bits: int) -> BlockedWeight:
    """float32 matrix in symmetric integers, one scale for each `block` values along `axis`."""
    rows = weight if axis == 1 else weight.T
    blocks = -(-rows.shape[1] // block)
    filled = np.zeros((rows.shape[0], blocks * block), np.float32)
    filled[:, : rows.shape[1]] = rows
    peak = (1 << (bits - 1)) - 1
    scale = np.abs(filled).reshape(rows.shape[0], blocks, block).max(axis=2) / np.float32(peak)
    scale = np.where(scale >= _TINY, scale, np.float32(1)).astype(np.float32)
    made = BlockedWeight(np.zeros(weight.shape, np.int8), scale, axis, block, bits)
    values = np.clip(np.rint(weight / made.steps()), -peak, peak).astype(np.int8)
    return BlockedWeight(values, scale, axis, block, bits)


def activation_parameters(low: float, high: float, form: str = "uint8") -> tuple[np.float32, int]:
    """(scale, zero point) in an activation format for values in [low, high], zero included and exact.

    The zero point is the type's least value when nothing is negative, as the fusing of Relu and Clip demands
    (RUNTIME.md section 2); the middle of the type in symmetric formats, whose least value is not used.
    """
    low, high = min(0.0, float(low)), max(0.0, float(high))
    limits = np.iinfo(integer_type(form))
    least, most = int(limits.min), int(limits.max)
    if form.endswith(SYMMETRIC):
        middle = (least + most + 1) // 2
        scale = np.float32(max(-low, high) / (most - middle))
        return (scale if scale >= _TINY else np.float32(1)), middle
    scale = np.float32((high - low) / (most - least))
    if not scale >= _TINY:
        return np.float32(1), least
    return scale, int(np.clip(np.rint(-low / float(scale)) + least, least, most))
