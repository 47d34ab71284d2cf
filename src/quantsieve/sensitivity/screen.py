"""Prices of large graphs from gradients: each source costs a local run, only few of them a run to the outputs.

For the error d_i that source i leaves at its own value, the outputs change by about J d_i, where J is the derivative
of the outputs. With vectors u_k whose outer products sum to the identity (the outputs' axes, or `VECTORS` random signs
where there are more outputs), |J d_i|^2 is about sum_k <J^T u_k, d_i>^2, and J^T u_k at every value comes from one run
of the model backwards. So a scan costs `VECTORS` backward runs, and for each source the layer that it changes.

A screened price is that number times a gain of its kind. Gains come from sources drawn at random that are also priced
exactly, and so does the verdict: each is predicted with the gains that the others give, and where these predictions
have another order than the exact prices (`RANK`), or are far from them (`SPREAD`), all sources are priced exactly.
The worst rows are exact in any case.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
from onnxruntime import OrtValue

from quantsieve.model.execute import Executor
from quantsieve.sensitivity.gradient import Backward, Forward, NoGradient
from quantsieve.sensitivity.interval import rank_correlation
from quantsieve.sensitivity.racing import TOP
from quantsieve.sensitivity.suffix import Prices, Probes, Screening, Source, padded

VERSION = 1
LEAST = 400  # sources from which on `auto` screens: below it an exact scan costs about as much
RANK = 0.95  # least rank correlation of screened prices
SPREAD = 0.7  # largest spread of their logarithms, a factor of 2: where errors saturate, ranks alone hide a lost top
VECTORS = 16
MEMORY = 512 << 20  # bytes of cotangents
CHECKED = 48  # sources drawn
OF_A_KIND = 4  # least number of them that a kind's own gain is measured on
TOP_ROWS = 2 * TOP  # rows that are exact in any case
MOST_ROWS = 3 * TOP  # rows that are exact at most, where more may belong to the top

Values = dict[str, np.ndarray]
Tell = Callable[[int], None]


def is_wanted(mode: str, num_sources: int) -> bool:
    """Whether a scan is to be screened. mode: 'auto', 'on' or 'off'."""
    return mode == "on" or (mode == "auto" and num_sources >= LEAST)


def verdict(prices: Prices) -> str | None:
    """How the prices were found, in a sentence; None where all were to be exact."""
    found = prices.screening
    if found is None:
        return None
    if found.refusal is not None:
        return f"all sources were priced exactly, the screen cannot be used: {found.refusal}"
    told = "no order" if found.rank is None else f"rank correlation {found.rank:.3f}"
    off = "" if found.spread_checked is None else f", typically off by a factor {np.exp(found.spread_checked):.2f}"
    text = f"of {len(found.checked)} sources both screened and priced exactly: {told}{off}"
    if found.is_exact.all():
        return f"all sources were priced exactly, the screen is not good enough here ({text})"
    return f"{len(found.is_exact) - int(found.is_exact.sum())} of {len(found.is_exact)} sources were screened ({text})"


@dataclass(frozen=True, slots=True)
class Rows:
    """What is ranked in the end: for each row, the sources that it sums. seed: of the drawn sources."""

    sources: tuple[tuple[int, ...], ...]
    seed: int = 0


def screen_batch(
    probes: Probes,
    sources: Sequence[Source],
    rows: Rows,
    before: Prices | None = None,
    tell: Tell = lambda done: None,
) -> Prices:
    """Prices of all sources on one batch, most of them screened where that is found to be good enough.

    before: of the first batch of the same scan, whose choice of exact sources is kept; all are exact where they were
    there. tell: is called with the number of sources done so far, as far as it can be told.
    """
    kept = None if before is None else before.screening
    if kept is not None and kept.is_exact.all():
        return replace(Prices(tuple(sources), *probes.prices(sources, tell)), screening=kept)
    try:
        found = estimate(probes, sources, lambda done: tell(done // 2))
    except NoGradient as reason:
        everyone = np.ones(len(sources), bool)
        nothing = Screening(everyone, np.zeros(len(sources)), np.zeros(0, np.int64), None, None, str(reason))
        return replace(Prices(tuple(sources), *probes.prices(sources, tell)), screening=nothing)
    scan = _Scan(probes, sources, found, lambda done: tell((len(sources) + done) // 2))
    known = np.flatnonzero(found.is_known)
    checked = _drawn(known, rows.seed) if kept is None else np.intersect1d(kept.checked, known)
    scan.price(np.flatnonzero(~found.is_known))
    scan.price(checked)
    gains, spread, rank = _measure(checked, sources, found.mean(), scan.means())
    if rank is None or rank < RANK or spread > SPREAD:
        scan.price(np.arange(len(sources)))
    elif kept is not None:
        scan.price(np.flatnonzero(kept.is_exact))
    else:
        scan.price(_top(rows, scan.mixed(gains), scan.is_exact, spread))
    spreads = np.where(scan.is_exact, 0.0, spread)
    return scan.prices_with(gains, Screening(scan.is_exact, spreads, checked, rank, spread))


@dataclass(frozen=True, slots=True)
class Estimates:
    """errors: float64 [sources, samples] without gains; mean_vectors: float32 [sources, vectors]."""

    errors: np.ndarray
    mean_vectors: np.ndarray

    def mean(self) -> np.ndarray:
        return self.errors.mean(axis=1)

    @property
    def is_known(self) -> np.ndarray:
        """bool [sources]: not of those that the gradient does not see."""
        mean = self.mean()
        return np.isfinite(mean) & (mean > 0)


# --- estimates by gradients -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Kept:
    """Sessions of one executor; the backward one for the shapes of `key`."""

    forward: Forward
    key: object = None
    backward: Backward | None = None


_kept: WeakKeyDictionary[Executor, _Kept] = WeakKeyDictionary()


def forget(executor: Executor) -> None:
    """Give the sessions of an executor back, which hold its weights twice; they are made anew when they are needed."""
    _kept.pop(executor, None)


def estimate(probes: Probes, sources: Sequence[Source], tell: Tell = lambda done: None) -> Estimates:
    """First order prices of all sources. Raises NoGradient.

    Memory: the weights twice; values, errors of all sources and a worker's cotangents, on so few samples at once that
    they take about `MEMORY`.
    """
    by_root: dict[str, list[int]] = {}
    for index, source in enumerate(sources):
        by_root.setdefault(_root(probes, source), []).append(index)
    squares, means, done = [], np.zeros((len(sources), VECTORS)), 0
    for feeds, count in _chunks(probes, 2 + len(sources) / len(by_root) + probes.workers):

        def say(share: float, done: int = done, count: int = count) -> None:
            tell(int((done + count * share) / probes.num_samples * len(sources)))

        part = np.full((len(sources), count), np.nan)
        products = _chunk(probes, {root: [sources[i] for i in own] for root, own in by_root.items()}, feeds, count, say)
        for root, found in products.items():
            part[by_root[root]] = np.square(found).sum(axis=0)
            means[by_root[root], : len(found)] += found.sum(axis=2).T / probes.num_samples
        squares.append(part)
        done += count
    return Estimates(np.concatenate(squares, axis=1), means.astype(np.float32))


def _chunk(
    probes: Probes, groups: Mapping[str, Sequence[Source]], feeds: Values, count: int, tell: Callable[[float], None]
) -> Values:
    """<J^T u_k, d_i>, float64 [vectors, sources, samples], of the sources at each root that is known.
    tell: is called with the share that is done."""
    backward, values, seeds = _open(probes, feeds, count, tuple(groups))
    roots = [root for root in backward.reached if values[root].size % count == 0]
    errors: Values = {}
    products: dict[str, list[np.ndarray]] = {root: [] for root in roots}
    with ThreadPoolExecutor(max_workers=probes.workers) as pool:
        for made in pool.map(lambda root: _errors(probes, groups[root], values, count), roots):
            errors[roots[len(errors)]] = made
            tell(len(errors) / len(roots) / 2)
        for index, found in enumerate(pool.map(partial(_products, backward, values, errors), seeds)):
            for root, one in found.items():
                products[root].append(one)
            tell(0.5 + (index + 1) / len(seeds) / 2)
    return {root: np.stack(found) for root, found in products.items()}


def _root(probes: Probes, source: Source) -> str:
    """The value at which the error of a source is taken."""
    return source.owner if source.kind == "tensor" else probes.layers[source.owner].output


def _chunks(probes: Probes, passes: float) -> Iterator[tuple[Values, int]]:
    """Feeds in equal parts that take `MEMORY` at most, each `passes` times its values; whole where samples cannot be
    told apart."""
    count, feeds = probes.num_samples, dict(probes.feeds)
    if count == 1 or any(array.shape[:1] != (count,) for array in feeds.values()):
        yield feeds, count
        return
    one = probes.executor.bytes_per_sample({name: array[:1] for name, array in feeds.items()})
    most = max(1, int(MEMORY / max(1, one * passes)))
    size = max(part for part in range(1, count + 1) if count % part == 0 and part <= most)
    for start in range(0, count, size):
        yield {name: array[start : start + size] for name, array in feeds.items()}, size


def _open(
    probes: Probes, feeds: Values, count: int, roots: tuple[str, ...]
) -> tuple[Backward, Values, tuple[Values, ...]]:
    """(backward run, all values of the samples, the vectors by output). Raises NoGradient."""
    executor, outputs = probes.executor, tuple(probes.reference)
    kept = _kept.get(executor)
    if kept is None:
        kept = _kept[executor] = _Kept(Forward(executor))
    values = kept.forward.run(feeds)
    key = (roots, *((name, values[name].shape) for name in feeds))
    if kept.backward is None or kept.key != key:
        kept.backward, kept.key = Backward(executor, values, roots, outputs), key
    return kept.backward, values, tuple(_seeds(values, outputs, probes.calibration.output_variance, count))


def _seeds(values: Values, outputs: Sequence[str], variance: Mapping[str, float], count: int) -> Iterator[Values]:
    """Each vector u_k by output, in the scale of the error vectors (see `suffix.py`), the same for every sample."""
    shapes = {name: values[name].shape for name in outputs}
    sizes = [values[name].size // count for name in outputs]
    if any(values[name].size % count for name in outputs):
        raise NoGradient("an output has no axis of samples")
    total = sum(sizes)
    if total <= VECTORS:
        vectors = np.eye(total, dtype=np.float32)
    else:
        signs = np.random.default_rng(0).integers(0, 2, (VECTORS, total)) * 2 - 1
        vectors = (signs / np.sqrt(VECTORS)).astype(np.float32)
    scales = [1 / np.sqrt(variance[name] * size * len(outputs)) for name, size in zip(outputs, sizes, strict=True)]
    for vector in vectors:
        found, start = {}, 0
        for name, size, scale in zip(outputs, sizes, scales, strict=True):
            part = np.tile(vector[start : start + size] * np.float32(scale), count)
            found[name], start = part.reshape(shapes[name]), start + size
        yield found


def _errors(probes: Probes, sources: Sequence[Source], values: Values, count: int) -> np.ndarray:
    """What some sources of one root change it by, float32 [sources, samples, elements]."""
    return np.stack([_error(probes, source, values).reshape(count, -1) for source in sources])


def _error(probes: Probes, source: Source, values: Values) -> np.ndarray:
    """The change of a source's own value; nan where its layer makes several."""
    root, executor = _root(probes, source), probes.executor
    if source.kind == "tensor":
        return executor.rounded(values[root], probes.affine(source)) - values[root]
    index = executor.position[source.owner]
    reads = {name: OrtValue.ortvalue_from_numpy(values[name]) for name in executor.reads(index)}
    made = executor.made(index, reads, probes.weights(source))
    return made[root].numpy() - values[root] if len(made) == 1 else np.full_like(values[root], np.nan)


