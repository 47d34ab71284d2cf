"""A probe of a layer by any metric is that metric of the edited model; scans by metrics rank in its direction."""

import json
import math
import re
from functools import cached_property

import numpy as np
import pytest
from test_engine import branches, feeds_of, open_model, reweighted_model, rounded_model, run_off

from quantsieve import api, schemes, tasks
from quantsieve.calibrate import calibrate
from quantsieve.errors import InputError, UsageError
from quantsieve.plan import find_options, forced_tensors
from quantsieve.schemes._static import by_name
from quantsieve.sensitivity import engine, metrics, optimized, probes
from quantsieve.sensitivity.engine import kept_weights
from quantsieve.sensitivity.interval import rank_correlation
from quantsieve.sensitivity.probes import Batch, probe_batch
from quantsieve.sensitivity.ranking import Choice, alone
from quantsieve.weights import NO_CORRECTIONS, Ingredients

COUNT = 3
MEASURES = [metrics.get(name) for name in ("kl_div", "mse", "sqnr", "max_abs", "fidelity")]


def forced_by(graph, layer, options):
    return {name: forced_tensors(graph, layer, schemes.get(name)) for name in options.schemes[layer.name]}


class Setup:
    """The model with branches, its layers and the parts of their probes."""

    def __init__(self):
        self.executor = open_model("branches")
        known = [schemes.get("int8"), schemes.get("int8-channel")]
        graph, structure = self.executor.graph, self.executor.structure
        calibration = calibrate(self.executor, [(feeds_of("branches", seed), COUNT) for seed in range(1, 5)])
        options = find_options(graph, structure, calibration, known)
        self.parts = Ingredients(graph, structure, calibration, NO_CORRECTIONS, by_name(known))
        self.choices = [
            Choice(layer, options.schemes[layer.name], forced_by(graph, layer, options), (), None)
            for layer in structure.quantizable
            if layer.name in options.schemes
        ]
        self.feeds = feeds_of("branches")
        self.batch = Batch(self.feeds, COUNT)

    def probe(self, measures=MEASURES, batch=None, **options):
        return probe_batch(self.executor, batch or self.batch, alone(self.choices), measures, self.parts, **options)

    @cached_property
    def slow(self):
        """Outputs of the edited model by layer and scheme."""
        before = run_off(branches(), self.feeds)
        found = {}
        for choice, scheme in alone(self.choices):
            proto = branches()
            if choice.layer.weight:
                made = kept_weights(self.executor, choice.layer, self.parts.schemes[scheme], *self.facts)
                proto = reweighted_model(proto, choice.layer, *made)
            for root, form in choice.forced[scheme]:
                proto = rounded_model(proto, root, self.parts.calibration.ranges[root].affine(form))
            after = {name.removesuffix("/back"): array for name, array in run_off(proto, self.feeds).items()}
            found[choice.layer.name, scheme] = before, after
        return found

    @property
    def facts(self):
        return self.parts.calibration, self.parts.corrections


@pytest.fixture(scope="module")
def setup():
    found = Setup()
    found.probe()  # opens the engine, which keeps the integers
    return found


def test_every_probe_has_the_values_of_the_edited_model(setup):
    """Single values may be rounded to the next step, as sums of floats differ: below 2 % of an error of many."""
    assert engine.refusal(setup.executor) is None
    kl, mse, sqnr, _peak, fidelity = setup.probe()
    order = [value.name for value in setup.executor.graph.outputs]
    for row, (choice, scheme) in enumerate(alone(setup.choices)):
        before, after = ({n: found[n] for n in order if n in found} for found in setup.slow[choice.layer.name, scheme])
        assert list(kl.outputs) == [name for name in order if name in before] == ["map", "mean", "left"]
        for name in before:
            np.testing.assert_allclose(mse.outputs[name][row], metrics.mse(before[name], after[name]), rtol=0.02)
            np.testing.assert_allclose(kl.outputs[name][row], metrics.kl_div(before[name], after[name]), rtol=0.02)
            wanted = metrics.sqnr(before[name], after[name]).clip(-200, 200)
            np.testing.assert_allclose(sqnr.outputs[name][row], wanted, atol=0.1)
        wanted = 1 - tasks.get("fidelity").score(after, before, None)
        np.testing.assert_allclose(fidelity.totals[row], wanted, rtol=0.02)
        assert mse.totals[row].min() > 0


