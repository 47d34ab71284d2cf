"""When a scan may stop: never while the order of the top is open, always when it is clear."""

import numpy as np
import pytest

from quantsieve import api
from quantsieve.errors import UsageError
from quantsieve.sensitivity.racing import LOOKS, foretold, is_settled, looks, open_rows


def scores(means, spread, count, seed=0):
    draw = np.random.default_rng(seed)
    return np.asarray(means)[:, None] * (1 + spread * draw.standard_normal((len(means), count)))


def test_clear_orders_are_settled_at_the_first_look():
    assert is_settled(scores([8.0, 4.0, 2.0, 1.0], 0.1, LOOKS[0]))


def test_an_open_order_asks_for_more_samples_until_it_is_clear():
    sway = 0.15 * np.asarray([1, -1] * 4)
    few = np.stack([1.1 + sway, 1.0 - sway])
    assert not is_settled(few) and is_settled(np.tile(few, 100))


def test_the_order_of_two_that_are_alike_among_many_may_stay_open():
    many = scores([2.0**index for index in range(12)], 0.05, 8)
    pair = scores([100.0, 100.0], 0.05, 8, seed=1)
    assert is_settled(np.concatenate([many, pair]))
    assert not is_settled(pair)


def test_a_score_that_is_not_known_is_not_settled():
    wild = np.random.default_rng(1).lognormal(0, 6, (1, 8))
    assert not is_settled(wild)


def test_the_worst_are_known_but_for_one_of_them():
    """Neighbours around the end of the top swap freely; two pairs of them are one too many."""
    clear = scores([2.0**index for index in range(40)], 0.01, 8)
    ends = scores([2.0**30, 2.0**30], 0.3, 8, seed=1)
    assert is_settled(np.concatenate([clear, ends[:1]]), top=10)
    wide = scores([2.0**30] * 5, 0.3, 8, seed=2)
    assert not is_settled(np.concatenate([clear, wide]), top=12)


def test_samples_that_are_hard_for_all_layers_do_not_hide_the_order():
    hard = np.random.default_rng(2).uniform(0.8, 1.2, 8)
    assert is_settled(np.stack([1.2 * hard, 1.0 * hard]))


def test_one_sample_settles_nothing():
    assert not is_settled(scores([2.0, 1.0], 0.0, 1))
    assert is_settled(np.zeros((0, 8)))


def test_a_race_stops_wrongly_in_few_of_many(monkeypatch):
    """Two layers 20 % apart with a spread that leaves the order open for long: the first settled look is right."""
    wrong = raced = 0
    for seed in range(400):
        drawn = scores([1.2, 1.0], 1.0, LOOKS[-1], seed)
        for look in LOOKS:
            seen = drawn[:, :look]
            if is_settled(seen):
                raced += 1
                wrong += seen[0].mean() < seen[1].mean()
                break
    assert wrong <= 0.05 * 400, (wrong, raced)


FALLING = np.sort(np.random.default_rng(7).uniform(0, 1, 64) ** 3)[::-1]  # exposures of 64 samples


def test_looks_end_with_all_samples_and_begin_where_half_of_the_exposure_is_probed():
    assert looks(20) == (8, 16, 20) and looks(64) == LOOKS and looks(5) == (5,)
    even = np.ones(64)
    first, *_, last = found = looks(64, even)
    assert even[:first].sum() >= even.sum() / 2 >= even[: first - 1].sum()
    assert last == 64 and set(np.diff(found)[:-1]) == {4}
    assert looks(64, np.eye(64)[0])[0] == 8 and looks(6, np.zeros(6)) == (6,)


def beginnings(whole, counts):
    """What a race has seen of rows: as many samples as told, NaN from there on."""
    return np.where(np.arange(whole.shape[1]) < np.asarray(counts)[:, None], whole, np.nan)


def test_values_in_proportion_to_the_exposures_are_foretold_without_a_doubt():
    whole = np.asarray([3.0, 1.0, 0.0])[:, None] * FALLING.clip(1e-3 * FALLING.mean())
    for seen in (whole[:, :8], beginnings(whole, (8, 20, 64))):
        found, doubts = foretold(seen, FALLING)
        np.testing.assert_allclose(found, whole, atol=1e-12)
        np.testing.assert_allclose(doubts, 0, atol=1e-12)


def test_a_row_is_foretold_from_its_own_samples_whatever_is_known_of_others():
    whole = np.random.default_rng(0).gamma(2.0, 1.0, (3, 64)) * FALLING
    together, doubts = foretold(beginnings(whole, (8, 20, 64)), FALLING)
    for row, count in enumerate((8, 20, 64)):
        alone, doubt = foretold(whole[row : row + 1, :count], FALLING)
        np.testing.assert_allclose(together[row], alone[0])
        assert doubts[row] == pytest.approx(doubt[0])
    np.testing.assert_array_equal(together[2], whole[2])
    assert doubts[2] < 1e-12 < doubts[1]