def _products(backward: Backward, values: Values, errors: Values, seed: Values) -> Values:
    """<J^T u, d_i> of all sources by root, float64 [sources, samples]."""
    cotangents = backward.run(values, seed)
    return {
        root: np.matmul(error[:, :, None, :], cotangents[root].reshape(*error.shape[1:], 1))[:, :, 0, 0].astype(float)
        for root, error in errors.items()
    }


# --- exact prices, gains and the verdict ----------------------------------------------------------------------------


class _Scan:
    """Exact prices found so far, estimates for the others."""

    def __init__(self, probes: Probes, sources: Sequence[Source], estimates: Estimates, tell: Tell):
        self._probes = probes
        self._sources = sources
        self._estimates = estimates
        self._tell = tell
        self.is_exact = np.zeros(len(sources), bool)
        self._errors = np.zeros_like(estimates.errors)
        self._vectors = np.zeros((len(sources), 0), np.float32)

    def price(self, wanted: np.ndarray) -> None:
        """Price those of the sources that are not yet exact."""
        missing = [int(i) for i in wanted if not self.is_exact[i]]
        if not missing:
            return
        done = int(self.is_exact.sum())
        errors, vectors = self._probes.prices([self._sources[i] for i in missing], lambda n: self._tell(done + n))
        self._vectors = padded(self._vectors, max(vectors.shape[1], self._vectors.shape[1]))
        self._errors[missing], self._vectors[missing] = errors, vectors
        self.is_exact[missing] = True

    def means(self) -> np.ndarray:
        """float64 [sources]: the prices that are exact, 0 elsewhere."""
        return self._errors.mean(axis=1)

    def mixed(self, gains: np.ndarray) -> np.ndarray:
        """float64 [sources]: the best that is known of each price."""
        return np.where(self.is_exact, self.means(), self._estimates.mean() * gains)

    def prices_with(self, gains: np.ndarray, screening: Screening) -> Prices:
        exact, found = self.is_exact[:, None], self._estimates
        width = max(self._vectors.shape[1], found.mean_vectors.shape[1])
        screened = padded(found.mean_vectors * np.sqrt(gains)[:, None].astype(np.float32), width)
        errors = np.where(exact, self._errors, found.errors * gains[:, None])
        vectors = np.where(exact, padded(self._vectors, width), screened)
        return Prices(tuple(self._sources), errors, vectors.astype(np.float32), screening)


