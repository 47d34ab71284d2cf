"""Interleaved timing on a clock of our own, and what the summaries promise."""

import random
from collections.abc import Callable
from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantsieve.errors import ShapeMismatch, UsageError
from quantsieve.targets.base import Feeds, Timing
from quantsieve.targets.timing import interleave, is_tie, ratio, summarize


class Clock:
    """Seconds that pass only when a model runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, float]] = []

    def __call__(self) -> float:
        return self.now

    def model(self, name: str, seconds: Callable[[int], float]) -> Callable[[Feeds], dict[str, np.ndarray]]:
        def run(feeds: Feeds) -> dict[str, np.ndarray]:
            number = sum(called == name for called, _ in self.calls)
            self.calls.append((name, float(feeds["x"])))
            self.now += seconds(number)
            return {}

        return run


FEEDS = [{"x": np.float32(number)} for number in range(3)]


def test_times_are_milliseconds_of_each_model() -> None:
    clock = Clock()
    models = [clock.model("a", lambda _: 0.002), clock.model("b", lambda _: 0.005)]
    times = interleave(models, FEEDS, Timing(rounds=4, warmup_s=0), clock)
    assert [len(ms) for ms in times] == [4, 4]
    np.testing.assert_allclose(times, [[2] * 4, [5] * 4])


def test_a_round_runs_each_model_once_on_one_feed() -> None:
    clock = Clock()
    models = [clock.model(name, lambda _: 0.001) for name in "abc"]
    interleave(models, FEEDS, Timing(rounds=5, warmup_s=0), clock)
    rounds = [clock.calls[i : i + 3] for i in range(0, 15, 3)]
    assert all(sorted(name for name, _ in each) == ["a", "b", "c"] for each in rounds)
    assert [{feed for _, feed in each} for each in rounds] == [{0.0}, {1.0}, {2.0}, {0.0}, {1.0}]


def test_the_order_changes_between_rounds_and_follows_the_seed() -> None:
    def order(seed: int) -> list[str]:
        clock = Clock()
        models = [clock.model(name, lambda _: 0.001) for name in "abc"]
        interleave(models, FEEDS, Timing(rounds=20, warmup_s=0, seed=seed), clock)
        return [name for name, _ in clock.calls]

    first = order(0)
    assert len({tuple(first[i : i + 3]) for i in range(0, 60, 3)}) > 3
    assert first == order(0) != order(1)


def test_warm_up_lasts_until_times_are_stable() -> None:
    clock = Clock()
    model = clock.model("a", lambda number: max(0.001, 0.1 * 0.8**number))
    times = interleave([model], FEEDS, Timing(rounds=5, warmup_s=100), clock)
    np.testing.assert_allclose(times[0], [1] * 5)  # reached after 21 runs
    assert len(clock.calls) < 50


def test_warm_up_is_bounded_when_times_never_settle() -> None:
    clock = Clock()
    model = clock.model("a", lambda number: 0.1 * 1.5 ** (number // 5))
    interleave([model], FEEDS, Timing(rounds=3, warmup_s=2, max_seconds=1), clock)
    warm_up_s = sum(0.1 * 1.5 ** (number // 5) for number in range(len(clock.calls) - 3))
    assert warm_up_s < 2.5


def test_timing_stops_at_its_seconds_but_not_before_the_least_rounds() -> None:
    clock = Clock()
    models = [clock.model(name, lambda _: 1.0) for name in "ab"]
    assert len(interleave(models, FEEDS, Timing(rounds=50, warmup_s=0, max_seconds=10), clock)[0]) == 5
    slow = [clock.model(name, lambda _: 100.0) for name in "cd"]
    assert len(interleave(slow, FEEDS, Timing(rounds=50, warmup_s=0, max_seconds=10), clock)[0]) == 3


def test_timing_stops_when_every_median_is_known_well_enough() -> None:
    clock = Clock()
    steady = clock.model("a", lambda _: 0.002)
    noisy = clock.model("b", lambda number: 0.002 + 0.004 * (number % 2))
    settings = Timing(rounds=60, min_rounds=10, warmup_s=0, precision=0.02)
    assert len(interleave([steady], FEEDS, settings, clock)[0]) == 10
    assert len(interleave([steady, noisy], FEEDS, settings, clock)[0]) == 60
    assert len(interleave([steady], FEEDS, replace(settings, precision=0.0), clock)[0]) == 60


def test_timing_without_feeds_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="none"):
        interleave([], [], Timing())


@pytest.mark.parametrize("wrong", [{"rounds": 2}, {"min_rounds": 0}, {"warmup_s": -1}, {"max_seconds": 0}])
def test_timing_settings_out_of_range_are_wrong_usage(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Timing(**wrong)  # type: ignore[arg-type]


times = st.lists(st.floats(0.01, 1000), min_size=1, max_size=60)


@given(times)
def test_the_median_lies_in_its_interval_and_the_interval_in_the_data(ms: list[float]) -> None:
    found = summarize(ms)
    assert min(ms) <= found.low_ms <= found.median_ms <= found.high_ms <= max(ms)
    assert found.runs == len(ms)


@pytest.mark.parametrize("number", [6, 9, 20, 50, 101])
def test_the_interval_is_the_narrowest_symmetric_one_with_95_percent(number: int) -> None:
    found = summarize(list(range(1, number + 1)))
    rank = int(found.low_ms)
    assert found.high_ms == number + 1 - rank

    def coverage(rank: int) -> float:
        return 1 - 2 * sum(comb(number, i) for i in range(rank)) / 2**number

    assert coverage(rank) >= 0.95 > coverage(rank + 1)


def test_the_interval_covers_the_true_median_as_often_as_promised() -> None:
    draw = random.Random(0)
    trials = 2000
    hits = 0
    for _ in range(trials):
        found = summarize([draw.lognormvariate(0, 1) for _ in range(30)])
        hits += found.low_ms <= 1 <= found.high_ms
    # Promised: 95.7 % for n = 30; three standard errors of 2000 trials are 1.4 points.
    assert 0.943 <= hits / trials <= 0.971


@given(times, st.floats(0.1, 10))
def test_a_constant_factor_is_found_exactly_whatever_the_noise(ms: list[float], factor: float) -> None:
    found = ratio([time * factor for time in ms], ms)
    np.testing.assert_allclose(found, [factor] * 3, rtol=1e-12)  # one product, one quotient


def test_pairing_removes_drift_that_hides_the_difference() -> None:
    draw = random.Random(0)
    drift = [10 * 1.2**number for number in range(20)]
    slow = [time * draw.uniform(1.02, 1.04) for time in drift]
    assert summarize(slow).low_ms < summarize(drift).high_ms
    assert ratio(slow, drift).low > 1.01
    assert not is_tie(slow, drift)


def test_equal_models_tie_and_a_tolerance_widens_the_tie() -> None:
    base = [10.0] * 20
    assert is_tie(base, base)
    assert not is_tie([10.2] * 20, base)
    assert is_tie([10.2] * 20, base, tolerance=0.03)
    assert is_tie([9.8] * 20, base, tolerance=0.03)


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match="2 and 1"):
        ratio([1, 2], [1])


def test_no_times_have_no_summary() -> None:
    with pytest.raises(UsageError, match="none"):
        summarize([])