def test_the_score_of_a_layer_is_the_mean_over_its_outputs(setup):
    kl, *_, fidelity = setup.probe()
    np.testing.assert_allclose(kl.totals, np.mean([kl.outputs[name] for name in kl.outputs], axis=0), rtol=1e-12)
    assert fidelity.outputs == {} and kl.channels == {}


def test_probes_layer_by_layer_are_the_same(setup, monkeypatch):
    def refuse(*_):
        raise optimized.Refused("by the test")

    wanted = setup.probe()
    monkeypatch.setattr(engine, "optimize", refuse)
    other = Setup()
    for got, fast in zip(other.probe(), wanted, strict=True):
        np.testing.assert_allclose(got.totals, fast.totals, rtol=0.02)
    assert engine.refusal(other.executor) == "by the test"


def test_batches_joined_are_one_batch_and_workers_change_nothing(setup):
    one = setup.probe(has_channels=True, measures=[metrics.get("mse")])[0]
    halves = [
        setup.probe([metrics.get("mse")], Batch({"x": setup.feeds["x"][part]}, count), has_channels=True, workers=2)[0]
        for part, count in ((slice(0, 1), 1), (slice(1, 3), 2))
    ]
    joined = probes.join(halves)
    np.testing.assert_allclose(joined.totals, one.totals, rtol=0.02)
    for name in one.outputs:
        np.testing.assert_allclose(joined.outputs[name], one.outputs[name], rtol=0.02)
        np.testing.assert_allclose(joined.channels[name], one.channels[name], rtol=0.02)
        # An output of channels of equal size: its error is the mean of theirs.
        np.testing.assert_allclose(one.channels[name].mean(axis=1), one.outputs[name].mean(axis=1), rtol=1e-9)


def test_batches_of_some_rows_are_joined_with_gaps(setup):
    """The second batch holds every other probe: what it does not say is no number, and means are over what ran."""
    first, second = (Batch({"x": setup.feeds["x"][part]}, n) for part, n in ((slice(0, 1), 1), (slice(1, 3), 2)))
    wanted, measures = alone(setup.choices), [metrics.get("mse")]
    some = np.arange(0, len(wanted), 2)
    parts = [
        probe_batch(setup.executor, batch, [wanted[row] for row in rows], measures, setup.parts, has_channels=True)[0]
        for batch, rows in ((first, range(len(wanted))), (second, some))
    ]
    joined = probes.join(parts, [np.arange(len(wanted)), some])
    whole = setup.probe(measures, has_channels=True)[0]
    others = np.setdiff1d(np.arange(len(wanted)), some)
    np.testing.assert_allclose(joined.totals[some], whole.totals[some], rtol=0.02)
    np.testing.assert_allclose(joined.totals[others, :1], whole.totals[others, :1], rtol=0.02)
    assert np.isnan(joined.totals[others, 1:]).all()
    for name, channels in joined.channels.items():
        np.testing.assert_allclose(channels[some], whole.channels[name][some], rtol=0.02)
        np.testing.assert_array_equal(channels[others], parts[0].channels[name][others])
        np.testing.assert_array_equal(np.isnan(joined.outputs[name]), np.isnan(joined.totals))


def test_progress_is_told_probe_by_probe(setup):
    told = []
    setup.probe([metrics.get("mse")], tell=told.append)
    assert told == list(range(1, len(alone(setup.choices)) + 1))


@pytest.mark.parametrize(("labels", "words"), [(None, "labels for the task"), ([1, 2, 9], "labels from 0 to 6")])
def test_labels_that_a_task_cannot_use_are_told_before_anything_runs(setup, labels, words):
    told = []
    batch = Batch(setup.feeds, COUNT, None if labels is None else np.array(labels))
    with pytest.raises(InputError, match=words):
        setup.probe([metrics.get("accuracy")], batch, tell=told.append)
    assert told == []


