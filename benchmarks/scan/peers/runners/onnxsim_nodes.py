"""onnxsim: activations and weights, one node at a time, uint8 QDQ; one calibration, a QDQ model and a session a node.

Its default metric is the SQNR of the worst output; it is given minus the KL divergence, so that scores compare.
"""

from contextlib import suppress

import harness
import numpy as np
from harness import Clock, Enough, Job, Record
from onnxsim import activation_sensitivity as sensitivity


def score(reference: list, quantized: list) -> float:
    """Minus the mean KL over the samples; the outputs of a batch are a dict."""
    rows = [
        harness.kl(*(next(iter(batch.values())) for batch in pair)) for pair in zip(reference, quantized, strict=True)
    ]
    return -float(np.concatenate(rows).mean())


def work(job: Job, record: Record) -> None:
    clock = Clock()
    plain = sensitivity._Scorer.score

    def scored(self, level_of, default, max_batches=None):
        nonlocal clock
        if not record.probes:  # the first is of all nodes together, after the calibration
            found = plain(self, level_of, default, max_batches)
            record.setup_cpu_s, record.probes, clock = clock.read(), len(level_of), Clock()
            return found
        if clock.read() > job.limit_s:
            raise Enough
        found = plain(self, level_of, default, max_batches)
        record.scores[next(iter(level_of))] = -found
        record.timed += 1
        record.probe_cpu_s = clock.read()
        return found

    sensitivity._Scorer.score = scored
    calibration, samples = harness.feeds(job.calibration), harness.feeds(job.samples)
    with suppress(Enough):
        sensitivity.analyze_activation_sensitivity(str(job.model), calibration, samples, groups="node", metric=score)


harness.run(("onnxsim",), {"onnxsim, nodes": work})
