"""The two plain loops that a scan replaces: a whole file a source, and a calibration a layer.

`fake_quantized` edits the model and runs all of it; it shares nothing with the scan but the integers of the weights and
the ranges, so its prices are also the reference that the scan's are compared with.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from benchmarks.scan.bench import Batch, Bench
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from quantsieve.model.execute import Affine
from quantsieve.model.units import find_structure
from quantsieve.sensitivity.metrics import kl_div
from quantsieve.sensitivity.suffix import Source, error_vectors
from quantsieve.weights import NO_CORRECTIONS, integers

GUARDS = ("WeightBiasQuantization",)  # else onnxruntime rounds the weights behind a rounded tensor, too
Outputs = list[dict[str, np.ndarray]]  # float outputs by batch


def fake_quantized(bench: Bench, *sources: Source) -> onnx.ModelProto:
    """The whole model with those sources in it, one or several."""
    proto = onnx.ModelProto.FromString(bench.proto)
    for source in sources:
        if source.kind == "tensor":
            _round(proto, source.owner, bench.calibration.ranges[source.owner].affine(source.form))
        else:
            _reweight(proto, bench, source)
    return proto


def _reweight(proto: onnx.ModelProto, bench: Bench, source: Source) -> None:
    layer = find_structure(bench.graph).layer(source.owner)
    made = integers(bench.graph, layer, bench.scheme, bench.calibration, NO_CORRECTIONS)
    arrays = {layer.weight: made.weight.dequantized()}
    if made.bias is not None:
        arrays[layer.bias] = made.bias.dequantized()
    for constant in proto.graph.initializer:
        if constant.name in arrays:
            constant.CopyFrom(numpy_helper.from_array(arrays[constant.name], constant.name))


def whole_run(bench: Bench, proto: bytes, disabled: Sequence[str] = GUARDS) -> Outputs:
    """A new session, as a loop over files has it, and all samples. disabled: optimizers of onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        proto, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
    )
    names = [output.name for output in session.get_outputs()]
    found = [dict(zip(names, session.run(names, feeds), strict=True)) for feeds, _ in bench.batches]
    return [{name: array for name, array in part.items() if array.dtype.kind == "f"} for part in found]


def price(bench: Bench, outputs: Outputs, reference: Outputs) -> float:
    """Mean relative squared error."""
    errors = [
        error_vectors(renamed(got, wanted), wanted, bench.calibration.output_variance, count)[0]
        for (_, count), got, wanted in zip(bench.batches, outputs, reference, strict=True)
    ]
    return float(np.concatenate(errors).mean())


def divergence(outputs: Outputs, reference: Outputs) -> float:
    """Mean KL divergence in nats over the samples and outputs."""
    values = [
        np.mean([kl_div(array, renamed(got, wanted)[name]) for name, array in wanted.items()], axis=0)
        for got, wanted in zip(outputs, reference, strict=True)
    ]
    return float(np.concatenate(values).mean())


def renamed(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """An output that was renamed by rounding it stands under its old name."""
    return {name: got[name] if name in got else got[name + _BACK] for name in wanted}


class _Reader(CalibrationDataReader):
    def __init__(self, batches: tuple[Batch, ...]):
        self._feeds = iter([feeds for feeds, _ in batches])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def requantized(bench: Bench, layer: str) -> bytes:
    """onnxruntime's own quantizer with all other nodes excluded: it calibrates anew for each layer."""
    nodes = list(find_structure(bench.graph).layer(layer).nodes)
    with tempfile.TemporaryDirectory(prefix="quantsieve-scan-") as folder:
        before, after = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        before.write_bytes(bench.proto)
        quantize_static(
            before,
            after,
            _Reader(bench.calibration_batches),
            quant_format=QuantFormat.QDQ,
            nodes_to_quantize=nodes,
            per_channel=bench.scheme.per_channel,
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8,
        )
        return after.read_bytes()


_BACK = "/rounded"


def _round(proto: onnx.ModelProto, root: str, affine: Affine) -> None:
    def rename(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.input[:] = [root + _BACK if name == root else name for name in node.input]
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    rename(attribute.g)

    rename(proto.graph)
    names = [root + part for part in ("/q", "/scale", "/zero", _BACK)]
    at = next((i + 1 for i, node in enumerate(proto.graph.node) if root in node.output), 0)
    proto.graph.node.insert(at, helper.make_node("DequantizeLinear", names[:3], names[3:], name=names[3]))
    proto.graph.node.insert(at, helper.make_node("QuantizeLinear", [root, *names[1:3]], names[:1], name=names[0]))
    proto.graph.initializer.append(numpy_helper.from_array(np.asarray(affine.scale, np.float32), names[1]))
    proto.graph.initializer.append(numpy_helper.from_array(np.asarray(affine.zero_point, affine.dtype), names[2]))
    for output in proto.graph.output:
        output.name = root + _BACK if output.name == root else output.name