def test_what_is_foretold_lies_within_the_doubt_that_is_told():
    """Rates of any spread, the same for exposed samples and for others: two doubts hold 95 % of the true means."""
    inside, total = 0, 0
    for seed in range(40):
        rates = np.random.default_rng(seed).gamma(2.0, 1.0, (20, 64))
        whole = rates * FALLING.clip(1e-3 * FALLING.mean())
        found, doubts = foretold(whole[:, : looks(64, FALLING)[0]], FALLING)
        inside += int((abs(found.mean(axis=1) - whole.mean(axis=1)) <= 2 * doubts).sum())
        total += len(whole)
    assert 0.85 <= inside / total < 0.999


def raced(whole, exposures):
    """(foretold means, samples probed by row) of a race over rows."""
    still, counts = np.ones(len(whole), bool), np.zeros(len(whole), int)
    for look in looks(len(exposures), exposures):
        counts[still] = look
        seen = beginnings(whole, counts)
        still &= open_rows(seen, exposures)
        if not still.any():
            break
    return foretold(seen, exposures)[0].mean(axis=1), counts


def test_a_race_over_rows_ranks_as_all_samples_would_and_probes_fewer():
    shares, tops = [], []
    for seed in range(40):
        draw = np.random.default_rng(seed)
        whole = 1.25 ** np.arange(30)[:, None] * draw.gamma(1.0, 1.0, (30, 64)) * FALLING
        means, (seen, counts) = whole.mean(axis=1), raced(whole, FALLING)
        assert np.corrcoef(means.argsort().argsort(), seen.argsort().argsort())[0, 1] > 0.95
        tops.append(len({*means.argsort()[-10:]} & {*seen.argsort()[-10:]}))
        shares.append(counts.mean() / 64)
    assert np.mean(shares) < 0.5 and min(tops) >= 8 and np.mean(np.asarray(tops) >= 9) > 0.9


def test_only_rows_whose_place_is_open_go_on():
    """Places 10 and 11 are alike, all others far apart: these two alone decide who is among the ten worst."""
    draw = np.random.default_rng(3)
    means = np.concatenate([3.0 ** np.arange(30, 20, -1), [3.0**20.98], 3.0 ** np.arange(19, 0, -1)])
    spread = np.where((means < 3.0**21.5) & (means > 3.0**20), 1.0, 0.01)
    whole = means[:, None] * (1 + spread[:, None] * draw.uniform(-1, 1, (30, 64))) * FALLING
    found = open_rows(whole[:, :8], FALLING)
    assert np.flatnonzero(found).tolist() == [9, 10]
    assert not open_rows(whole, FALLING).any()  # there are no more samples
    assert open_rows(beginnings(whole, [64] * 10 + [8] * 20), FALLING).tolist() == [row == 10 for row in range(30)]


def test_rows_that_are_alike_stay_open_and_one_row_has_no_order():
    alike = np.random.default_rng(1).gamma(0.3, 1.0, (30, 64)) * FALLING
    assert open_rows(alike[:, : looks(64, FALLING)[0]], FALLING).sum() > 15
    assert not open_rows(alike[:1, :8], FALLING).any()
    alike[3, 2] = np.inf
    assert open_rows(alike[:, :8], FALLING).all()


def test_the_scan_races_unless_samples_are_asked_for(small_model, small_data):
    whole = api.scan(small_model, small_data, samples=16, schemes=["int8"], drift="off")
    assert whole.num_samples == 16
    raced = api.scan(small_model, small_data, schemes=["int8"], drift="off")
    assert raced.num_samples in (*LOOKS, 24)  # 24: all search samples there are
    same = api.scan(small_model, small_data, samples=raced.num_samples, schemes=["int8"], drift="off")
    wanted = {score.layer: score.value for score in same.layers}
    assert {score.layer: score.value for score in raced.layers} == pytest.approx(wanted)


def test_a_rescue_scan_ranks_by_what_the_return_to_float_takes_away(small_model, small_data, tmp_path):
    path = tmp_path / "rescue.json"
    found = api.scan(small_model, small_data, mode="rescue", samples=8, schemes=["int8"], output=path, drift="off")
    assert found.num_samples == 8 and found.mode == "rescue" and "goes" in found.metric.text
    assert [s.value for s in found.layers] == sorted((s.value for s in found.layers), reverse=True)
    assert all(0 <= s.low <= s.value <= s.high for s in found.layers) and found.layers[0].value > 0
    assert {s.layer for s in found.layers} == {
        s.layer for s in api.scan(small_model, small_data, samples=8, drift="off").layers
    }
    assert api.read_scan(path) == found
    assert api.pick(path, coverage=0.5).layers[0] == found.layers[0].layer
    with pytest.raises(UsageError, match="rescue"):
        api.scan(small_model, small_data, mode="backwards")
