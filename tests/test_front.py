import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantsieve import front
from quantsieve.evaluation import Failed, Measured
from quantsieve.front import Candidate
from quantsieve.plan import Plan
from quantsieve.targets.timing import summarize

NUM_SAMPLES = 100
ROUNDS = 21


def measured(lost: int, mse: float = 0.1, num_bad: int = 0) -> Measured:
    """On 100 samples that float gets all right: `lost` of them are wrong; negative when float was wrong
    there."""
    scores, reference = np.ones(NUM_SAMPLES), np.ones(NUM_SAMPLES)
    (scores if lost > 0 else reference)[: abs(lost)] = 0
    return Measured("final", "top1", scores, reference, scores, np.full(NUM_SAMPLES, mse), 20.0, num_bad)


def candidate(
    name: str,
    size: int,
    lost: int,
    mse: float = 0.1,
    ms: tuple[float, ...] = (),
    schemes: tuple[str, ...] = ("conv",),
    num_bad: int = 0,
) -> Candidate:
    latency = summarize(ms) if ms else None
    plan = Plan(dict.fromkeys(schemes, "int8"))
    final = measured(lost, mse, num_bad)
    return Candidate(name, "programme", plan, size, None, final, latency, ms, None, None, None, {}, ())


def float_model(size: int = 1000, ms: tuple[float, ...] = ()) -> Candidate:
    return candidate("float", size, 0, 0.0, ms, schemes=())


def steady(ms: float, pace: int = 7) -> tuple[float, ...]:
    """Rounds within 0.01 around `ms`; two of another pace tie when the gap is much smaller than that."""
    return tuple(ms + 0.01 * math.sin(pace * i) for i in range(ROUNDS))


def undominated(candidates: list[Candidate]) -> set[str]:
    return {c.id for c in candidates if not any(front.dominates(d, c) for d in candidates)}


def stable_sets(candidates: list[Candidate]) -> list[set[str]]:
    """By brute force: no member dominates another, and each of the rest is dominated by a member."""
    found = []
    for number in range(len(candidates) + 1):
        for inside in combinations(candidates, number):
            outside = [c for c in candidates if c not in inside]
            is_free = not any(front.dominates(a, b) for a in inside for b in inside)
            if is_free and all(any(front.dominates(a, b) for a in inside) for b in outside):
                found.append({c.id for c in inside})
    return found


points = st.tuples(st.integers(1, 5), st.integers(-2, 3), st.sampled_from([0.1, 0.2]))
times = st.lists(st.sampled_from([1.0, 1.1, 1.2, 1.3, 2.0]), min_size=9, max_size=9).map(tuple)


@given(st.lists(points, max_size=30))
@settings(deadline=None)
def test_without_latency_the_front_is_the_quadratic_definition(drawn):
    candidates = [candidate(f"c{i}", *point) for i, point in enumerate(drawn)]
    assert set(front.find_front(candidates)) == undominated(candidates)


@given(st.lists(st.tuples(points, st.none() | times), min_size=1, max_size=7))
@settings(deadline=None, max_examples=200)
def test_the_front_is_the_only_stable_set_and_holds_all_that_is_undominated(drawn):
    candidates = [candidate(f"c{i}", *point, ms=ms or ()) for i, (point, ms) in enumerate(drawn)]
    found = set(front.find_front(candidates))
    assert found
    assert stable_sets(candidates) == [found]
    assert undominated(candidates) <= found


