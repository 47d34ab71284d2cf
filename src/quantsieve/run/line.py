"""The stages up to the prices, each looked up by its content key, computed where it is missing, and stored.

Nothing here decides anything about quantization: it calls the stages in order and knows how their keys are made.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from quantsieve import calibrate, clipping, schemes, weights, writing
from quantsieve.data import Cached, InputSpec, Samples, Split, batches, split
from quantsieve.errors import InputError, UnsupportedModel
from quantsieve.model import aside, prepare
from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.load import file_bytes, open_model
from quantsieve.model.units import VERSION as UNITS_VERSION
from quantsieve.model.units import Structure, find_structure
from quantsieve.plan import Options, find_options, forced_tensors
from quantsieve.run.keys import array_key, content_key, model_key
from quantsieve.run.memory import Memory, default_limit
from quantsieve.run.progress import Progress, Step
from quantsieve.run.selecting import select_layers
from quantsieve.run.spec import Settings
from quantsieve.run.store import Store
from quantsieve.schemes import Scheme
from quantsieve.schemes._static import by_name
from quantsieve.search.prices import Costs
from quantsieve.selection import EVERYTHING, NOTHING, Selected
from quantsieve.sensitivity import screen, suffix
from quantsieve.sensitivity.engine import refusal
from quantsieve.sensitivity.racing import LOOKS
from quantsieve.targets.base import Target

Fact = TypeVar("Fact")
Feeds = dict[str, np.ndarray]

BATCH = 64  # most samples of one batch of the layer-wise run
CORRECTION_SAMPLES = 64  # most calibration samples that a bias is corrected on
CHECK_SAMPLES = 2  # on which every step of prepare is compared


@dataclass(frozen=True, slots=True)
class Sources:
    """Opened data of a run. calibration: of its own, or None when it is split off `samples`."""

    samples: Samples
    calibration: Samples | None
    synthetic: bool = False

    def notes(self) -> tuple[str, ...]:
        return (*self.samples.notes, *(self.calibration.notes if self.calibration is not None else ()))


class TimeUp(Exception):
    """The time for calibration or scan is over; what is stored stays, the same command goes on from there."""


def input_specs(model: ir.Model) -> tuple[InputSpec, ...]:
    """The inputs that data must fill; initializers that a model lists as inputs have their values already."""
    names = set(model.graph.initializers)
    values = (value for value in Graph(model).inputs if value.name not in names)
    return tuple(InputSpec(value.name, value.dtype, value.shape or ()) for value in values)


@dataclass(frozen=True, slots=True)
class PreparedFile:
    """What prepare did, and the content key of the model file beside this fact."""

    prepared: prepare.Prepared
    file_key: str


@dataclass(frozen=True, slots=True)
class Variant:
    """A model file that computes what the prepared one does, its content key, and the line over the prepared one."""

    path: Path
    key: str
    plain: "Line"


# What lines over a model and its variants have in common, once one of them knows it.
_SHARED = ("model_key", "samples", "calibration_samples", "split", "schemes", "is_batched", "_prepared", "selected")


@dataclass
class Line:
    """One model with its data in one run folder. Facts are computed when they are first asked for."""

    store: Store
    path: Path
    sources: Sources
    settings: Settings
    target: Target
    workers: int
    progress: Progress
    memory: Memory = field(default_factory=lambda: Memory(default_limit()))
    notes: list[str] = field(default_factory=list)
    is_over: Callable[[], bool] = lambda: False  # asked between batches; then TimeUp is raised
    # Asked of the prices after racing.LOOKS samples whether they suffice; None: all scan samples are priced.
    is_settled: Callable[[suffix.Prices], bool] | None = None
    variant: Variant | None = None  # whose layers are calibrated, priced and quantized, in place of the prepared model

    @property
    def plain(self) -> "Line":
        """The line over the prepared model itself."""
        return self if self.variant is None else self.variant.plain

    def over(self, path: Path, key: str) -> "Line":
        """The same line over another model file with the same nodes, which computes the same."""
        other = replace(self, variant=Variant(path, key, self))
        other.__dict__.update({name: self.__dict__[name] for name in _SHARED if name in self.__dict__})
        return other

    def lay_aside(self) -> None:
        """Gives up what takes memory; it is made again when it is asked for."""
        for name in ("executor", "correction_batches"):
            self.__dict__.pop(name, None)

    # --- looked up or computed --------------------------------------------------------------------------------

    def fact(
        self,
        stage: str,
        key: str,
        cls: type[Fact],
        compute: Callable[[], Fact],
        is_lasting: Callable[[Fact], bool] = lambda fact: True,
    ) -> Fact:
        """The stored fact, or the computed one, stored. is_lasting: False for one to be computed anew if stored."""
        found = self.store.load(stage, key, cls)
        if found is None or not is_lasting(found):
            self.store.note("stage", f"{stage} began", {"key": key})
            compute_start = time.perf_counter()
            self.store.save(stage, key, compute())
            self.store.note("stage", f"{stage} done", {"seconds": round(time.perf_counter() - compute_start, 3)})
            found = self.store.load(stage, key, cls)  # fresh and resumed runs see the same values
            assert found is not None
        return found

    @cached_property
    def schemes(self) -> tuple[Scheme, ...]:
        return tuple(schemes.get(name).under(self.settings.formats) for name in self.settings.schemes)

    @property
    def numbers(self) -> dict[str, object]:
        """What a key holds of the schemes; of their formats nothing where they are the standard ones."""
        formats = self.settings.formats.numbers()
        versions = {scheme.name: scheme.version for scheme in self.schemes}
        return {"schemes": versions, **({"formats": formats} if formats else {})}

    @cached_property
    def model_key(self) -> str:
        return model_key(self.path)

    @cached_property
    def samples(self) -> Samples:
        return Cached(self.sources.samples, self.memory.samples)

    @cached_property
    def calibration_samples(self) -> Samples:
        own = self.sources.calibration
        return self.samples if own is None else Cached(own, self.memory.samples // 4)

    @cached_property
    def split(self) -> Split:
        total = len(self.samples)
        if self.settings.max_samples is not None:
            total = min(total, self.settings.max_samples)
        labels = self.samples.labels[:total] if self.samples.labels is not None else None
        own = 0 if self.sources.calibration is not None else None
        found = split(total, self.settings.seed, calibration=own, labels=labels)
        if self.sources.calibration is None:
            return found
        count = min(len(self.sources.calibration), 200)
        order = split_order(self.sources.calibration, count, self.settings.seed)
        return Split(calibration=order, search=found.search, final=found.final)

    def sample_key(self, indices: np.ndarray, samples: Samples | None = None) -> str:
        return content_key("samples", 1, {}, [(samples or self.samples).fingerprint(), array_key(indices)])

    @cached_property
    def _prepared(self) -> tuple[Path, prepare.Prepared, str]:
        indices = self.split.calibration[:CHECK_SAMPLES]
        feeds = [dict(self.calibration_samples.feed(int(i))) for i in indices]
        keys = [self.model_key, self.sample_key(indices, self.calibration_samples)]
        key = content_key("prepare", prepare.VERSION, {}, keys)
        path = self.store.path_for("prepare", key, ".onnx")

        def compute() -> PreparedFile:
            self.progress(Step("prepare", "cleaning the model and comparing it with the original"))
            with self.store.scratch("prepare") as folder:
                model, fact = prepare.prepare(open_model(self.path), feeds, file_bytes(self.path), folder)
                aside.save(model, folder / path.name)
                for file in folder.glob(f"{path.stem}.*"):
                    self.store.take_file(file, path.with_name(file.name))
            return PreparedFile(fact, model_key(path))

        def is_whole(found: PreparedFile) -> bool:
            try:
                return model_key(path) == found.file_key
            except (InputError, UnsupportedModel):
                return False

        return path, self.fact("prepare", key, PreparedFile, compute, is_whole).prepared, key

    @property
    def prepared(self) -> prepare.Prepared:
        return self._prepared[1]

    @cached_property
    def graph(self) -> Graph:
        return Graph(open_model(self.base_path))

    @cached_property
    def structure(self) -> Structure:
        return find_structure(self.graph)

    @cached_property
    def executor(self) -> Executor:
        weights = sum(layer.weight_bytes for layer in self.structure.layers)
        return Executor(self.graph, self.structure, self.memory.room(weights, len(self.schemes)))

    @cached_property
    def is_batched(self) -> bool:
        """Whether samples can be stacked on axis 0 without changing their outputs."""
        specs = input_specs(self.graph.model)
        if not specs or any(not spec.shape or isinstance(spec.shape[0], int) for spec in specs):
            return False
        indices = self.split.calibration[:CHECK_SAMPLES]
        single = [self.calibration_samples.feed(int(i)) for i in indices]
        if len(single) < 2 or any(single[0][k].shape != single[1][k].shape for k in single[0]):
            return False
        session = prepare.plain_session(self._prepared[0])
        try:
            together = session.run(None, {k: np.concatenate([f[k] for f in single]) for k in single[0]})
        except Exception:  # onnxruntime raises classes of its own without a common base
            return False
        alone = [session.run(None, dict(feed)) for feed in single]
        joined = [np.concatenate(parts) if parts[0].ndim else None for parts in zip(*alone, strict=True)]
        return all(
            b is not None and prepare.output_gap(a, b) <= prepare.RELATIVE_TOLERANCE
            for a, b in zip(together, joined, strict=True)
        )

    @cached_property
    def _sample_bytes(self) -> int:
        return max(1, self.executor.bytes_per_sample(self.calibration_samples.feed(int(self.split.calibration[0]))))

    @cached_property
    def batch(self) -> int:
        """Samples a batch of the layer-wise run."""
        return int(np.clip(self.memory.batch // self._sample_bytes, 1, BATCH)) if self.is_batched else 1

    @cached_property
    def correction_batches(self) -> list[Feeds]:
        """Feeds of the calibration samples on which biases are corrected."""
        live = max(1, self._sample_bytes // 8)  # of all values, few are live at once
        count = int(np.clip(self.memory.correction // live, 1, CORRECTION_SAMPLES))
        indices = self.split.calibration[:count]
        return [feeds for _, feeds in batches(self.calibration_samples, indices, self.batch)]

    def _batches(self, samples: Samples, indices: np.ndarray, stage: str, text: str) -> Iterator[tuple[Feeds, int]]:
        done, start = 0, time.perf_counter()
        for part, feeds in batches(samples, indices, self.batch):
            if self.is_over():
                raise TimeUp
            yield feeds, len(part)
            done += len(part)
            left = (time.perf_counter() - start) / done * (len(indices) - done)
            self.progress(Step(stage, text, done, len(indices), left))

    @cached_property
    def _calibration(self) -> tuple[calibrate.Calibration, str]:
        indices = self.split.calibration
        corrected = sum(
            next(iter(feeds.values())).shape[0] if self.is_batched else 1 for feeds in self.correction_batches
        )
        inputs = [self.base_key, self.sample_key(indices, self.calibration_samples)]
        method = self.settings.ranges
        versions: dict[str, object] = {"units": UNITS_VERSION, "mean_samples": corrected}
        if method != clipping.MINMAX:  # whose keys are as they were when there was no other
            versions["method"] = [clipping.VERSION, method.text]
        key = content_key("calibrate", calibrate.VERSION, versions, inputs)

        def compute() -> calibrate.Calibration:
            feeds = self._batches(self.calibration_samples, indices, "calibrate", "measuring ranges")
            return calibrate.calibrate(self.executor, feeds, corrected, method)

        return self.fact("calibrate", key, calibrate.Calibration, compute), key

    @property
    def calibration(self) -> calibrate.Calibration:
        return self._calibration[0]

    @property
    def is_calibrated(self) -> bool:
        """Whether `calibration` is at hand without computing."""
        return "_calibration" in self.__dict__

    @property
    def calibration_key(self) -> str:
        return self._calibration[1]

    @cached_property
    def options(self) -> Options:
        kept, by_hand = self.settings.keep_float, self.selected.kept
        return find_options(self.graph, self.structure, self.calibration, self.schemes, kept, by_hand)

    @cached_property
    def selected(self) -> Selected:
        """The layers that are kept float by hand. Raises UsageError for an entry that matches nothing."""
        if self.settings.selection == EVERYTHING:
            return NOTHING  # without preparing the model
        given = dict(self.prepared.given_names)
        return select_layers(self.settings.selection, self.path, self.graph, self.structure, given)

    @property
    def kept(self) -> dict[str, object]:
        """What a key holds of the layers that the user keeps float; nothing where there are none."""
        names = sorted({*self.settings.keep_float, *self.selected.kept})
        return {"kept": names} if names else {}

    @cached_property
    def corrections(self) -> weights.Corrections:
        """Of each layer alone; plans are corrected along the whole plan."""
        if not self.settings.bias_correction:
            return weights.NO_CORRECTIONS
        return weights.correct_biases(self.executor, self.calibration, self.schemes, self.options)

    def uncorrected(self, weight_type: str) -> weights.Ingredients:
        nothing = weights.NO_CORRECTIONS
        return weights.Ingredients(
            self.graph, self.structure, self.calibration, nothing, by_name(self.schemes), weight_type
        )

    def parts(self, weight_type: str = "s8") -> weights.Ingredients:
        return self.uncorrected(weight_type).with_corrections(self.corrections)

    @cached_property
    def float_parts(self) -> weights.Ingredients:
        """Enough for the plan that quantizes nothing, before anything is calibrated."""
        nothing = calibrate.Calibration({}, {}, {}, 0, ())
        return weights.Ingredients(
            self.graph, self.structure, nothing, weights.NO_CORRECTIONS, by_name(self.schemes), "s8"
        )

    @property
    def base_key(self) -> str:
        """Of the model that layers and tensors are of: the prepared one, or its variant."""
        return self._prepared[2] if self.variant is None else self.variant.key

    @property
    def base_path(self) -> Path:
        """Of the same model."""
        return self._prepared[0] if self.variant is None else self.variant.path

    @cached_property
    def costs(self) -> Costs:
        empty = writing.write_plan(self.parts(), writing.FLOAT_PLAN).ByteSize()
        return writing.count_bytes(self.parts(), self.options, empty)

    @cached_property
    def scan_indices(self) -> np.ndarray:
        return self.split.search[: self.settings.samples]

    @cached_property
    def prices(self) -> suffix.Prices:
        """Prices, one stored fact a batch: a killed scan goes on behind its last batch.

        When the time is over, those of the samples priced so far; TimeUp when there are none.
        """
        sources = suffix.find_sources(self.executor, self.options, self.schemes)
        is_screened = screen.is_wanted(self.settings.screen, len(sources))
        settings: Mapping[str, object] = {
            **self.numbers,
            "bias_correction": self.settings.bias_correction,
            "screen": [screen.VERSION, self.settings.seed] if is_screened else None,
            **self.kept,
        }
        rows = screen.Rows(self._rows(sources), self.settings.seed)
        found: list[suffix.Prices] = []
        first: list[str] = []
        done, start = 0, time.perf_counter()
        limit = self.batch if self.is_settled is None else min(self.batch, LOOKS[0])
        for part, feeds in batches(self.samples, self.scan_indices, limit):
            keys = [self._calibration[1], self.sample_key(part), *first]
            key = content_key("sensitivity", suffix.VERSION, settings, keys)

            def compute(feeds: Feeds = feeds, count: int = len(part), done: int = done) -> suffix.Prices:
                def tell(number: int) -> None:
                    share = (done + count * number / len(sources)) / len(self.scan_indices)
                    left = (time.perf_counter() - start) * (1 - share) / share if share > 0 else None
                    text = f"pricing {len(sources)} sources on {len(self.scan_indices)} samples"
                    self.progress(Step("sensitivity", text, round(1000 * share), 1000, left))
                    if self.is_over():
                        raise TimeUp

                probes = suffix.Probes(
                    self.executor, feeds, count, self.calibration, self.corrections, by_name(self.schemes), self.workers
                )
                if is_screened:
                    return screen.screen_batch(probes, sources, rows, found[0] if found else None, tell)
                return suffix.Prices(tuple(sources), *probes.prices(sources, tell))

            try:
                found.append(self.fact("sensitivity", key, suffix.Prices, compute))
            except TimeUp:
                if not found:
                    raise
                self.notes.append(f"the scan was ended by the time limit after {done} samples")
                break
            done += len(part)
            first = first or ([key] if is_screened else [])  # it chooses what is exact in those behind it
            if self.is_settled is not None and done in LOOKS and self.is_settled(suffix.join(found)):
                break
        reason = refusal(self.executor)
        if reason is not None:  # no note of the report: a resumed run whose prices are stored would not know
            self.store.note("scan", "layer by layer, which takes longer and gives the same prices", {"reason": reason})
        screen.forget(self.executor)
        prices = suffix.join(found)
        self.notes += [note for note in [screen.verdict(prices)] if note is not None]
        return prices

    def _rows(self, sources: Sequence[suffix.Source]) -> tuple[tuple[int, ...], ...]:
        """For each layer under each scheme, the sources that it switches on, as `Prices.switched` has them."""
        index = {(source.kind, source.owner, source.form): number for number, source in enumerate(sources)}
        schemes, found = by_name(self.schemes), []
        for layer in self.structure.quantizable:
            for scheme in self.options.schemes.get(layer.name, ()):
                names = [("tensor", *pair) for pair in forced_tensors(self.graph, layer, schemes[scheme])]
                found.append(tuple(index[name] for name in [*names, ("weight", layer.name, scheme)] if name in index))
        return tuple(found)


def split_order(samples: Samples, count: int, seed: int) -> np.ndarray:
    """The first `count` of a seeded order of separate calibration samples, class shares kept where labels are."""
    total = len(samples)
    if total < 4:
        raise InputError("at least 4 calibration samples", f"{total}", "Give more calibration data.")
    if samples.labels is None or total < 16:
        order = np.random.default_rng(seed).permutation(total).astype(np.int64)
    else:
        drawn = split(total, seed, calibration=0, labels=samples.labels)
        order = np.concatenate([drawn.search, drawn.final])
    return order[:count]
