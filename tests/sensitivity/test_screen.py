"""Screened prices rank as exact ones do, say themselves how well, and give way to exact ones where they do not."""

from dataclasses import replace

import numpy as np
import pytest
from deep_networks import deep, images, opened
from scipy.stats import spearmanr
from test_engine import MODELS, feeds_of, num_samples, open_model

from quantsieve import schemes
from quantsieve.calibrate import calibrate
from quantsieve.plan import Rounded, find_options
from quantsieve.run.codec import decode, encode
from quantsieve.schemes._static import by_name
from quantsieve.sensitivity import screen
from quantsieve.sensitivity.gradient import NoGradient
from quantsieve.sensitivity.racing import LOOKS, is_settled
from quantsieve.sensitivity.ranking import is_tie
from quantsieve.sensitivity.screen import CHECKED, TOP_ROWS, estimate, is_wanted, screen_batch, verdict
from quantsieve.sensitivity.suffix import Prices, Probes, Screening, Source, error_vectors, find_sources, join
from quantsieve.weights import NO_CORRECTIONS

COUNT = 8


@pytest.fixture(scope="module")
def residual():
    return opened(deep(60))


@pytest.fixture(scope="module")
def pair(residual):
    """Screened and exact prices of the same batch."""
    feeds = images(COUNT, 2)
    return screen_batch(residual.probes(feeds), residual.sources, residual.rows), residual.exact(feeds)


def top(scores, count=10):
    return set(np.argsort(-scores, kind="stable")[:count].tolist())


# --- fidelity -------------------------------------------------------------------------------------------------------


def test_the_screen_ranks_a_deep_residual_model_as_exact_prices_do(residual, pair):
    screened, exact = pair
    assert (~screened.is_exact).sum() > len(residual.sources) / 2
    assert spearmanr(screened.mean(), exact.mean()).statistic > 0.98
    for form in ("int8", "int8-channel", "uint8"):  # no kind hides behind the distance between kinds
        own = [i for i, source in enumerate(residual.sources) if source.form == form]
        assert spearmanr(screened.mean()[own], exact.mean()[own]).statistic > 0.97
    assert spearmanr(residual.scores(screened), residual.scores(exact)).statistic > 0.98
    assert top(residual.scores(screened)) == top(residual.scores(exact))


def test_the_screen_ranks_a_deep_plain_model_as_exact_prices_do():
    plain = opened(deep(60, is_residual=False))
    feeds = images(COUNT, 2)
    screened, exact = screen_batch(plain.probes(feeds), plain.sources, plain.rows), plain.exact(feeds)
    assert (~screened.is_exact).any()
    assert spearmanr(screened.mean(), exact.mean()).statistic > 0.95
    assert len(top(plain.scores(screened)) & top(plain.scores(exact))) >= 9


def test_with_many_outputs_random_vectors_stand_for_them():
    wide = opened(deep(20, classes=300))
    feeds = images(COUNT, 2)
    screened, exact = estimate(wide.probes(feeds), wide.sources), wide.exact(feeds)
    assert screened.mean_vectors.shape[1] == screen.VECTORS < 300
    assert spearmanr(screened.mean(), exact.mean()).statistic > 0.9
    # A sum over 16 signs is off by sqrt(2 / 16) at most, the mean over sources in different directions by less.
    assert np.median(screened.mean() / exact.mean()) == pytest.approx(1, abs=0.35)


