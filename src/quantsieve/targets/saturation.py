"""Does an integer kernel of this machine lose large sums? Measured with the largest products there are.

On x86-64 without VNNI the uint8 x int8 kernels add pairs of products in 16 saturating bits: 255 * 127 * 2 >
32767, so the sum of 1024 such products comes back as 0.504 of itself. The probe begins with a QuantizeLinear
on a float input, because a model whose input is already int8 runs in float and looks exact. Nothing is
decided here from processor flags.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from quantsieve.targets.base import Load, Saturation

PROBED_OPS: tuple[Literal["MatMul", "Gemm", "Conv"], ...] = ("MatMul", "Gemm", "Conv")
_DEPTH = 1024  # products in a sum
_ROWS, _COLUMNS = 4, 16  # a few of each: a matrix of one row may take another kernel
EXACT = 255.0 * 127.0 * _DEPTH  # 33162240, even and below 2**25: exact in float32


def saturation_model(
    op: Literal["MatMul", "Gemm", "Conv"], weight_type: type[np.int8] | type[np.uint8]
) -> onnx.ModelProto:
    """A QDQ model of one `op` with K = 1024, whose output is `EXACT` everywhere when its input 'x' is 255
    everywhere.

    x: float32 (4, 1024), for Conv (1, 1024, 2, 2). y: (4, 16) or (1, 16, 2, 2), in 255 steps. Weights are 127
    as int8 with zero point 0, or as uint8 255 with zero point 128. Opset 13.
    """
    zero_point = weight_type(0) if weight_type is np.int8 else weight_type(128)
    shape = (_COLUMNS, _DEPTH, 1, 1) if op == "Conv" else (_DEPTH, _COLUMNS)
    constants = {
        "one": np.float32(1),
        "y_scale": np.float32(EXACT / 255),
        "u8_zero": np.uint8(0),
        "w_zero": zero_point,
        "w_q": np.full(shape, int(zero_point) + 127, weight_type),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "one", "u8_zero"], ["x_q"], "quantize_x"),
        helper.make_node("DequantizeLinear", ["x_q", "one", "u8_zero"], ["x_d"], "dequantize_x"),
        helper.make_node("DequantizeLinear", ["w_q", "one", "w_zero"], ["w"], "dequantize_w"),
        helper.make_node(op, ["x_d", "w"], ["sum"], "probe"),
        helper.make_node("QuantizeLinear", ["sum", "y_scale", "u8_zero"], ["y_q"], "quantize_y"),
        helper.make_node("DequantizeLinear", ["y_q", "y_scale", "u8_zero"], ["y"], "dequantize_y"),
    ]
    output_shape = (1, _COLUMNS, 2, 2) if op == "Conv" else (_ROWS, _COLUMNS)
    graph = helper.make_graph(
        nodes,
        f"saturation_{op}",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, probe_input(op).shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, output_shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def probe_input(op: str) -> np.ndarray:
    """The input of `saturation_model(op, ...)`: 255 everywhere, float32."""
    return np.full((1, _DEPTH, 2, 2) if op == "Conv" else (_ROWS, _DEPTH), 255, np.float32)


def probe(load: Load) -> Saturation:
    """Returned over exact sum with int8 and with uint8 weights, the worst of MatMul, Gemm and Conv.

    load: loads with the options that candidates are measured with. Raises TargetFailure where it does.
    """
    return Saturation(s8=_worst(load, np.int8), u8=_worst(load, np.uint8))


def _worst(load: Load, weight_type: type[np.int8] | type[np.uint8]) -> float:
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for op in PROBED_OPS:
            path = Path(folder) / f"{op}.onnx"
            onnx.save(saturation_model(op, weight_type), path)
            ratios.append(float(load(path)({"x": probe_input(op)})["y"].min()) / EXACT)
    return min(ratios)
