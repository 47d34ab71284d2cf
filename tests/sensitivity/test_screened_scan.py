"""A screened scan from the door to scan.json: which rows are exact, and how good the others are, is told."""

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from deep_networks import deep, images
from scan_facts import scan_of, score
from scipy.stats import spearmanr

import quantsieve.cli
from quantsieve import api
from quantsieve.errors import InputError, UsageError
from quantsieve.model import aside
from quantsieve.run.spec import Settings
from quantsieve.sensitivity.scan_document import Screen, parse_scan, scan_text


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("deep") / "deep.onnx"
    onnx.save(deep(40), path)
    return path


@pytest.fixture(scope="module")
def data():
    return images(60, 4)


@pytest.fixture(scope="module")
def both(model, data):
    """Screened and exact, under one scheme."""
    return [api.scan(model, data, samples=8, schemes=["int8"], screen=screen, drift="off") for screen in ("on", "off")]


def test_a_screened_scan_ranks_as_the_exact_one(both):
    screened, exact = ({row.layer: row.value for row in scan.layers} for scan in both)
    assert spearmanr([screened[layer] for layer in exact], list(exact.values())).statistic > 0.98
    assert [row.layer for row in both[0].layers[:5]] == [row.layer for row in both[1].layers[:5]]


def test_weights_in_files_are_screened_like_those_in_memory(model, data, both, monkeypatch):
    monkeypatch.setattr(aside, "LARGE", 256)
    found = api.scan(model, data, samples=8, schemes=["int8"], screen="on", drift="off")
    assert found.screen == both[0].screen and found.screen.screened > 0
    assert [row.layer for row in found.layers] == [row.layer for row in both[0].layers]
    assert [row.value for row in found.layers] == pytest.approx([row.value for row in both[0].layers], rel=1e-3)


def test_rows_and_document_say_what_is_exact(both):
    screened, exact = both
    document = json.loads(scan_text(screened))
    flags = [row["exact"] for row in document["layers"]]
    assert flags == [row.is_exact for row in screened.layers] and all(flags[:10]) and not all(flags)
    assert document["screen"]["rank_correlation"] == screened.screen.rank >= 0.95
    assert 0 < document["screen"]["screened"] < document["screen"]["sources"]
    assert any("sources were screened" in note for note in screened.notes)
    assert exact.screen is None and all(row.is_exact for row in exact.layers)
    assert json.loads(scan_text(exact))["screen"] is None and not any("screen" in note for note in exact.notes)


def test_exact_rows_have_the_scores_of_the_exact_scan_and_the_others_wider_intervals(both):
    screened, exact = both
    wanted = {row.layer: row for row in exact.layers}
    for row in screened.layers:
        same, found = wanted[row.layer], (row.high - row.low) / row.value
        if row.is_exact:
            assert row.value == pytest.approx(same.value, rel=1e-5) and row.high == pytest.approx(same.high, rel=1e-5)
        elif row.low > 0:
            assert found > 2 * 1.95 * 0.3 * min(1, screened_spread(screened))


def screened_spread(scan):
    """The factor in the note, as the spread of a logarithm; sums of some sources have at least a third of it."""
    note = next(note for note in scan.notes if "factor" in note)
    return np.log(float(note.split("factor ")[1].rstrip(")")))


def test_a_race_over_several_batches_keeps_its_screen(model, data):
    found = api.scan(model, data, schemes=["int8"], screen="on", drift="off")
    assert found.num_samples > 8 and found.screen.screened > 0  # 8 make the first batch
    again = api.scan(model, data, schemes=["int8"], screen="on", workers=1, drift="off")
    assert found == again


def test_a_small_graph_is_exact_by_itself(small_model, small_data):
    assert api.scan(small_model, small_data, samples=4, drift="off").screen is None


def test_the_command_line_marks_what_was_screened(model, data, tmp_path):
    np.savez(tmp_path / "data.npz", **data)
    command = ["scan", str(model), "--data", str(tmp_path / "data.npz"), "--samples", "4", "--schemes", "int8"]
    done = CliRunner().invoke(quantsieve.cli.program, [*command, "--screen", "on"])
    assert done.exit_code == 0, done.output
    assert "~" in done.stdout and "estimated by the screen" in done.stdout
    done = CliRunner().invoke(quantsieve.cli.program, [*command, "--screen", "off"])
    assert "~" not in done.stdout and "estimated" not in done.stdout


def test_the_screen_is_read_back_and_may_be_absent():
    made = scan_of([2.0, 1.0], screen=Screen(0.97, 48, 100, 500))
    assert parse_scan(scan_text(made), "scan.json") == made
    made = scan_of([2.0], screen=Screen(None, 0, 0, 500))
    assert parse_scan(scan_text(made), "scan.json") == made
    document = json.loads(scan_text(scan_of([2.0])))
    del document["screen"], document["layers"][0]["exact"]
    found = parse_scan(json.dumps(document), "old.json")
    assert found.screen is None and found.layers[0].is_exact
    assert not score("a", 1.0, is_exact=False).is_exact


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["layers"][0].update(exact="yes"), '"yes" instead of true or false as exact'),
        (lambda d: d.update(screen=7), "7 instead of an object as screen"),
        (lambda d: d.update(screen={"rank_correlation": 2}), "2 instead of a number of -1 to 1 or null"),
        (lambda d: d.update(screen={"rank_correlation": None}), "checked of screen"),
    ],
)
def test_a_wrong_screen_is_refused(change, words):
    document = json.loads(scan_text(scan_of([2.0, 1.0])))
    change(document)
    with pytest.raises(InputError) as caught:
        parse_scan(json.dumps(document), "scan.json")
    assert words in str(caught.value)


def test_a_screen_of_another_word_is_wrong_usage(small_model, small_data):
    with pytest.raises(UsageError, match="auto, on or off"):
        api.scan(small_model, small_data, screen="maybe")


def test_run_folders_from_before_the_screen_have_its_default():
    assert "screen" not in Settings().document() and Settings(screen="on").document()["screen"] == "on"
