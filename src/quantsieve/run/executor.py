"""The whole line: prices, plans, candidates on search samples, refinement, finalists on final samples, a summary.

What decides: the squared error of the logits on search samples, with size; a handful of label flips never chooses.
Final samples are touched once, by what survived. Everything found so far is on disk at any moment; a limit or Ctrl-C
ends the search early, and the same command goes on from there.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from quantsieve.evaluation import Failed, Measured
from quantsieve.front import Candidate, find_front, recommend
from quantsieve.model.execute import OWN_RANGE
from quantsieve.plan import BIAS, EQUALIZED, Plan, full_plan, nothing_to_quantize
from quantsieve.reports.summary import LayerFacts, Prediction, Price, Splits, Summary
from quantsieve.run.equalizing import settle
from quantsieve.run.line import Line, TimeUp
from quantsieve.run.pace import RUNS, Seen, alternating, timed_costs
from quantsieve.run.progress import Step
from quantsieve.run.spec import Limits
from quantsieve.run.trials import Built, Deadline, Trials, same_samples
from quantsieve.schemes._static import by_name
from quantsieve.search.milp import cheapest_noise, fastest
from quantsieve.search.mincut import hull
from quantsieve.search.prices import Accounts, Costs, Problem, make_problem
from quantsieve.sensitivity.interval import half_width, rank_correlation
from quantsieve.targets.base import TargetFailure
from quantsieve.targets.timing import summarize
from quantsieve.tasks import get as get_task

Stopped = Literal["done", "timeout", "max trials", "interrupted"]

# Shares of full int8's size reduction at which plans are asked for: dense where the trade is decided.
SHARES = (0.3, 0.5, 0.65, 0.75, 0.83, 0.88, 0.92, 0.95, 0.97, 0.98, 0.985, 0.99, 0.995)
# Shares of the most time that can be won at which plans are asked for, at this share of the size reduction, and the
# least that is worth it, of float's time.
FAST_SHARES = (1.0, 0.97, 0.9, 0.75, 0.5)
FAST_SIZE = 0.99
GAIN = 0.03
FAST = "programme, fast"
REFINED = 4  # plans put into the widest gaps once the first are measured
FINALISTS = 18
SEARCH_SHARE = 0.7  # of a timeout; the rest is for the finalists
ALWAYS_FINISHED = 2  # finalists that are measured even when the time is over: float, and one to recommend
TIMING_S = (30.0, 10.0, 3.0)  # most seconds of timing, the first that is left; few, since a fact's key holds it
MSE_RATIO_LIMIT = 2.0  # measured over simulated: above it the file does not do what was simulated


@dataclass(slots=True)
class Trial:
    """A candidate under way."""

    plan: Plan
    origin: str
    predicted: float | None
    built: Built
    search: Measured | Failed | None = None
    final: Measured | Failed | None = None
    ran: Mapping[str, str] = field(default_factory=dict)
    ms: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def search_mse(self) -> float:
        return self.search.mse if isinstance(self.search, Measured) else float("inf")


class Search:
    """One tune: holds the trials and the reason why it stopped."""

    def __init__(self, line: Line, limits: Limits, deadline: Deadline):
        self.line = line
        self.limits = limits
        self.deadline = deadline
        self.trials = Trials(line)
        self.done: dict[str, Trial] = {}
        self.stopped: Stopped = "done"
        self.full_bytes = 0
        self.float_built: Built | None = None
        self.problem: Problem | None = None
        self.float_ms = 0.0  # of all kernels, where the search knows times

    def run(self) -> Summary:
        """Walk the line as far as the limits let it. Ctrl-C ends it with what is there; it is passed on where
        nothing is, for a summary would first have to do the work that was interrupted."""
        self.line.is_over = lambda: self.deadline.is_over(SEARCH_SHARE)
        try:
            self._walk_in_time()
        except KeyboardInterrupt:
            if not self.done:
                raise
            self.stopped = "interrupted"
        return self.summary()

    def _walk_in_time(self) -> None:
        try:
            self._walk()
        except TimeUp:
            self.stopped = "timeout"
            self._finish()

    def _walk(self) -> None:
        line = self.line
        self._try(Plan({}), "float", None)
        line.progress(Step("final", "the float model on the final samples"))
        self.trials.reference("final")  # float outputs that are no numbers are refused before the work
        line.progress(Step("calibrate", "measuring ranges"))
        if not line.options.schemes:
            line.notes.append(nothing_to_quantize(line.options))
            self._finish()
            return
        self.line = self.trials.line = line = settle(line, self.trials)
        for plan, origin in self._full():  # before the scan: an early end leaves them
            if self._must_stop():
                self._finish()
                return
            self._try(plan, origin, None)
        accounts = Accounts(line.prices, self._costs(), line.settings.bias_correction)
        problem = make_problem(line.graph, line.structure, line.options, by_name(line.schemes), accounts)
        self.problem = problem
        for trial in self.done.values():
            if trial.plan.quantized():
                trial.predicted = problem.predict(trial.plan).noise
        for plan, origin in self._queue(problem):
            if self._must_stop():
                break
            self._try(plan, origin, problem)
        if self.stopped == "done":
            for plan in self._gaps(problem):
                if self._must_stop():
                    break
                self._try(plan, "programme, refined", problem)
        self._finish()

    def _costs(self) -> Costs:
        """With times where schemes of one size differ in speed: where they have activations of several formats."""
        line = self.line
        if len({scheme.activation for scheme in line.schemes}) < 2:
            return line.costs
        line.progress(Step("search", "where the time goes"))
        plans = [Plan({}), *(plan for plan, _ in self._full())]
        for form in dict.fromkeys(scheme.activation for scheme in line.schemes):
            scheme = next(scheme.name for scheme in line.schemes if scheme.activation == form)
            if form is not None and form not in OWN_RANGE:
                plans += alternating(line.options, replace(full_plan(line.options, scheme), repairs=self.base), scheme)
        try:
            seen = []
            for plan in plans:
                built = self.trials.build(plan)
                seen.append(Seen(plan, line.store.root / built.path, self.trials.profile(built, RUNS)))
        except TargetFailure as failure:
            line.notes.append(f"times of layers are not known to the search: {failure.reason}")
            return line.costs
        self.float_ms = seen[0].profile.total
        return timed_costs(line.costs, line.graph, line.structure, line.options, seen)

    # --- which plans ------------------------------------------------------------------------------------------

    @property
    def base(self) -> tuple[str, ...]:
        """What is mended in the model that all plans are made of."""
        return () if self.line.variant is None else (EQUALIZED,)

    @property
    def repairs(self) -> tuple[str, ...]:
        return (*((BIAS,) if self.line.settings.bias_correction else ()), *self.base)

    def _full(self) -> Iterator[tuple[Plan, str]]:
        for name in self.line.settings.schemes:
            yield replace(full_plan(self.line.options, name), repairs=self.repairs), f"full {name}"

    def _queue(self, problem: Problem) -> Iterator[tuple[Plan, str]]:
        """Plans in the order in which they are worth trying, so that an early end leaves a useful front."""
        options, names = self.line.options, self.line.settings.schemes
        programme = list(self._programme(problem))
        middle = len(programme) // 2
        yield from programme[middle:]
        yield from programme[:middle]
        yield from self._fast(problem)
        yield from self._baselines(problem)
        if BIAS in self.repairs:
            yield replace(full_plan(options, names[0]), repairs=self.base), f"full {names[0]}, uncorrected"
        if self.base:
            bias = tuple(repair for repair in self.repairs if repair not in self.base)
            for name in names:
                yield replace(full_plan(options, name), repairs=bias), f"full {name}, not equalized"

    def _programme(self, problem: Problem) -> Iterator[tuple[Plan, str]]:
        """Plans for shares of the size reduction, by integer programme; then hull plans near the small end."""
        smallest = min(problem.predict(plan).bytes_change for plan in hull(problem, limit=3))
        for share in SHARES:
            plan = cheapest_noise(problem, smallest * share)
            if plan is not None:
                yield replace(plan, repairs=self.repairs), "programme"
        yield replace(hull(problem, limit=2)[0], repairs=self.repairs), "programme"

    def _fast(self, problem: Problem) -> Iterator[tuple[Plan, str]]:
        """Plans of least noise that are about as small and as fast as any; nothing where no time is to be won."""
        best = problem.predict(fastest(problem)).ms_change
        if best >= -GAIN * self.float_ms:
            return
        smallest = min(problem.predict(plan).bytes_change for plan in hull(problem, limit=3))
        for share in FAST_SHARES:
            plan = cheapest_noise(problem, smallest * FAST_SIZE, best * share)
            if plan is not None:
                yield replace(plan, repairs=self.repairs), FAST

    def _baselines(self, problem: Problem) -> Iterator[tuple[Plan, str]]:
        """Cheap plans that the programme has to beat: first k float, last k float, a ranking by SQNR."""
        weighted = [layer.name for layer in self.line.structure.quantizable if layer.weight is not None]
        weighted = [name for name in weighted if name in self.line.options.schemes]
        prices = dict(zip(problem.layers, problem.layer_noise, strict=True))
        ranked = sorted(weighted, key=lambda name: -max(prices[name]))  # lowest SQNR at the output first
        base = full_plan(self.line.options, self.line.settings.schemes[-1])
        counts = sorted({max(1, round(len(weighted) * share)) for share in (0.04, 0.1, 0.25)})
        for text, order in (
            ("first {} float", weighted),
            ("last {} float", weighted[::-1]),
            ("ranking, {} float", ranked),
        ):
            for count in counts:
                kept = set(order[:count])
                schemes = {layer: s for layer, s in base.schemes.items() if layer not in kept}
                yield Plan(schemes, self.repairs), text.format(count)

    def _gaps(self, problem: Problem) -> Iterator[Plan]:
        """Plans between neighbours on the measured front where the error rises most for the bytes."""
        front = self._search_front()
        steps = []
        for small, large in pairwise(front):
            width = (large.built.size_bytes - small.built.size_bytes) / max(1, self._float_bytes - self.full_bytes)
            rise = np.sqrt(min(small.search_mse, 4.0)) - np.sqrt(min(large.search_mse, 4.0))
            steps.append((width * rise, small, large))
        steps.sort(key=lambda step: -step[0])
        for _, small, large in steps[:REFINED]:
            sizes = [problem.predict(trial.plan).bytes_change for trial in (small, large)]
            plan = cheapest_noise(problem, sum(sizes) / 2)
            if plan is not None:
                yield replace(plan, repairs=self.repairs)

    # --- trying -----------------------------------------------------------------------------------------------

    def _must_stop(self) -> bool:
        if self.deadline.is_over(SEARCH_SHARE):
            self.stopped = "timeout"
        elif self.limits.max_trials is not None and len(self.done) > self.limits.max_trials:
            self.stopped = "max trials"  # float, which is the reference, does not count
        return self.stopped != "done"

    def _try(self, plan: Plan, origin: str, problem: Problem | None) -> None:
        if plan.id in self.done:
            return
        line = self.line
        line.progress(Step("search", f"candidate {len(self.done) + 1}: {origin}", len(self.done), 0))
        built = self.trials.build(plan)
        is_priced = problem is not None and set(self.base) <= {*plan.repairs}  # prices are of the model as it is now
        predicted = problem.predict(plan).noise if problem is not None and is_priced else None
        trial = Trial(plan, origin, predicted, built)
        trial.search = self.trials.measure(built, "search")
        self.done[plan.id] = trial
        if origin == "float":
            self.float_built = built
        is_full = origin in [f"full {name}" for name in line.settings.schemes]
        if is_full and (not self.full_bytes or built.size_bytes < self.full_bytes):
            self.full_bytes = built.size_bytes
        best = min(self.done.values(), key=lambda t: (t.search_mse > 0.05, t.built.size_bytes))
        text = f"best so far on search samples: plans/{best.plan.id}/model.onnx ({best.origin})"
        line.store.note("trial", origin, {"id": plan.id, "bytes": built.size_bytes, "mse": _finite(trial.search_mse)})
        line.store.save_file("best.json", _json({"id": best.plan.id, "text": text}))

    @property
    def _float_bytes(self) -> int:
        return self.float_built.size_bytes if self.float_built is not None else 0

    def _search_front(self) -> list[Trial]:
        """Undominated in size and squared error on search samples, smallest first."""
        good = [t for t in self.done.values() if isinstance(t.search, Measured) and not t.search.num_bad]
        front: list[Trial] = []
        for trial in sorted(good, key=lambda t: (t.built.size_bytes, t.search_mse)):
            if not front or trial.search_mse < front[-1].search_mse:
                front.append(trial)
        return front

    def _finalists(self) -> list[Trial]:
        """The search front, thinned where it is dense, with both ends: float and every full int8."""
        front = self._search_front()
        while len(front) > FINALISTS:
            gaps = [self._distance(front[i - 1], front[i + 1]) for i in range(1, len(front) - 1)]
            del front[1 + int(np.argmin(gaps))]
        ends = [t for t in self.done.values() if t.origin == "float" or t.origin.startswith("full ")]
        return list({t.plan.id: t for t in [*front, *self._fast_front(), *ends]}.values())

    def _fast_front(self) -> list[Trial]:
        """Undominated in predicted time and squared error on search samples, fastest first, as far as they win a good
        part of the most that can be won; empty without times."""
        if not self.float_ms or self.problem is None:
            return []
        good = [t for t in self.done.values() if isinstance(t.search, Measured) and not t.search.num_bad]
        changes = {t.plan.id: self.problem.predict(t.plan).ms_change for t in good}
        least = FAST_SHARES[-1] * min(-GAIN * self.float_ms, *changes.values())
        front: list[Trial] = []
        for trial in sorted(good, key=lambda t: (changes[t.plan.id], t.search_mse)):
            if changes[trial.plan.id] <= least and (not front or trial.search_mse < front[-1].search_mse):
                front.append(trial)
        return front

    def _distance(self, small: Trial, large: Trial) -> float:
        """How far two plans of the front lie apart: in bytes and in error, each as a share of the whole range."""
        errors = [np.sqrt(min(trial.search_mse, 4.0)) for trial in (small, large)]
        worst = max(np.sqrt(min(t.search_mse, 4.0)) for t in self._search_front()) or 1.0
        width = (large.built.size_bytes - small.built.size_bytes) / max(1, self._float_bytes - self.full_bytes)
        return float(width + (errors[0] - errors[1]) / worst)

    def _most_useful_first(self, finalists: Sequence[Trial]) -> list[Trial]:
        """Float, then what may be recommended by its loss on search samples, smallest first, then the others: where
        the time ends among them, the recommended model is most likely found."""

        def rank(trial: Trial) -> tuple[bool, bool, int]:
            is_within = isinstance(trial.search, Measured) and trial.search.loss().value <= self.limits.max_drop
            return trial.origin != "float", not is_within, trial.built.size_bytes

        return sorted(finalists, key=rank)

    def _finish(self) -> None:
        """Final samples, read-back and latency for the survivors, as far as the time allows."""
        finalists = self._most_useful_first(self._finalists())
        for number, trial in enumerate(finalists):
            if number >= ALWAYS_FINISHED and self.deadline.is_over():
                self.stopped = "timeout"
                break
            self.line.progress(Step("final", f"final samples: {trial.origin}", number, len(finalists)))
            trial.final = self.trials.measure(trial.built, "final")
            found = self.trials.read_back(trial.built)
            trial.ran = found.precision
            trial.notes = (
                *trial.notes,
                *((f"could not be read back: {found.reason}",) if found.reason else ()),
            )
        running = {t.plan.id: t.built for t in finalists if isinstance(t.final, Measured)}
        if running:
            self.line.progress(Step("latency", f"timing {len(running)} models side by side", 0, 1))
            left = self.deadline.left()
            times = self.trials.time(running, next((s for s in TIMING_S if s <= left), TIMING_S[-1]))
            for id, ms in times.ms.items():
                self.done[id].ms = tuple(ms)
            if times.reason:
                self.line.notes.append(f"latency could not be measured: {times.reason}")
            self.line.progress(Step("latency", f"timing {len(running)} models side by side", 1, 1))

    # --- the summary ------------------------------------------------------------------------------------------

    def summary(self) -> Summary:
        line = self.line
        candidates = tuple(self._candidate(trial) for trial in self.done.values())
        task = get_task(self.trials.task)
        prepared = line.prepared
        return Summary(
            model_file=line.path.name,
            model_key=line.model_key,
            metric=task.name,
            metric_text=task.description,
            data=line.sources.samples.name,
            synthetic=line.sources.synthetic,
            splits=Splits(len(line.split.calibration), len(self.trials.exams["search"].indices), len(line.split.final)),
            seed=line.settings.seed,
            environment={**self.trials.environment, "target": line.target.name},
            saturation=self._saturation_text(),
            layers=self._layer_facts(),
            prices=self._prices(),
            candidates=candidates,
            files={trial.plan.id: trial.built.path for trial in self.done.values()},
            front=find_front(candidates),
            recommendation=recommend(candidates, self.limits.max_drop, self.limits.confident),
            max_drop=self.limits.max_drop,
            confident=self.limits.confident,
            float_bytes=self._float_bytes,
            full_bytes=self.full_bytes or self._float_bytes,
            schemes=line.settings.schemes,
            settings={
                "weight_type": self.trials.weight_type,
                "bias_correction": line.settings.bias_correction,
                "equalized": line.variant is not None,
                "calibration_method": line.settings.ranges.text,
                "scan_samples": 0 if self.problem is None else line.prices.num_samples,
                "prepare": prepared.steps,
            },
            elapsed_s=self.deadline.elapsed(),
            stopped=self.stopped,
            prediction=_prediction(candidates),
            notes=(
                *prepared.notes,
                *(line.calibration.notes if line.is_calibrated else ()),
                *line.sources.notes(),
                *dict.fromkeys(line.notes),
            ),
        )

    def _candidate(self, trial: Trial) -> Candidate:
        simulated, measured = same_samples(trial.built, trial.search)
        notes = list(trial.notes)
        if simulated and measured and measured > MSE_RATIO_LIMIT * simulated:
            reason = self.trials.drift_reason()
            notes.append(f"measured squared error is {measured / simulated:.1f} times the simulated one: {reason}")
        return Candidate(
            id=trial.plan.id,
            origin=trial.origin,
            plan=trial.plan,
            size_bytes=trial.built.size_bytes,
            search=trial.search,
            final=trial.final,
            latency=summarize(trial.ms) if trial.ms else None,
            latency_ms=trial.ms,
            predicted_mse=trial.predicted,
            simulated_mse=simulated,
            measured_mse=measured,
            ran=trial.ran,
            notes=tuple(notes),
        )

    def _saturation_text(self) -> str:
        found, chosen = self.trials.saturation, self.trials.weight_type
        here = "could not be probed here"
        if found is not None:
            verdict = "saturate" if found.saturates else "are exact"
            here = f"{verdict} on this machine (probe: {found.s8:.3f} of the exact sum)"
        elsewhere = {
            "s8": "On x86-64 processors without VNNI they saturate: for those, tune with --weight-type u8.",
            "u8": "The files hold u8 weights, which are exact with and without VNNI, and slower than s8 where VNNI is.",
            "s7": "The files hold weights of half their range, which are exact with and without VNNI.",
        }[chosen]
        return f"Signed 8-bit weights {here}. {elsewhere}"

    def _layer_facts(self) -> tuple[LayerFacts, ...]:
        refusals = self.line.options.refusals if self.line.is_calibrated else {}
        return tuple(
            LayerFacts(x.name, x.op_type, x.num_params, x.weight_bytes, x.macs, refusals.get(x.name))
            for x in self.line.structure.layers
        )

    def _prices(self) -> tuple[Price, ...]:
        """Of each layer alone: its weights and the tensors that it forces on."""
        return () if self.problem is None else layer_prices(self.line, self.problem)


def layer_prices(line: Line, problem: Problem) -> tuple[Price, ...]:
    """What quantizing each layer alone does, by scheme: the sum of the sources that it switches on."""
    found = []
    for layer, schemes, links in zip(problem.layers, problem.options, problem.links, strict=True):
        for scheme, own in zip(schemes, links, strict=True):
            forced = [problem.tensors[t] for t in own]
            sums = line.prices.sums(layer, scheme, forced)
            doubt = line.prices.doubt(line.prices.switched(layer, scheme, forced))
            mean, half = float(sums.mean()), float(half_width(sums, doubt))
            found.append(Price(layer, scheme, mean, max(0.0, mean - half), mean + half))
    return tuple(found)


def _prediction(candidates: Sequence[Candidate]) -> Prediction | None:
    pairs = [
        (c.predicted_mse, c.final.mse)
        for c in candidates
        if c.predicted_mse and isinstance(c.final, Measured) and np.isfinite(c.final.mse) and c.final.mse > 0
        and "uncorrected" not in c.origin
    ]  # fmt: skip
    if not pairs:
        return None
    predicted, measured = (np.asarray(side) for side in zip(*pairs, strict=True))
    rank = rank_correlation(predicted, measured) if len(pairs) > 2 else None
    return Prediction(float(np.median(predicted / measured)), rank, len(pairs))


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _json(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, indent=1).encode()