def test_outputs_without_an_axis_of_samples_belong_to_one_and_another_shape_is_the_worst():
    reference = {"y": probes._by_sample(np.zeros((4, 2), np.float32), 1)}
    assert reference["y"].shape == (1, 4, 2)
    assert probes._by_sample(np.zeros((6, 2)), 3).shape == (3, 2, 2)
    found = probes._comparable({"y": np.zeros((3, 2), np.float32)}, reference, 1)
    assert metrics.values(metrics.get("mse"), reference, found, None)["y"].tolist() == [np.inf]


# --- the scan -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_mse(small_model, small_data):
    return api.scan(small_model, small_data, samples=8, metric="mse", per_output=True, per_channel=True, drift="off")


def test_a_scan_by_another_metric_ranks_each_layer_under_each_scheme(by_mse, small_model, small_data):
    priced = api.scan(small_model, small_data, samples=8, drift="off")
    assert {(s.layer, s.scheme) for s in by_mse.layers} == {(s.layer, s.scheme) for s in priced.layers}
    values = [s.value for s in by_mse.layers]
    assert values == sorted(values, reverse=True) and all(s.low <= s.value <= s.high for s in by_mse.layers)
    assert (by_mse.metric.name, by_mse.num_samples) == ("mse", 8)
    assert by_mse.layers[0].layer == priced.layers[0].layer  # of one output: errors over its variance


def test_rows_tell_each_output_and_each_channel(by_mse):
    for row in by_mse.layers:
        assert row.outputs == {"logits": pytest.approx(row.value)}
        assert len(row.channels["logits"]) == 4
        assert np.mean(row.channels["logits"]) == pytest.approx(row.value)


def test_an_sqnr_is_ranked_from_the_lowest(small_model, small_data, by_mse):
    found = api.scan(small_model, small_data, samples=8, metric="sqnr", drift="off")
    values = [row.value for row in found.layers]
    assert values == sorted(values) and 0 < values[0] < values[-1] < 200
    assert found.metric.direction == "lower is worse" and found.metric.unit == "dB"
    assert all(row.outputs == {} and row.channels == {} for row in found.layers)
    assert found.layers[0].layer == by_mse.layers[0].layer


def test_a_function_is_a_metric(small_model, small_data, by_mse, tmp_path):
    def twice(reference, perturbed):
        return 2 * metrics.mse(reference, perturbed)

    (tmp_path / "own.py").write_text(
        "import numpy as np\n\n\ndef twice(y, z):\n    return 2 * np.square(z.astype(float) - y).mean(axis=1)\n"
    )
    for metric, name in ((twice, "twice"), (f"{tmp_path}/own.py:twice", f"{tmp_path}/own.py:twice")):
        found = api.scan(small_model, small_data, samples=8, metric=metric, drift="off")
        assert found.metric.name == name
        assert [row.layer for row in found.layers] == [row.layer for row in by_mse.layers]
        for got, one in zip(found.layers, by_mse.layers, strict=True):
            assert got.value == pytest.approx(2 * one.value, rel=1e-6)
    found = api.scan(small_model, small_data, samples=8, metric="quantsieve.sensitivity.metrics:mse", drift="off")
    assert [row.value for row in found.layers] == pytest.approx([row.value for row in by_mse.layers])


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("none.py:f", "none.py, which cannot be loaded.*No such file"),
        ("no_such_module:f", "No module named"),
        ("math:absent", "no such name for absent in math"),
        ("math:pi", "an object of type float"),
    ],
)
def test_a_function_that_is_none_is_told_in_words(small_model, small_data, metric, words):
    with pytest.raises(InputError, match=words):
        api.scan(small_model, small_data, metric=metric)