def _drawn(known: np.ndarray, seed: int) -> np.ndarray:
    """int64: one of every stretch of the sources in their order, so that no depth of the graph is left out."""
    draw = np.random.default_rng(seed)
    parts = np.array_split(known, min(CHECKED, len(known))) if len(known) else []
    return np.asarray([draw.choice(part) for part in parts], np.int64)


def _measure(
    checked: np.ndarray, sources: Sequence[Source], estimates: np.ndarray, exact: np.ndarray
) -> tuple[np.ndarray, float, float | None]:
    """(gain of each source, spread of the logarithms of prices, rank correlation of the checked sources).

    Each of these is predicted with the gains that the others give. The correlation is the lower one of that over all
    of them and the mean of those within kinds, since what is ranked in the end has weights of one scheme only.
    """
    kinds = np.asarray([f"{source.kind} {source.form}" for source in sources])
    used = checked[(exact[checked] > 0)]
    ratios = np.zeros(len(sources))
    ratios[used] = np.log(exact[used] / estimates[used])
    gains = np.ones(len(sources))
    for kind in dict.fromkeys(kinds):
        gains[kinds == kind] = np.exp(_log_gain(kind, used, kinds, ratios))
    left_out = np.asarray([_log_gain(kinds[i], used[used != i], kinds, ratios) for i in checked])
    is_used = np.isin(checked, used)
    rest = (ratios[checked] - left_out)[is_used]
    spread = float(np.sqrt(np.mean(np.square(rest)))) if len(rest) else np.inf
    predicted = estimates[checked] * np.exp(left_out)
    ranks = [rank_correlation(predicted, exact[checked])]
    within = [kinds[checked] == kind for kind in dict.fromkeys(kinds)]
    inside = [(rank_correlation(predicted[w], exact[checked][w]), int(w.sum())) for w in within if w.sum() >= OF_A_KIND]
    told = [(rank, count) for rank, count in inside if rank is not None]
    if told:
        ranks.append(float(np.average([rank for rank, _ in told], weights=[count for _, count in told])))
    return gains, spread, min((rank for rank in ranks if rank is not None), default=None)


def _log_gain(kind: str, used: np.ndarray, kinds: np.ndarray, ratios: np.ndarray) -> float:
    own = used[kinds[used] == kind]
    chosen = own if len(own) >= OF_A_KIND else used
    return float(ratios[chosen].mean()) if len(chosen) else 0.0


def _top(rows: Rows, prices: np.ndarray, is_exact: np.ndarray, spread: float) -> np.ndarray:
    """int64: sources of the worst rows, and of those that may belong to them by twice their spread."""
    scores = np.asarray([prices[list(row)].sum() for row in rows.sources])
    high = np.where(is_exact, prices, prices * np.exp(2 * spread))
    bounds = np.asarray([high[list(row)].sum() for row in rows.sources])
    order = np.argsort(-scores, kind="stable")
    if len(order) > TOP_ROWS:
        doubtful = np.argsort(-bounds, kind="stable")
        doubtful = doubtful[bounds[doubtful] >= scores[order[TOP - 1]]]
        order = np.asarray(list(dict.fromkeys([*order[:TOP_ROWS], *doubtful]))[:MOST_ROWS])
    return np.asarray(sorted({i for row in order for i in rows.sources[row]}), np.int64)
