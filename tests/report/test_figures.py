import builtins
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from run_facts import make_hard_summary, make_summary

from quantsieve.errors import UsageError
from quantsieve.reports._axis import linear_axis, loss_axis, staircase
from quantsieve.reports.figures import RECOMMENDED, front_picture


def test_the_png_is_wide_enough_for_a_readme_and_shows_the_recommended_model():
    image = Image.open(io.BytesIO(front_picture(make_summary())))
    assert image.size == (1344, 752)
    pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    colour = np.asarray([int(RECOMMENDED[i : i + 2], 16) for i in (1, 3, 5)])
    assert (np.abs(pixels - colour).max(axis=1) < 4).sum() > 200


def test_the_same_run_gives_the_same_picture():
    for kind in ("png", "svg"):
        assert front_picture(make_hard_summary(), kind) == front_picture(make_hard_summary(), kind)


def test_the_svg_is_one_and_names_no_date():
    text = front_picture(make_summary(), "svg").decode()
    assert "<svg" in text and "<dc:date>" not in text


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    original = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match="quantsieve\\[viz\\]"):
        front_picture(make_summary())


def test_nothing_measured_is_an_error_not_an_empty_picture():
    summary = make_summary()
    with pytest.raises(UsageError, match="final samples"):
        front_picture(replace(summary, candidates=summary.candidates[-1:]))


def test_losses_of_many_magnitudes_get_a_logarithmic_axis_above_the_budget():
    axis = loss_axis([0.0, 0.003, 0.1, 0.9], max_drop=0.01)
    assert axis.threshold == 0.01
    assert axis.place(0.9) - axis.place(0.1) > 0.15  # on a linear axis 0.003 would lie within 0.003 of 0
    assert axis.place(0.003) - axis.place(0.0) > 0.02
    assert list(axis.ticks) == sorted(set(axis.ticks)) and {0.0, 0.01, 0.5} <= set(axis.ticks)


def test_losses_near_the_budget_get_a_linear_axis_that_holds_them_all():
    axis = loss_axis([-0.01, 0.0, 0.05], max_drop=0.02)
    assert axis.threshold is None and axis.low < -0.01 and axis.high > 0.05
    assert axis.place(axis.low) == 0 and axis.place(axis.high) == 1


@pytest.mark.parametrize("values", [[5.0], [0.0], [4.9, 18.6], [1e-3, 2e-3]])
def test_a_linear_axis_has_a_few_round_ticks_inside(values):
    axis = linear_axis(values)
    assert 2 <= len(axis.ticks) <= 8
    assert axis.low <= axis.ticks[0] and axis.ticks[-1] <= axis.high
    assert all(math.isclose(tick, float(f"{tick:.3g}"), abs_tol=1e-12) for tick in axis.ticks)


def test_the_staircase_goes_down_only():
    assert staircase([(3, 0.1), (1, 0.5), (2, 0.6), (4, 0.1)]) == [(1, 0.5), (3, 0.1)]
