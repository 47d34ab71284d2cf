"""The four classifiers of the zoo beside the checkout, with their samples and the split that all methods share."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from quantsieve.data import Cached, InputSpec, Preprocess, Samples, batches, open_samples, split
from quantsieve.data.samples import content_digest
from quantsieve.errors import InputError
from quantsieve.targets.ort import OrtCpu

MODELS = ("efficientnet_lite0", "mobilenetv2_cifar10", "cifar_resnet20", "mlperf_resnet8")
DEFAULT_ZOO = Path(__file__).resolve().parents[3] / "shared" / "zoo"
SEED = 0
THREADS = 2
_NUM_CALIBRATION = 100
_CACHE_BYTES = 1 << 30
_BATCH = 25

Run = Callable[[dict[str, np.ndarray]], np.ndarray]  # a feed to the logits [b, classes]


class Chosen:
    """Some of the samples of another source, in the given order."""

    def __init__(self, samples: Samples, indices: Sequence[int]):
        self._samples = samples
        self._indices = tuple(indices)
        self.name = samples.name
        self.labels = None if samples.labels is None else samples.labels[list(indices)]
        self.notes = samples.notes

    def __len__(self) -> int:
        return len(self._indices)

    def feed(self, index: int) -> dict[str, np.ndarray]:
        return self._samples.feed(self._indices[index])

    def fingerprint(self) -> str:
        return content_digest([self._samples.fingerprint(), repr(self._indices)])


@dataclass(frozen=True)
class ZooModel:
    """A model file with opened samples. search, final: disjoint numbers of evaluation samples, from seed 0."""

    name: str
    path: Path
    input_name: str
    calibration: Samples
    evaluation: Samples
    search: np.ndarray
    final: np.ndarray

    @property
    def float_bytes(self) -> int:
        return self.path.stat().st_size

    @cached_property
    def float_labels(self) -> np.ndarray:
        """The float model's labels on the final samples, int64 [final]."""
        return self.labels(ort_run(self.path))

    def warm(self) -> None:
        """Reads every sample once: no method is charged for decoding images."""
        for samples in (self.calibration, self.evaluation):
            for index in range(len(samples)):
                samples.feed(index)
        len(self.float_labels)

    def labels(self, run: Run) -> np.ndarray:
        """The labels that `run` gives to the final samples, int64 [final]."""
        return labels_of(run, self.evaluation, self.final)

    def agreement(self, run: Run) -> np.ndarray:
        """Where a model gives the float model's label, bool [final]."""
        return self.labels(run) == self.float_labels


def open_model(name: str, zoo: Path = DEFAULT_ZOO) -> ZooModel:
    """The model `name` of the zoo folder with its data. Raises InputError when it is not there."""
    folder = zoo / name
    if not (folder / "meta.json").is_file():
        raise InputError(
            f"the zoo's folder {name}", f"none in {zoo.name}", "Give its place with --zoo; see the README."
        )
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    spec = InputSpec(meta["input"], "float32", tuple(meta["shape"]))
    chain = preprocess_of(meta)
    calibration = open_samples(folder / meta["data"]["calib"], [spec], preprocess=chain)
    if len(calibration) > _NUM_CALIBRATION:  # every second of the 200, as the zoo's README measured
        calibration = Chosen(calibration, range(0, len(calibration), len(calibration) // _NUM_CALIBRATION))
    evaluation = Cached(open_samples(folder / meta["data"]["eval"], [spec], preprocess=chain), _CACHE_BYTES)
    parts = split(len(evaluation), SEED, calibration=0, labels=evaluation.labels)
    return ZooModel(
        name,
        folder / "model.onnx",
        spec.name,
        Cached(calibration, _CACHE_BYTES),
        evaluation,
        parts.search,
        parts.final,
    )


def preprocess_of(meta: dict) -> Preprocess:
    """The preprocessing that a meta.json describes; all of these inputs are NCHW and RGB."""
    crop = meta.get("center_crop")
    return Preprocess(
        mean=tuple(float(value) for value in meta["mean"]),
        std=tuple(float(value) for value in meta["std"]),
        resize=meta.get("resize_short"),
        crop=(crop, crop) if crop else None,
        layout="nchw",
        color="rgb",
        interpolation=meta.get("interpolation") or "bilinear",
    )


def ort_run(path: Path) -> Run:
    """The file on onnxruntime with default session options; logits are the only output of these models."""
    predict = OrtCpu(threads=THREADS).load(path)
    return lambda feed: next(iter(predict(feed).values()))


def labels_of(run: Run, samples: Samples, indices: np.ndarray, batch: int = _BATCH) -> np.ndarray:
    """The largest logit's class of each of the samples, int64 [indices]."""
    return np.concatenate([run(feed).argmax(axis=1) for _, feed in batches(samples, indices, batch)])