@given(st.lists(st.tuples(points, times), max_size=7), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_front_does_not_depend_on_the_order_of_candidates(drawn, random):
    candidates = [candidate(f"c{i}", *point, ms=ms) for i, (point, ms) in enumerate(drawn)]
    shuffled = random.sample(candidates, len(candidates))
    assert set(front.find_front(shuffled)) == set(front.find_front(candidates))


def test_a_latency_within_the_paired_interval_is_a_tie_and_keeps_nobody_on_the_front():
    small = candidate("small", 10, 1, ms=steady(1.002, pace=5))
    large = candidate("large", 11, 1, ms=steady(1.0))
    assert front.find_front([small, large]) == ("small",)
    faster = replace(large, latency=summarize(steady(0.9)), latency_ms=steady(0.9))
    assert front.find_front([small, faster]) == ("small", "large")


def test_a_model_that_only_a_dominated_one_dominates_stays_on_the_front():
    # a ties b, b ties c, c is faster than a: the fastest model must not be lost through b.
    rounds = [1.0, 1.1, 1.2]
    a = candidate("a", 10, 1, ms=tuple([1.15] * ROUNDS))
    b = candidate("b", 11, 1, ms=tuple(rounds[i % 3] for i in range(ROUNDS)))
    c = candidate("c", 12, 1, ms=tuple([1.05] * ROUNDS))
    assert front.dominates(a, b) and front.dominates(b, c) and not front.dominates(a, c)
    assert front.find_front([a, b, c]) == ("a", "c")
    assert front.named([a, b, c])["fastest"] == "c"


def test_times_of_different_rounds_are_compared_by_their_intervals():
    a, b = candidate("a", 10, 1, ms=steady(1.0)), candidate("b", 11, 1, ms=steady(0.5)[:-2])
    assert front.find_front([a, b]) == ("a", "b")
    assert front.find_front([a, replace(b, latency=summarize(steady(1.0)[:-2]))]) == ("a",)


def test_a_model_that_was_not_timed_drives_no_timed_one_from_the_front():
    timed = candidate("timed", 11, 1, ms=steady(1.0))
    assert front.find_front([timed, candidate("untimed", 10, 0)]) == ("untimed", "timed")


def test_squared_error_decides_between_equal_losses():
    clean, noisy = candidate("clean", 10, 2, mse=0.1), candidate("noisy", 10, 2, mse=0.3)
    assert front.find_front([noisy, clean]) == ("clean",)


def test_failed_candidates_and_those_without_final_samples_are_not_on_the_front():
    good = candidate("good", 10, 1)
    failed = replace(candidate("failed", 1, 0), final=Failed("final", "crash", "run", "signal 11", ""))
    unseen = replace(candidate("unseen", 1, 0), final=None, search=measured(0))
    assert front.find_front([failed, good, unseen]) == ("good",)
    assert front.find_front([failed, unseen]) == ()


def test_the_recommended_model_is_the_smallest_within_the_budget():
    candidates = [float_model(), candidate("a", 500, 1), candidate("b", 300, 2), candidate("c", 200, 3)]
    found = front.recommend(candidates, 0.02, confident=False)
    assert found.id == "b"
    assert "3 models" in found.reason and "at most 2 %" in found.reason


def test_near_equal_sizes_are_decided_by_squared_error():
    candidates = [candidate("a", 1000, 2, mse=0.2), candidate("b", 1004, 2, mse=0.1), candidate("c", 1006, 0)]
    assert front.recommend(candidates, 0.02, confident=False).id == "b"


def test_a_confident_budget_is_met_by_the_high_end_of_the_interval():
    # 2 of 100 lost: Agresti and Min give about [-0.014, 0.053]; the float model's interval is exactly 0.
    candidates = [float_model(), candidate("a", 300, 2)]
    assert front.recommend(candidates, 0.03, confident=False).id == "a"
    found = front.recommend(candidates, 0.03, confident=True)
    assert found.id == "float"
    assert "No quantized model" in found.reason and "a (programme) with 2 %" in found.reason
    assert front.recommend(candidates, 0.0, confident=True).id == "float"


def test_no_recommendation_says_what_the_best_was():
    found = front.recommend([candidate("a", 300, 9), candidate("b", 200, 20)], 0.02, confident=False)
    assert found.id is None
    assert "a (programme) with 9 %" in found.reason and "interval" in found.reason
    assert front.recommend([], 0.02, confident=False).id is None


def test_a_model_with_outputs_that_are_not_finite_is_never_recommended():
    candidates = [float_model(), candidate("nan", 10, 0, num_bad=1)]
    assert front.recommend(candidates, 0.5, confident=False).id == "float"


@given(st.lists(st.tuples(points, times), min_size=1, max_size=8), st.integers(0, 3))
@settings(deadline=None)
def test_what_is_recommended_is_on_the_front_and_within_the_budget(drawn, drop):
    candidates = [candidate(f"c{i}", *point, ms=ms) for i, (point, ms) in enumerate(drawn)]
    found = front.recommend(candidates, drop / 100, confident=False).id
    losses = {c.id: front.final_loss(c).value for c in candidates}
    if found is None:
        assert min(losses.values()) > drop / 100
    else:
        assert losses[found] <= drop / 100
        assert found in front.find_front(candidates)


def test_names_go_to_the_best_of_each_objective():
    candidates = [
        float_model(ms=steady(3.0)),
        candidate("good", 500, 1, ms=steady(2.5)),
        candidate("quick", 400, 5, ms=steady(1.0)),
        candidate("small", 200, 9, ms=steady(1.5)),
    ]
    assert front.named(candidates, "good") == {
        "recommended": "good",
        "best quality": "good",
        "smallest": "small",
        "fastest": "quick",
    }


def test_best_quality_is_a_quantized_model_and_ties_go_to_the_lower_error_then_the_smaller_file():
    candidates = [
        float_model(),
        candidate("a", 400, 1, mse=0.2),
        candidate("b", 420, 1, mse=0.1),
        candidate("c", 410, 1, mse=0.1),
    ]
    assert front.named(candidates)["best quality"] == "c"
    assert "best quality" not in front.named([float_model()])


def test_without_latency_nobody_is_the_fastest():
    assert set(front.named([float_model(), candidate("a", 10, 1)])) == {"best quality", "smallest"}


def test_top_k_begins_with_the_trade_off_nearest_the_ideal_then_the_best_of_each_objective():
    candidates = [
        float_model(1000),  # scaled loss, size: (0, 1)
        candidate("best", 900, 1),  # (0.1, 0.89)
        candidate("knee", 200, 2),  # (0.2, 0.11)
        candidate("middle", 150, 6),  # (0.6, 0.06)
        candidate("smallest", 100, 10),  # (1, 0)
    ]
    order = ("knee", "best", "smallest", "middle", "float")
    assert front.top_k(candidates, 9) == order
    for k in range(6):
        assert front.top_k(candidates, k) == order[:k]


def test_top_k_counts_latency_when_all_of_the_front_is_timed():
    slow = candidate("slow", 100, 1, ms=steady(9.0))
    fast = candidate("fast", 110, 1, ms=steady(1.0))
    far = candidate("far", 200, 0, ms=steady(5.0))
    assert front.top_k([slow, fast, far], 1) == ("fast",)
    assert front.top_k([replace(c, latency=None) for c in (slow, fast, far)], 1) == ("slow",)


@pytest.mark.parametrize(("size", "kept"), [(400, 0.0), (100, 1.0), (250, 0.5), (70, 1.1)])
def test_kept_reduction_runs_from_float_to_full_int8(size, kept):
    assert front.size_reduction_kept(size, 400, 100) == pytest.approx(kept)


def test_no_reduction_is_kept_where_full_int8_saves_nothing():
    assert front.size_reduction_kept(400, 400, 400) is None
