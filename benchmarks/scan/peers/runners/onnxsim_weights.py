"""onnxsim: weight sensitivity by brute force, one site (Conv, Gemm, MatMul) at a time, per channel, 8 bit, KL."""

import harness
import onnx
from harness import Clock, Job, Record
from onnxsim import quant_sensitivity as qs


def work(job: Job, record: Record) -> None:
    clock = Clock()
    model = onnx.load(job.model)
    groups = qs.as_groups(qs.find_sites(model))
    reference = qs.run_logits(model, job.samples, batch=harness.BATCH)
    record.setup_cpu_s, record.probes = clock.read(), len(groups)
    clock = Clock()
    for name, sites in groups.items():
        found = qs.measure(model, {name: sites}, "weights", 8, job.samples, batch=harness.BATCH, ref=reference)
        record.scores[name] = float(found[name]["kl"])
        record.timed += 1
        if clock.read() > job.limit_s:
            break
    record.probe_cpu_s = clock.read()


harness.run(("onnxsim",), {"onnxsim, weights": work})
