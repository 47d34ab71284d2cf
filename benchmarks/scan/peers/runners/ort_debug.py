"""onnxruntime's debug tools: the SQNR of every tensor of the int8 model against the float one, all in one go.

No probe of a layer: it tells where an error is, not what it does to the outputs; and it keeps every tensor of every
sample in memory. A probe is a tensor here.
"""

import logging
import tempfile
from pathlib import Path

import harness
from harness import Clock, Job, Record
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.qdq_loss_debug import (
    collect_activations,
    compute_activation_error,
    create_activation_matching,
    modify_model_output_intermediate_tensors,
)


class Reader(CalibrationDataReader):
    def __init__(self, part: harness.Feed):
        self._feeds = iter(harness.feeds(part))

    def get_next(self) -> harness.Feed | None:
        return next(self._feeds, None)


def work(job: Job, record: Record) -> None:
    logging.getLogger().setLevel(logging.ERROR)  # onnxruntime's quantizer asks each time to preprocess the model
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="quantsieve-peer-") as folder:
        int8, outputs = Path(folder) / "int8.onnx", []
        quantize_static(
            job.model,
            int8,
            Reader(job.calibration),
            quant_format=QuantFormat.QDQ,
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8,
        )
        record.setup_cpu_s = clock.read()
        clock = Clock()
        for number, path in enumerate((job.model, int8)):
            augmented = Path(folder) / f"{number}.onnx"
            modify_model_output_intermediate_tensors(path, augmented)
            outputs.append(collect_activations(augmented, Reader(job.samples)))
    errors = compute_activation_error(create_activation_matching(outputs[1], outputs[0]))
    record.probe_cpu_s = clock.read()
    record.probes = record.timed = len(errors)


harness.run((), {"onnxruntime, debug tools": work})
