"""All eight models of the zoo beside the checkout, with samples, a score, the schemes to choose from, and the goal."""

import csv
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from benchmarks.quality import zoo as classifiers
from benchmarks.quality.models.scores import Score, detections, exact_text
from PIL import Image

from quantsieve.data import Cached, InputSpec, Samples, open_samples
from quantsieve.data.feeds import FeedSamples
from quantsieve.errors import InputError

INT8 = ("int8", "int8-channel")
TEXT = (*INT8, "w8", "dynamic8")
WEIGHTS = (*INT8, "w8")  # where static int8 alone does not reach the goal


@dataclass(frozen=True)
class Goal:
    """What a model is to reach on final samples: `most` of the measure at `share` of full int8's size reduction.

    measure: 'loss' of the score, or 'disagreement'; None of `most`: a loss within noise, whose interval holds 0.
    no_slower: than 'full int8' or 'float', where speed is asked for too.
    """

    share: float
    measure: str
    most: float | None
    no_slower: str | None = None


@dataclass(frozen=True)
class Model:
    """A float model with its samples. metric: a task's name or a score of our own."""

    name: str
    path: Path
    calibration: Samples
    evaluation: Samples
    metric: str | Score
    schemes: tuple[str, ...]
    goal: Goal
    notes: tuple[str, ...] = field(default=())


GOALS = {
    "efficientnet_lite0": Goal(0.99, "disagreement", 0.01, "full int8"),
    "mobilenetv2_cifar10": Goal(0.99, "disagreement", 0.03),
    "kws_dscnn": Goal(0.995, "loss", None),
    "cifar_resnet20": Goal(0.995, "loss", None),
    "mlperf_resnet8": Goal(0.995, "loss", None),
    "ppocrv4_rec": Goal(0.95, "loss", 0.01),
    "yolox_nano": Goal(0.99, "loss", 0.01),
    "minilm_l6_sst2": Goal(0.93, "loss", 0.005, "float"),  # 70 % smaller than float is 93 % of full int8's reduction
}
MODELS = tuple(GOALS)


class Labelled(FeedSamples):
    """Feeds with labels, int64 [n]."""

    def __init__(self, feeds: Sequence[dict[str, np.ndarray]], inputs: Sequence[InputSpec], labels: np.ndarray | None):
        super().__init__(feeds, inputs, name="zoo", max_bytes=4 << 30)
        self.labels = labels


def open_model(name: str, zoo: Path, scratch: Path) -> Model:
    """Raises InputError where the zoo lacks the model, or what reads its data is not installed.

    scratch: a folder for the transformer that is built.
    """
    folder = zoo / name
    if not (folder / "meta.json").is_file():
        raise InputError(f"the zoo's folder {name}", f"none in {zoo.name}", "Give its place with --zoo.")
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    if name in classifiers.MODELS:
        found = classifiers.open_model(name, zoo)
        schemes = WEIGHTS if name == "mobilenetv2_cifar10" else INT8
        return Model(name, found.path, found.calibration, found.evaluation, "top1", schemes, GOALS[name])
    reader = {"kws_dscnn": _arrays, "ppocrv4_rec": _lines, "yolox_nano": _photos, "minilm_l6_sst2": _sentences}[name]
    return reader(name, folder, meta, scratch)


def _arrays(name: str, folder: Path, meta: dict, scratch: Path) -> Model:
    spec = InputSpec(meta["input"], "float32", tuple(meta["shape"]))
    calibration, evaluation = (
        Cached(open_samples(folder / meta["data"][part], [spec]), 1 << 30) for part in ("calib", "eval")
    )
    return Model(name, folder / "model.onnx", calibration, evaluation, "top1", INT8, GOALS[name])


def _lines(name: str, folder: Path, meta: dict, scratch: Path) -> Model:
    """Text lines: height 48, right side padded with 0 after the values are shifted."""
    spec = InputSpec(meta["input"], "float32", tuple(meta["shape"]))
    parts, texts = [], []
    for part in ("calib", "eval"):
        with (folder / meta["data"][part] / "labels.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        feeds = [{spec.name: _line(_image(folder / meta["data"][part], row["file"]))} for row in rows]
        texts = [row["text"] for row in rows]
        parts.append(Labelled(feeds, [spec], np.arange(len(rows), dtype=np.int64)))
    characters = (folder / "characters.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
    return Model(name, folder / "model.onnx", *parts, exact_text(characters, texts), INT8, GOALS[name])


def _line(image: Image.Image) -> np.ndarray:
    width = min(320, -(-48 * image.width // image.height))
    values = np.asarray(image.resize((width, 48), Image.Resampling.BILINEAR), np.float32)[..., ::-1]
    made = np.zeros((1, 3, 48, 320), np.float32)
    made[0, :, :, :width] = ((values - 127.5) / 127.5).transpose(2, 0, 1)
    return made


def _photos(name: str, folder: Path, meta: dict, scratch: Path) -> Model:
    """Photos put into 416 x 416 from the top left, the rest 114; without labels."""
    spec = InputSpec(meta["input"], "float32", tuple(meta["shape"]))
    parts = []
    for part in ("calib", "eval"):
        files = sorted((folder / meta["data"][part]).rglob("*.jp*g"))
        parts.append(Labelled([{spec.name: _photo(Image.open(file).convert("RGB"))} for file in files], [spec], None))
    return Model(name, folder / "model.onnx", *parts, detections, WEIGHTS, GOALS[name])


def _photo(image: Image.Image) -> np.ndarray:
    ratio = min(416 / image.width, 416 / image.height)
    size = (round(image.width * ratio), round(image.height * ratio))
    values = np.asarray(image.resize(size, Image.Resampling.BILINEAR), np.float32)[..., ::-1]
    made = np.full((1, 3, 416, 416), 114, np.float32)
    made[0, :, : size[1], : size[0]] = values.transpose(2, 0, 1)
    return made


def _sentences(name: str, folder: Path, meta: dict, scratch: Path) -> Model:
    """Sentences of their own lengths, without padding."""
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found]
    except ImportError as error:
        raise InputError("the package tokenizers, which reads sentences", "none", "pip install tokenizers") from error
    built = scratch / name
    if not (built / "model.onnx").is_file():
        subprocess.run([str(folder.parent / "fetch_minilm"), str(built)], check=True, capture_output=True)
    tokenizer = Tokenizer.from_file(str(built / "tokenizer.json"))
    tokenizer.no_padding()
    specs = [InputSpec(text, "int64", tuple(meta["shape"])) for text in meta["inputs"]]
    parts = []
    for part in ("calib", "eval"):
        with (folder / meta["data"][part]).open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        feeds = []
        for row in rows:
            encoded = tokenizer.encode(row["text"])
            columns = encoded.ids, encoded.attention_mask, encoded.type_ids
            feeds.append({s.name: np.asarray([c], np.int64) for s, c in zip(specs, columns, strict=True)})
        parts.append(Labelled(feeds, specs, np.asarray([int(row["label"]) for row in rows])))
    return Model(name, built / "model.onnx", *parts, "top1", TEXT, GOALS[name])


def _image(folder: Path, file: str) -> Image.Image:
    place = folder / "images" / file
    return Image.open(place if place.is_file() else folder / file).convert("RGB")