def test_a_file_that_fails_is_told_with_its_own_error(small_model, small_data, tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(InputError, match="ZeroDivisionError"):
        api.scan(small_model, small_data, metric=f"{tmp_path}/bad.py:f")


def test_the_quality_is_that_of_the_task_that_fits(small_model, small_data):
    arrays = dict(np.load(small_data))
    labelled = api.scan(small_model, small_data, samples=8, metric="quality", drift="off")
    assert labelled.metric.name == "accuracy"
    del arrays["labels"]
    without = api.scan(small_model, arrays, samples=8, metric="quality", drift="off")
    assert without.metric.name == "agreement"
    assert all(0 <= row.value <= 1 for row in without.layers)
    with pytest.raises(InputError, match="labels"):
        api.scan(small_model, arrays, metric="accuracy")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "kl"}, "relative_mse.*kl_div.*quality"),
        ({"metric": "kl_div", "mode": "rescue"}, "the metric relative_mse with the mode rescue"),
        ({"per_output": True}, "relative_mse, which takes all outputs as one"),
        ({"per_channel": True, "metric": "quality"}, "quality, which takes all"),
        ({"per_output": True, "metric": "agreement"}, "agreement, which takes all"),
        ({"per_channel": True, "metric": "top1"}, "value of each channel, found top1"),
        ({"combined_weights": (0, 0)}, "weights"),
        ({"combined_weights": (math.nan, 1)}, "weights"),
    ],
)
def test_what_does_not_go_together_is_wrong_usage(small_model, small_data, options, words):
    with pytest.raises(UsageError, match=words):
        api.scan(small_model, small_data, **options)


def test_a_race_by_a_metric_ends_when_the_order_is_settled(small_model, small_data):
    def certain(reference, perturbed):
        """The same for every sample."""
        return np.full(len(reference), 1.0)

    assert api.scan(small_model, small_data, metric=certain, drift="off").num_samples == 8
    draw = np.random.default_rng(0)

    def open_to_the_end(reference, perturbed):
        """Anything."""
        return draw.exponential(size=len(reference)) ** 4

    search = api.scan(small_model, small_data, metric=open_to_the_end, workers=1, drift="off").num_samples
    assert search > 8
    assert api.scan(small_model, small_data, metric="sqnr", drift="off").num_samples in (8, 16, 32, 64, search)


def test_a_race_by_divergence_probes_first_where_the_model_is_least_sure(small_model, small_data):
    whole = api.scan(small_model, small_data, metric="kl_div", samples=24, per_output=True, drift="off")
    # 24 samples are all there are.
    raced = api.scan(small_model, small_data, metric="kl_div", per_output=True, drift="off")
    assert 8 <= raced.num_samples < 24
    note = next(note for note in raced.notes if "least sure" in note)
    probed = re.search(
        r"over the (\d+) of which .* least sure( \(up to (\d+) for layers whose place was open\))?", note
    )
    assert raced.num_samples == int(probed[3] or probed[1]) and "means over 24 samples" in note
    exact = {(row.layer, row.scheme): row for row in whole.layers}
    rows = {(row.layer, row.scheme): row for row in raced.layers}
    assert rank_correlation(*(np.asarray([found[key].value for key in exact]) for found in (exact, rows))) > 0.95
    for key, row in rows.items():
        assert row.low <= exact[key].value <= row.high
        assert list(row.outputs.values()) == pytest.approx([row.value])  # of the one output, foretold likewise
    assert not any("least sure" in note for note in whole.notes)


def test_the_weights_of_both_errors_rank_the_tensors(small_model, small_data):
    one = api.scan(small_model, small_data, samples=8, combined_weights=(1, 0), drift="off")
    both = api.scan(small_model, small_data, samples=8, drift="off")
    assert (one.combined_weights, both.combined_weights) == ((1, 0), (0.5, 0.5))
    local = [row.local for row in one.tensors]
    assert local == sorted(local, reverse=True)
    assert [row.combined for row in one.tensors] != [row.combined for row in both.tensors]
    assert json.loads(json.dumps(one.document()))["combined_weights"] == {"local": 1, "accumulated": 0}
