"""NNCF: the ranking of quantize_with_accuracy_control, which takes one group of quantizers out of the int8 model.

One session a group, one sample a run. The validation function gives minus the KL divergence of every sample, by which
NNCF then ranks; a maximal drop of 0 makes it rank whatever the drop is, and it is stopped before it reverts.
"""

from contextlib import suppress

import harness
import nncf
import numpy as np
import onnx
import onnxruntime
from harness import Clock, Enough, Job, Record
from nncf.quantization.advanced_parameters import AdvancedAccuracyRestorerParameters
from nncf.quantization.algorithms.accuracy_control.ranker import Ranker


def work(job: Job, record: Record) -> None:
    clock = Clock()
    reference = harness.float_outputs(job)
    input_name = next(iter(job.samples))
    samples = [{input_name: job.samples[input_name][i : i + 1], "row": i} for i in range(job.num_samples)]

    def transform(sample: dict) -> dict:
        return {input_name: sample[input_name]}

    levels: list[float] = []  # what validating gave: the float model, the int8 model, then groups

    def validate(model, data) -> tuple[float, list[float]]:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        rows = [(sample["row"], session.run(None, transform(sample))[0]) for sample in data]
        values = [-float(harness.kl(reference[i : i + 1], output)[0]) for i, output in rows]
        levels.append(1 + float(np.mean(values)))  # not 0 for the float model: NNCF divides by it
        return levels[-1], values

    plain_rank, plain_score = Ranker.rank_groups_of_quantizers, Ranker._calculate_ranking_score
    groups: list = []

    def ranked(self, groups_to_rank, *rest):
        nonlocal clock
        groups.extend(groups_to_rank)
        record.setup_cpu_s, record.probes, clock = clock.read(), len(groups), Clock()
        plain_rank(self, groups_to_rank, *rest)
        raise Enough

    def scored(self, *rest):
        found = plain_score(self, *rest)
        for node in groups[record.timed].operations:
            record.scores[node.node_name] = found - levels[1]
        record.timed += 1
        record.probe_cpu_s = clock.read()
        if record.probe_cpu_s > job.limit_s:
            raise Enough
        return found

    Ranker.rank_groups_of_quantizers, Ranker._calculate_ranking_score = ranked, scored
    model = onnx.load(job.model)
    calibration = nncf.Dataset([{input_name: array} for array in np.split(job.calibration[input_name], len(samples))])
    with suppress(Enough):
        nncf.quantize_with_accuracy_control(
            model,
            calibration,
            nncf.Dataset(samples, transform),
            validate,
            max_drop=0.0,
            subset_size=job.num_samples,
            advanced_accuracy_restorer_parameters=AdvancedAccuracyRestorerParameters(
                ranking_subset_size=job.num_samples, num_ranking_workers=1
            ),
        )


harness.run(("nncf",), {"NNCF, all but one": work})
