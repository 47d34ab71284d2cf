"""When a scan may stop: never while the order of the top is open, always when it is clear."""

import numpy as np
import pytest

from quantsieve import api
from quantsieve.errors import UsageError
from quantsieve.sensitivity.racing import LOOKS, foretold, is_settled, looks


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


def test_looks_end_with_all_samples_and_begin_where_two_thirds_of_the_exposure_are_probed():
    assert looks(20) == (8, 16, 20) and looks(64) == LOOKS and looks(5) == (5,)
    first, *_, last = found = looks(64, FALLING)
    assert FALLING[:first].sum() >= 2 / 3 * FALLING.sum() > FALLING[: first - 1].sum()
    assert last == 64 and set(np.diff(found)[:-1]) == {8}
    assert looks(64, np.eye(64)[0])[0] == 8 and looks(6, np.zeros(6)) == (6,)


def test_values_in_proportion_to_the_exposures_are_foretold_without_a_doubt():
    whole = np.asarray([3.0, 1.0, 0.0])[:, None] * FALLING.clip(1e-3 * FALLING.mean())
    found, doubts = foretold(whole[:, :8], FALLING)
    np.testing.assert_allclose(found, whole, atol=1e-12)
    np.testing.assert_allclose(doubts, 0, atol=1e-12)


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


def test_a_foretold_race_ends_early_only_when_the_rest_cannot_change_the_order():
    settled = 0
    for seed in range(60):
        draw = np.random.default_rng(seed)
        whole = 1.25 ** np.arange(30)[:, None] * draw.gamma(1.0, 1.0, (30, 64)) * FALLING
        for look in looks(64, FALLING)[:-1]:
            if not is_settled(whole[:, :look], exposures=FALLING):
                continue
            settled += 1
            means, seen = whole.mean(axis=1), foretold(whole[:, :look], FALLING)[0].mean(axis=1)
            assert np.corrcoef(means.argsort().argsort(), seen.argsort().argsort())[0, 1] > 0.93
            assert len({*means.argsort()[-10:]} & {*seen.argsort()[-10:]}) >= 9
            break
    assert settled >= 40
    alike = np.random.default_rng(1).gamma(0.3, 1.0, (30, 64)) * FALLING
    assert not is_settled(alike[:, : looks(64, FALLING)[0]], exposures=FALLING)


def test_what_no_sample_tells_keeps_a_foretold_race_open_too():
    whole = 1.25 ** np.arange(30)[:, None] * FALLING[None, :8]
    assert is_settled(whole, exposures=FALLING)
    assert not is_settled(whole, doubts=whole.mean(axis=1), exposures=FALLING)


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
