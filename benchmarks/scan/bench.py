"""A model of the zoo, prepared, calibrated and with the batches of the scan, as a run of Quantsieve has them."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
from benchmarks.quality.zoo import MODELS as IMAGE_MODELS
from benchmarks.quality.zoo import open_model

from quantsieve import schemes
from quantsieve.calibrate import Calibration, calibrate
from quantsieve.data import batches
from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.load import load_model
from quantsieve.model.prepare import prepare
from quantsieve.model.units import find_structure
from quantsieve.plan import Options, Plan, find_options, place
from quantsieve.run.memory import BATCH_BYTES
from quantsieve.schemes import Scheme
from quantsieve.sensitivity.suffix import Source, find_sources

MODELS = (*IMAGE_MODELS, "kws_dscnn", "minilm_l6_sst2")
SCHEME = "int8"
NUM_SAMPLES = 32
SEED = 0
_NUM_CALIBRATION = 32
_VOCABULARY = 30522

Batch = tuple[dict[str, np.ndarray], int]  # feeds and the number of samples in them


@dataclass(frozen=True)
class Bench:
    """name; proto: the prepared model, serialized; batches: of the scan; calibration_batches: of the ranges."""

    name: str
    proto: bytes
    graph: Graph
    calibration: Calibration
    options: Options
    sources: tuple[Source, ...]
    batches: tuple[Batch, ...]
    calibration_batches: tuple[Batch, ...]
    scheme: Scheme

    def executor(self) -> Executor:
        return Executor(self.graph, find_structure(self.graph))

    @property
    def num_samples(self) -> int:
        return sum(count for _, count in self.batches)

    def layer_sources(self) -> dict[str, tuple[Source, ...]]:
        """By layer, the sources that quantizing it alone switches on."""
        structure = find_structure(self.graph)
        known = set(self.sources)
        found = {}
        for layer in self.options.schemes:
            plan = Plan({layer: self.scheme.name})
            rounded = place(self.graph, structure, plan, {self.scheme.name: self.scheme}).rounded
            wanted = [
                Source("weight", layer, self.scheme.name),
                *(Source("tensor", root, form) for root, form in rounded),
            ]
            found[layer] = tuple(source for source in wanted if source in known)
        return found


def open_bench(name: str, zoo: Path, scratch: Path) -> Bench:
    """Raises InputError when the zoo lacks the model. scratch: an empty folder, for the transformer that is built."""
    path, calibration, samples = _data(name, zoo, scratch)
    prepared, _ = prepare(load_model(path), [feed for feed, _ in calibration[:2]], path.stat().st_size)
    return bench_of(name, prepared, calibration, samples)


def bench_of(
    name: str,
    prepared: ir.Model,
    calibration: Sequence[Batch],
    samples: Sequence[Batch],
    most: int = NUM_SAMPLES,
    scheme_name: str = SCHEME,
) -> Bench:
    """calibration, samples: single samples with their count of 1; stacked here, at most `most` of them, where all have
    one shape."""
    graph = Graph(prepared)
    executor = Executor(graph, find_structure(graph))
    size = int(np.clip(BATCH_BYTES // max(1, executor.bytes_per_sample(samples[0][0])), 1, most))
    fed = _stacked(calibration, size)
    facts = calibrate(executor, fed)
    scheme = schemes.get(scheme_name)
    options = find_options(graph, executor.structure, facts, [scheme])
    sources = find_sources(executor, options, [scheme])
    data = ir.to_proto(prepared).SerializeToString()
    return Bench(name, data, graph, facts, options, sources, _stacked(samples, size), fed, scheme)


def float_session(proto: bytes) -> onnxruntime.InferenceSession:
    """The whole model with all optimizations and one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def _data(name: str, zoo: Path, scratch: Path) -> tuple[Path, list[Batch], list[Batch]]:
    if name in IMAGE_MODELS:
        model = open_model(name, zoo)
        calibration = [(dict(model.calibration.feed(i)), 1) for i in range(_NUM_CALIBRATION)]
        wanted = model.search[:NUM_SAMPLES]
        return model.path, calibration, [(feeds, 1) for _, feeds in batches(model.evaluation, wanted, 1)]
    meta = json.loads((zoo / name / "meta.json").read_text(encoding="utf-8"))
    if name == "minilm_l6_sst2":
        subprocess.run([zoo / "fetch_minilm", scratch], check=True, stdout=subprocess.DEVNULL)
        draw = np.random.default_rng(SEED)
        return scratch / "model.onnx", _sentences(draw, _NUM_CALIBRATION), _sentences(draw, NUM_SAMPLES)
    parts = []
    for key, count in (("calib", _NUM_CALIBRATION), ("eval", NUM_SAMPLES)):
        array = np.load(zoo / name / meta["data"][key])[meta["input"]]
        parts.append([({meta["input"]: array[i : i + 1]}, 1) for i in range(count)])
    return zoo / name / "model.onnx", *parts


def _sentences(draw: np.random.Generator, count: int) -> list[Batch]:
    """Random tokens: the lengths of the zoo's sentences, but not their words, which change no cost."""
    found = []
    for length in draw.integers(6, 41, count):
        ids = draw.integers(1000, _VOCABULARY, (1, length))
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        found.append((feeds, 1))
    return found


def _stacked(samples: Sequence[Batch], size: int) -> tuple[Batch, ...]:
    first = samples[0][0]
    if any(feeds[key].shape != first[key].shape for feeds, _ in samples for key in first):
        return tuple(samples)
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]
    return tuple(
        ({key: np.concatenate([feeds[key] for feeds, _ in part]) for key in first}, len(part)) for part in parts
    )