def test_estimates_are_what_a_small_part_of_the_error_does_enlarged(residual):
    """The slow way: a hundredth of each error at its own value, everything behind it run, the result times 10,000."""
    feeds, part = images(4, 5), np.float32(0.01)
    probes = residual.probes(feeds)
    found = estimate(probes, residual.sources)
    executor = residual.executor
    base = executor.forward(feeds)
    for index in range(0, len(residual.sources), 17):
        source = residual.sources[index]
        if source.kind == "tensor":
            root, changed = source.owner, executor.rounded(base[source.owner].numpy(), probes.affine(source))
        else:
            root = probes.layers[source.owner].output
            made = executor.made(executor.position[source.owner], base, probes.weights(source))
            changed = made[root].numpy()
        moved = base[root].numpy() + part * (changed - base[root].numpy())
        outputs = executor.after_values(base, {root: type(base[root]).ortvalue_from_numpy(moved)})
        arrays = {name: value.numpy() for name, value in outputs.items()}
        wanted, _ = error_vectors(arrays, probes.reference, residual.calibration.output_variance, 4)
        # Relus that turn within the small step, and float noise of 1e-7 of an output beside a change of 1e-5.
        np.testing.assert_allclose(np.sqrt(found.errors[index]), np.sqrt(wanted) / part, rtol=0.1, atol=2e-4)


def test_errors_that_all_samples_share_are_told_from_the_others(pair):
    screened, exact = pair
    shares = [prices.common() / prices.mean() for prices in (screened, exact)]
    assert np.corrcoef(*shares)[0, 1] > 0.9


def test_estimates_do_not_depend_on_chunks_or_workers(residual, monkeypatch):
    feeds = images(COUNT, 2)
    whole = estimate(residual.probes(feeds), residual.sources)
    monkeypatch.setattr(screen, "MEMORY", 1)  # one sample at a time
    single = estimate(residual.probes(feeds, workers=2), residual.sources)
    np.testing.assert_allclose(single.errors, whole.errors, rtol=1e-3)
    np.testing.assert_allclose(single.mean_vectors, whole.mean_vectors, rtol=1e-3, atol=1e-7)


# --- what is exact --------------------------------------------------------------------------------------------------


def test_what_is_called_exact_is_the_price_of_the_exact_scan(residual, pair):
    screened, exact = pair
    np.testing.assert_allclose(screened.errors[screened.is_exact], exact.errors[screened.is_exact], rtol=1e-6)
    length = exact.mean_vectors.shape[1]
    np.testing.assert_allclose(
        screened.mean_vectors[screened.is_exact, :length], exact.mean_vectors[screened.is_exact], rtol=1e-5, atol=1e-9
    )
    assert (screened.screening.spread[screened.is_exact] == 0).all()
    assert (screened.screening.spread[~screened.is_exact] > 0).all()


