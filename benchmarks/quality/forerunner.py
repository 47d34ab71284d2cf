"""The published forerunner (SeQTO), made again from its description: rank the layers, keep one more float each time.

Each activation tensor between layers gets two SQNRs on calibration samples: the fully quantized model's
tensor against the float model's (xmodel), and the tensor before against behind its own Q/DQ pair (qdq).
Both are scaled to 0..1 over the nodes and added, half each; a node's score is that of the tensors it reads.
Then, in ranked order, one more node is left out of onnxruntime's quantize_static, with 50 calibration
samples, and 300 samples are evaluated. An SQNR is larger where the layer is cleaner, so two readings of the
order are measured: 'as published' takes the sum for an error, 'repaired' for a quality. Kinder than
the tool: it goes on when 300 samples show no disagreement, and decoding images is not counted.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime
from benchmarks.quality.accounting import cpu_seconds
from benchmarks.quality.records import Entry, Method
from benchmarks.quality.zoo import SEED, THREADS, Run, ZooModel, labels_of
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.qdq_loss_debug import (
    collect_activations,
    compute_activation_error,
    create_activation_matching,
    modify_model_output_intermediate_tensors,
)
from onnxruntime.quantization.registry import QDQRegistry
from onnxruntime.quantization.shape_inference import quant_pre_process

from quantsieve.data import Samples

Direction = Literal["as published", "repaired"]
DIRECTIONS: tuple[Direction, ...] = ("as published", "repaired")
NUM_RANKING = 32  # collect_activations keeps every tensor of every sample: 4.9 GB for efficientnet_lite0 at 224
NUM_CALIBRATION = 50
NUM_EVALUATION = 300  # drawn anew, with replacement, for each model: as the tool does
CPU_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Errors:
    """SQNRs of one tensor in decibel, larger is cleaner."""

    xmodel: float
    qdq: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """scores: of every node that may be kept float, in graph order, in 0..1. cpu_s: what it took, float labels too."""

    scores: Mapping[str, float]
    float_model: Path  # preprocessed as onnxruntime advises
    float_labels: np.ndarray  # int64, of the search samples, in their order
    cpu_s: float

    def order(self, direction: Direction) -> tuple[str, ...]:
        return order(self.scores, direction)


class _Reader(CalibrationDataReader):
    """One sample at a time."""

    def __init__(self, samples: Samples, indices: Iterable[int]):
        self._feeds: Iterator[dict[str, np.ndarray]] = (samples.feed(int(i)) for i in indices)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def combine(errors: Mapping[str, Errors]) -> dict[str, float]:
    """0.5 * scaled xmodel + 0.5 * scaled qdq by name; each is scaled so that it spans 0..1 (all 0 when equal)."""
    names = list(errors)
    xmodel = _scaled(np.array([errors[name].xmodel for name in names]))
    qdq = _scaled(np.array([errors[name].qdq for name in names]))
    return dict(zip(names, (0.5 * xmodel + 0.5 * qdq).tolist(), strict=True))


def order(scores: Mapping[str, float], direction: Direction) -> tuple[str, ...]:
    """Names in the order in which they go back to float; equal scores keep their order.

    'as published': largest score first, as if it were an error. 'repaired': smallest first, since it is an
    SQNR.
    """
    sign = -1 if direction == "as published" else 1
    return tuple(sorted(scores, key=lambda name: sign * scores[name]))


def rank(model: ZooModel, per_channel: bool, folder: Path) -> Ranking:
    """Scores of all nodes from `NUM_RANKING` calibration samples."""
    start = cpu_seconds()
    logging.getLogger().setLevel(logging.ERROR)  # onnxruntime advises at every call what we did once
    float_model, quantized = folder / "float.onnx", folder / "full.onnx"
    quant_pre_process(model.path, float_model, skip_symbolic_shape=True)
    _quantize(model, float_model, quantized, per_channel, [])
    chosen = spread_over(len(model.calibration), NUM_RANKING)
    found = [_activations(path, model, chosen, folder) for path in (quantized, float_model)]
    tensors = {
        name: Errors(values["xmodel_err"], values["qdq_err"])
        for name, values in compute_activation_error(create_activation_matching(*found)).items()
    }
    scores = _node_scores(onnx.load(float_model), combine(tensors))
    session = _session(float_model)
    labels = labels_of(session, model.evaluation, model.search, 1)
    return Ranking(scores, float_model, labels, cpu_seconds() - start)


def measure(
    model: ZooModel,
    ranking: Ranking,
    direction: Direction,
    per_channel: bool,
    folder: Path,
    limit_s: float = CPU_LIMIT_S,
) -> Method:
    """Models with 0, 1, 2, ... nodes float until one is left or the seconds are used up, ranking included.

    Final samples are evaluated afterwards and not counted.
    """
    start = cpu_seconds() - ranking.cpu_s
    names = ranking.order(direction)
    generator = np.random.default_rng(SEED)
    made: list[Path] = []
    searched: list[float] = []
    for count in range(len(names)):
        if made and cpu_seconds() - start > limit_s:
            break
        path = folder / f"{direction.replace(' ', '-')}-{count}.onnx"
        _quantize(model, ranking.float_model, path, per_channel, names[:count])
        searched.append(_search_disagreement(model, ranking, path, generator))
        made.append(path)
    cpu_s = cpu_seconds() - start
    entries = tuple(_final_entry(model, path, f"{i} nodes float") for i, path in enumerate(made))
    notes = (
        f"{len(names)} nodes ranked on {NUM_RANKING} calibration samples, "
        f"{ranking.cpu_s:.1f} CPU s of ranking included",
        f"at most {limit_s:.0f} CPU s; {len(made)} of {len(names)} steps made; final samples not counted",
        f"its own last estimate of disagreement: {searched[-1]:.4f} on {NUM_EVALUATION} draws of the search samples",
    )
    return Method(entries, cpu_s, len(entries), notes)


def spread_over(total: int, wanted: int) -> np.ndarray:
    """`wanted` numbers spread evenly over 0..total-1; all when there are not more."""
    return np.unique(np.linspace(0, total - 1, min(wanted, total)).astype(int))


def final_session(path: Path) -> Run:
    """The model without two habits of onnxruntime that its files do not guard against.

    Layers kept float are quantized at load, and int8 weights saturate where there is no VNNI. With default
    options the forerunner's curves are worse; its table row gets the kinder figure, the JSON both.
    """
    return _session(path, THREADS, True)


def _scaled(values: np.ndarray) -> np.ndarray:
    span = np.ptp(values) if len(values) else 0.0
    return (values - values.min()) / span if span > 0 else np.zeros_like(values)


def _node_scores(model: onnx.ModelProto, tensors: Mapping[str, float]) -> dict[str, float]:
    """Score of each node that quantize_static takes: the mean over the scored tensors that it reads."""
    scores = {}
    for node in model.graph.node:
        read = [tensors[name] for name in node.input if name in tensors]
        if read and node.op_type in QDQRegistry:
            scores[node.name] = float(np.mean(read))
    return scores


def _quantize(model: ZooModel, source: Path, path: Path, per_channel: bool, floats: Sequence[str]) -> None:
    quantize_static(
        source,
        path,
        _Reader(model.calibration, spread_over(len(model.calibration), NUM_CALIBRATION)),
        quant_format=QuantFormat.QDQ,
        per_channel=per_channel,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.MinMax,
        nodes_to_exclude=list(floats),
    )


def _activations(path: Path, model: ZooModel, chosen: np.ndarray, folder: Path) -> dict[str, list[np.ndarray]]:
    augmented = folder / f"augmented-{path.name}"
    modify_model_output_intermediate_tensors(path, augmented)
    return collect_activations(str(augmented), _Reader(model.calibration, chosen))


def _search_disagreement(model: ZooModel, ranking: Ranking, path: Path, generator: np.random.Generator) -> float:
    drawn = generator.integers(len(model.search), size=NUM_EVALUATION)
    labels = labels_of(_session(path), model.evaluation, model.search[drawn], 1)
    return float(np.mean(labels != ranking.float_labels[drawn]))


def _final_entry(model: ZooModel, path: Path, origin: str) -> Entry:
    default = float(1 - model.agreement(_session(path, THREADS)).mean())
    agreement = model.agreement(final_session(path))
    return Entry(origin, path.stat().st_size, agreement, default_disagreement=default)


def _session(path: Path, threads: int = 1, is_guarded: bool = False) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    disabled = []
    if is_guarded:
        options.add_session_config_entry("session.x64quantprecision", "1")
        disabled = ["WeightBiasQuantization"]
    session = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
    )
    return lambda feed: session.run(None, feed)[0]
