"""AIMET-ONNX: `analyze_per_layer_sensitivity`, all quantizers of one op switched on, in one session of custom ops.

int8 per channel weights, uint8-like asymmetric activations (its default config), ranges of minmax. The callback gives
minus the KL divergence.
"""

from contextlib import suppress

import harness
import numpy as np
import onnx
from aimet_onnx.quant_analyzer import QuantAnalyzer, analyze_per_layer_sensitivity
from aimet_onnx.quantsim import QuantizationSimModel
from harness import Clock, Enough, Job, Record


def work(job: Job, record: Record) -> None:
    clock = Clock()
    reference = harness.float_outputs(job)
    sim = QuantizationSimModel(
        onnx.load(job.model), session_options_kwargs={"intra_op_num_threads": 1}, providers=["CPUExecutionProvider"]
    )
    sim.compute_encodings(harness.feeds(job.calibration))
    ops = sim.connected_graph.ordered_ops
    names = [op.name_op for op in ops if any(QuantAnalyzer._get_op_quantizers(op, sim))]
    record.setup_cpu_s, record.probes = clock.read(), len(names)
    clock = Clock()

    def evaluate(session) -> float:
        if record.timed == record.probes:  # the analyzer's own last word, if it has one
            return 0.0
        if clock.read() > job.limit_s:
            raise Enough
        outputs = [session.run(None, feed)[0] for feed in harness.feeds(job.samples)]
        found = float(harness.kl(reference, np.concatenate(outputs)).mean())
        record.scores[names[record.timed]] = found
        record.timed += 1
        record.probe_cpu_s = clock.read()
        return -found

    with suppress(Enough):
        analyze_per_layer_sensitivity(sim, evaluate)


harness.run(("aimet-onnx", "torch"), {"AIMET, ops": work})