def test_the_worst_rows_and_the_checked_sources_are_exact(residual, pair):
    screened, _ = pair
    order = np.argsort(-residual.scores(screened), kind="stable")
    assert all(screened.is_exact[list(residual.rows.sources[row])].all() for row in order[: TOP_ROWS // 2])
    checked = screened.screening.checked
    assert len(checked) == len(set(checked.tolist())) == CHECKED and screened.is_exact[checked].all()
    # Of every stretch: no gap between drawn sources is longer than two stretches.
    assert np.diff(checked).max() <= 2 * -(-len(residual.sources) // CHECKED)


def test_the_seed_draws_the_checked_sources(residual):
    feeds = images(2, 2)
    found = [
        screen_batch(residual.probes(feeds), residual.sources, replace(residual.rows, seed=seed)).screening.checked
        for seed in (1, 1, 2)
    ]
    assert (found[0] == found[1]).all() and (found[0] != found[2]).any()


def test_the_screen_tells_its_own_rank_correlation(pair):
    screened, exact = pair
    checked = screened.screening.checked
    assert 0.95 <= screened.screening.rank <= 1
    assert f"{(~screened.is_exact).sum()} of {len(exact.sources)} sources were screened" in verdict(screened)
    assert f"rank correlation {screened.screening.rank:.3f}" in verdict(screened)
    assert f"of {len(checked)} sources" in verdict(screened)


# --- giving way -----------------------------------------------------------------------------------------------------


def assert_exact(screened, exact):
    assert screened.is_exact.all() and (screened.screening.spread == 0).all()
    np.testing.assert_allclose(screened.errors, exact.errors, rtol=1e-6)


def test_where_errors_are_not_of_first_order_all_prices_are_exact(monkeypatch):
    """Outputs beside steps: rounding decides on which side they fall, and the slope knows nothing of it."""
    model = deep(30, tail=("Sin",))
    head = next(tensor for tensor in model.graph.initializer if tensor.name == "head_w")
    array = np.frombuffer(head.raw_data, np.float32) * np.float32(3e4)  # many turns of the sine an error
    head.raw_data = array.tobytes()
    monkeypatch.setitem(
        screen_rules(), "Sin", lambda b, n, c: {0: b.op("Mul", c[0], b.op("Cos", b.value(n.inputs[0])))}
    )
    wild = opened(model)
    feeds = images(COUNT, 2)
    screened, exact = screen_batch(wild.probes(feeds), wild.sources, wild.rows), wild.exact(feeds)
    assert_exact(screened, exact)
    assert "not good enough" in verdict(screened)


def screen_rules():
    from quantsieve.sensitivity import gradient

    return gradient.RULES


def test_a_wrong_gradient_is_found_out(residual, monkeypatch):
    """Every other branch counts a thousand times too much."""
    seen = []

    def wrong(b, node, c):
        seen.append(node.name)
        return {0: b.op("Mul", c[0], b.number(30.0 if len(seen) % 2 else 1 / 30))}

    monkeypatch.setitem(screen_rules(), "Relu", wrong)
    screen.forget(residual.executor)
    feeds = images(4, 2)
    screened = screen_batch(residual.probes(feeds), residual.sources, residual.rows)
    screen.forget(residual.executor)
    assert_exact(screened, residual.exact(feeds))
    assert screened.screening.rank < screen.RANK and "not good enough" in verdict(screened)


def test_a_spread_that_is_too_large_is_not_good_enough(residual, monkeypatch):
    monkeypatch.setattr(screen, "SPREAD", 1e-6)
    feeds = images(2, 2)
    screened = screen_batch(residual.probes(feeds), residual.sources, residual.rows)
    assert screened.is_exact.all() and screened.screening.rank >= screen.RANK


def test_a_model_that_cannot_be_run_backwards_is_priced_exactly_and_says_why():
    stuck = opened(deep(3, tail=("CumSum",)))
    feeds = images(4, 2)
    told = []
    screened = screen_batch(stuck.probes(feeds), stuck.sources, stuck.rows, tell=told.append)
    assert_exact(screened, stuck.exact(feeds))
    assert "CumSum" in verdict(screened) and told[-1] == len(stuck.sources)


def test_a_source_that_the_gradient_does_not_see_is_exact():
    """Behind Round the slope is 0, and so would be the price of what only it reads."""
    stepped = opened(deep(20, step=1))
    feeds = images(4, 2)
    assert not estimate(stepped.probes(feeds), stepped.sources).is_known.all()
    screened, exact = screen_batch(stepped.probes(feeds), stepped.sources, stepped.rows), stepped.exact(feeds)
    row = screened.rows()["weight", "b1", "int8"]
    assert screened.is_exact[row] and screened.mean()[row] == pytest.approx(exact.mean()[row], rel=1e-6) != 0


# --- batches and facts ----------------------------------------------------------------------------------------------


def test_later_batches_keep_what_the_first_one_chose(residual, pair):
    first, _ = pair
    feeds = images(COUNT, 9)
    second = screen_batch(residual.probes(feeds), residual.sources, residual.rows, first)
    assert (second.is_exact == first.is_exact).all()
    assert (second.screening.checked == first.screening.checked).all()
    both = join([first, second])
    assert both.num_samples == 2 * COUNT and (both.is_exact == first.is_exact).all()
    assert both.screening.rank == min(first.screening.rank, second.screening.rank)
    exact = join([pair[1], residual.exact(feeds)])
    assert spearmanr(both.mean(), exact.mean()).statistic > 0.98


def test_a_scan_whose_first_batch_gave_way_is_exact_to_its_end(residual, pair):
    first, _ = pair
    given = replace(first, screening=replace(first.screening, is_exact=np.ones_like(first.is_exact), rank=0.5))
    feeds = images(2, 9)
    second = screen_batch(residual.probes(feeds), residual.sources, residual.rows, given)
    assert_exact(replace(second, screening=replace(second.screening, spread=np.zeros(1))), residual.exact(feeds))
    assert second.screening.rank == 0.5


def test_screened_prices_are_stored_as_they_are(pair):
    screened, _ = pair
    again = decode(*encode(screened), Prices)
    assert again.screening.rank == screened.screening.rank
    assert (again.is_exact == screened.is_exact).all() and (again.errors == screened.errors).all()


def test_auto_screens_from_some_hundred_sources_on():
    assert not is_wanted("auto", screen.LEAST - 1) and is_wanted("auto", screen.LEAST)
    assert is_wanted("on", 1) and not is_wanted("off", 10**6)


# --- intervals, ties, race ------------------------------------------------------------------------------------------


def priced(spread):
    sources = (Source("weight", "a", "int8"), Source("tensor", "t", "uint8"))
    errors = np.asarray([[2.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    exact = np.asarray(spread) == 0
    return Prices(sources, errors, np.zeros((2, 1)), Screening(exact, np.asarray(spread), np.zeros(0, int), 1.0, 0.1))


def test_intervals_of_screened_prices_hold_their_spread():
    low, high = priced([0.1, 0.0]).interval()
    assert high[0] - 2 == pytest.approx(1.96 * 0.2, rel=1e-4) and 2 - low[0] == pytest.approx(1.96 * 0.2, rel=1e-4)
    assert low[1] == high[1] == 1


def test_the_doubts_of_a_sum_add_as_independent_ones():
    prices = priced([0.1, 0.3])
    assert prices.doubt(prices.switched("a", "int8", [Rounded("t", "uint8")])) == pytest.approx(np.hypot(0.2, 0.3))
    assert replace(prices, screening=None).doubt([0, 1]) == 0


def test_rows_that_the_screen_cannot_tell_apart_tie():
    a, b = np.full(4, 2.0), np.full(4, 1.8)
    assert not is_tie(a, b) and not is_tie(a, b, 0.1) and is_tie(a, b, 0.11)


def test_a_race_does_not_end_on_an_order_that_the_screen_leaves_open():
    draw = np.random.default_rng(0)
    rows = np.asarray([8.0, 6.0, 1.0])[:, None] * (1 + 0.05 * draw.standard_normal((3, LOOKS[0])))
    assert is_settled(rows, doubts=np.zeros(3))
    assert is_settled(rows, doubts=np.asarray([0.1, 0.1, 0.1]))
    assert not is_settled(rows, doubts=np.asarray([0.1, 0.1, 5.0]))
    assert not is_settled(rows, doubts=np.asarray([2.0, 2.0, 0.0]))
    assert not is_settled(rows[::-1], doubts=np.asarray([0.0, 2.0, 2.0]))


# --- models of other shapes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "reason"), [(name, "Loop" if name == "control" else None) for name in MODELS])
def test_branches_several_outputs_and_constants_among_them_are_no_matter(name, reason):
    feeds = feeds_of(name)
    count, executor, known = num_samples(feeds), open_model(name), (schemes.get("int8"),)
    calibration = calibrate(executor, [(feeds_of(name, seed), count) for seed in range(4)])
    options = find_options(executor.graph, executor.structure, calibration, known)
    sources = find_sources(executor, options, known)
    probes = Probes(executor, feeds, count, calibration, NO_CORRECTIONS, by_name(known))
    if reason is not None:
        with pytest.raises(NoGradient, match=reason):
            estimate(probes, sources)
        return
    found = estimate(probes, sources)
    exact, _ = probes.prices(sources)
    assert found.is_known.all()
    # int8 errors of small models are nearly of first order; 16 signs for the outputs leave a third.
    ratios = np.log(found.mean() / exact.mean(axis=1))
    assert abs(np.median(ratios)) < 0.4 and np.abs(ratios).max() < 1.1
