"""esp-ppq: `layerwise_error_analyse`, one operation quantized at a time in its torch executor.

int8 per tensor with scales that are powers of two, as its ESP32-P4 target has them. Its measure is the noise to signal
ratio of the output, higher is worse; it takes no other.
"""

from contextlib import suppress

import harness
import torch
from esp_ppq import QuantableOperation, TargetPlatform
from esp_ppq.api import quantize_onnx_model
from esp_ppq.quantization.analyse import layerwise_error_analyse
from harness import Clock, Enough, Job, Record


class Samples(list):
    """The batches, of which one walk is one probe; a walk that would begin after the limit does not."""

    def __init__(self, batches: list[torch.Tensor], record: Record, limit_s: float):
        super().__init__(batches)
        self._record, self._limit_s, self._clock = record, limit_s, Clock()

    def __iter__(self):
        if self._clock.read() > self._limit_s:
            raise Enough
        yield from super().__iter__()
        self._record.timed += 1
        self._record.probe_cpu_s = self._clock.read()


def work(job: Job, record: Record) -> None:
    torch.set_num_threads(1)
    clock = Clock()
    ((name, array),) = job.samples.items()

    def loader(part: harness.Feed) -> list[torch.Tensor]:
        return [torch.from_numpy(feed[name]) for feed in harness.feeds(part)]

    calibration, samples = loader(job.calibration), loader(job.samples)
    graph = quantize_onnx_model(
        str(job.model),
        calibration,
        calib_steps=max(8, len(calibration)),
        input_shape=[1, *array.shape[1:]],
        platform=TargetPlatform.ESPDL_INT8,
        device="cpu",
        verbose=0,
    )
    operations = [op for op in graph.operations.values() if isinstance(op, QuantableOperation) and op.is_computing_op]
    record.setup_cpu_s, record.probes, record.unit = clock.read(), len(operations), "noise to signal"
    with suppress(Enough):
        walked = Samples(samples, record, job.limit_s)
        found = layerwise_error_analyse(
            graph, walked, running_device="cpu", method="snr", steps=len(samples), verbose=False
        )
        record.scores = {name: float(value) for name, value in found.items()}


harness.run(("esp-ppq", "torch"), {"esp-ppq, operations": work})
