"""AMD Quark: the sensitivity analysis of AutoMixprecision: one layer of the int8 model promoted to 16-bit activations.

int8 per tensor, as its defaults are. One data reader calibrates and scores, so its scores are of the calibration
samples. data_size n reads n + 1 of them, and its 0, documented as all, reads one.
"""

from contextlib import suppress

import harness
from harness import Clock, Enough, Job, Record
from onnxruntime.quantization import CalibrationDataReader
from quark.onnx import ModelQuantizer
from quark.onnx.algorithm.mprecision import sensitivity_analyzer
from quark.onnx.quantization.config import config as quark_config
from quark.onnx.quantization.config.algorithm import AutoMixprecisionConfig
from quark.onnx.quantization.config.spec import Int8Spec, Int16Spec, QLayerConfig


class Reader(CalibrationDataReader):
    def __init__(self, feeds: list[harness.Feed]):
        self._feeds = feeds
        self.rewind()

    def get_next(self) -> harness.Feed | None:
        return next(self._left, None)

    def rewind(self) -> None:
        self._left = iter(self._feeds)


def work(job: Job, record: Record) -> None:
    clock = Clock()
    feeds = harness.feeds(job.calibration)
    levels: list[float] = []

    def distance(reference: list, promoted: list) -> float:
        rows = [harness.kl(a[0], b[0]) for a, b in zip(reference, promoted, strict=True)]
        levels.append(float(sum(row.sum() for row in rows) / job.num_samples))
        return levels[-1]

    plain = sensitivity_analyzer.SensitivityAnalyzer._score_specs

    def scored(self, quant_model, data_reader, tensors_range, subgraph_specs):
        nonlocal clock
        record.setup_cpu_s, record.probes, clock = clock.read(), len(subgraph_specs), Clock()
        for spec in subgraph_specs:
            (found,) = plain(self, quant_model, data_reader, tensors_range, [spec])
            record.scores[spec.name] = -found.score  # of the int8 model, what is left: less is more sensitive
            record.timed += 1
            record.probe_cpu_s = clock.read()
            if record.probe_cpu_s > job.limit_s:
                break
        raise Enough

    sensitivity_analyzer.SensitivityAnalyzer._score_specs = scored
    mixing = AutoMixprecisionConfig(
        target_layer_config=QLayerConfig(activation=Int16Spec(), weight=Int8Spec()),
        data_size=len(feeds) - 1,
        metric_distance_fn=distance,
        metric_threshold=None,
        metric_optimize_object="quality",
    )
    config = quark_config.QConfig(
        global_config=QLayerConfig(activation=Int8Spec(), weight=Int8Spec()), algo_config=[mixing]
    )
    with suppress(Enough):
        ModelQuantizer(config).quantize_model(str(job.model), None, Reader(feeds))


harness.run(("amd-quark", "torch"), {"Quark, promote one": work})
