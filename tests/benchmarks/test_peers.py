"""Rows of peers: scores by layer, what is alike, failures that are rows; scan and plain loop give one score."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.scan.peers import environments
from benchmarks.scan.peers.environments import Failed, Peer, python_of, run_script
from benchmarks.scan.peers.run import row_of
from benchmarks.scan.peers.table import EXACT, RACED, Row, alike, by_layer, score_gaps, table

from quantsieve.sensitivity.metrics import kl_div

COUNT = 8
SCORES = {f"layer{i}": float(i + 1) for i in range(12)}


@pytest.fixture(scope="module")
def records(small_model, tmp_path_factory) -> dict[str, dict]:
    """By row, what our own runners write about the small model."""
    folder = tmp_path_factory.mktemp("peers")
    draw = np.random.default_rng(0)
    arrays = {
        f"{part}/x": draw.standard_normal((COUNT, 3, 8, 8)).astype(np.float32) for part in ("calibration", "samples")
    }
    np.savez(folder / "samples.npz", **arrays)
    found = {}
    for script in ("ours", "plain"):
        call = [small_model, folder / "samples.npz", folder / "out.json", "60"]
        run_script(Path(sys.executable), script, call, 120, is_own=True)
        found |= json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("kind", ["", ", weights"])
def test_the_scan_and_a_file_a_layer_give_one_divergence(records, kind):
    scan, plain = records[f"quantsieve{kind}, exact"], records[f"plain loop, calibrate once{kind}"]
    assert set(scan["scores"]) == set(plain["scores"]) >= {"conv1", "conv2", "dense"}
    for layer, score in scan["scores"].items():
        # Float noise of some 1e-6 of a logit; the smallest divergence here belongs to errors of 1e-3.
        assert plain["scores"][layer] == pytest.approx(score, rel=1e-2)
        assert score > 1e-7


def test_weights_alone_cost_less_divergence_than_all_sources_of_the_worst_layer(records):
    every, weights = records[EXACT]["scores"], records["quantsieve, weights, exact"]["scores"]
    assert max(every.values()) > max(weights.values())


def test_every_record_tells_what_it_ran_and_what_that_took(records):
    for name, record in records.items():
        assert record["timed"] == record["probes"] == len(record["scores"]), name
        assert min(record[key] for key in ("fpe_s", "setup_cpu_s", "probe_cpu_s", "wall_s", "peak_mb")) > 0, name


def test_layers_are_told_with_the_nodes_of_the_given_file(records):
    assert records[EXACT]["nodes"]["conv1"] == ["conv1", "relu1"]


def test_the_divergence_of_peers_is_that_of_the_product(monkeypatch):
    monkeypatch.syspath_prepend(environments.RUNNERS)
    import harness

    draw = np.random.default_rng(0)
    reference, perturbed = draw.normal(size=(2, 5, 7)).astype(np.float32) * 4
    assert harness.kl(reference, perturbed) == pytest.approx(kl_div(reference, perturbed), rel=1e-9)


def test_scores_of_nodes_add_up_over_their_layer():
    nodes = {"conv": ("conv", "clip"), "gemm": ("gemm",), "pool": ("pool",)}
    assert by_layer({"conv": 1.0, "clip": 2.0, "gemm": 5.0, "other": 9.0}, nodes) == {"conv": 3.0, "gemm": 5.0}


def test_the_record_of_a_peer_becomes_a_row_by_layer():
    row = row_of("peer", {"scores": {"clip": 2.0}, "nodes": {}, "probes": 1}, {"conv": ["conv", "clip"]})
    assert (row.scores, row.probes) == ({"conv": 2.0}, 1)


def test_equal_orders_are_alike_and_reversed_ones_are_not():
    assert alike({key: value**3 for key, value in SCORES.items()}, SCORES) == (pytest.approx(1), 10, 12)
    rank, top, _ = alike({key: -value for key, value in SCORES.items()}, SCORES)
    assert (rank, top) == (pytest.approx(-1), 8)


def test_without_a_layer_of_the_worst_ten_no_share_of_them_is_told():
    scores = {key: value for key, value in SCORES.items() if key != "layer11"}
    assert alike(scores, SCORES) == (pytest.approx(1), None, 11)


def test_gaps_are_shares_of_the_exact_score():
    assert score_gaps({"a": 1.1, "b": 2.0, "c": 1.5}, {"a": 1.0, "b": 2.0, "c": 1.0}) == pytest.approx((0.1, 0.5))
    assert score_gaps({"a": 1.1, "b": 2.0}, {"a": 1.0, "b": 0.0}) == pytest.approx((0.1, 0.1))  # none of nothing


def test_costs_are_told_in_float_passes_of_the_own_process_and_as_ratios():
    own = Row(EXACT, fpe_s=1.0, setup_cpu_s=2.0, probe_cpu_s=6.0, probes=12, timed=12, scores=SCORES)
    raced = Row(RACED, fpe_s=1.0, setup_cpu_s=2.0, probe_cpu_s=3.0, probes=12, timed=12, scores=SCORES)
    peer = Row("peer", fpe_s=2.0, setup_cpu_s=4.0, probe_cpu_s=20.0, probes=20, timed=5, scores=SCORES)
    assert (peer.probe_fpe, peer.scan_fpe, own.scan_fpe) == (2.0, 42.0, 8.0)
    cells = [cell.strip() for cell in table([own, raced, peer]).splitlines()[-1].split("|")]
    assert "20 (5 ran)" in cells
    assert "4.0 / 8.0" in cells  # a probe: 2 passes against 0.5 and 0.25
    assert "5.2 / 8.4" in cells  # a scan: 42 passes against 8 and 5


def test_a_peer_that_failed_is_a_line_with_its_reason():
    lines = table(
        [Row(EXACT, probes=1, timed=1, probe_cpu_s=1.0), Row("peer", failure="pip: no such thing")]
    ).splitlines()
    assert "pip: no such thing" in lines[-1]
    assert len({line.count("|") for line in lines}) == 1


def test_a_runner_that_fails_tells_its_last_line(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("raise SystemExit('no opset 99 here')\n", encoding="utf-8")
    (tmp_path / "endless.py").write_text("while True: pass\n", encoding="utf-8")
    monkeypatch.setattr(environments, "RUNNERS", tmp_path)
    with pytest.raises(Failed, match=r"broken: no opset 99 here \(exit 1\)"):
        run_script(Path(sys.executable), "broken", [], 60)
    with pytest.raises(Failed, match="endless did not end within 1 s"):
        run_script(Path(sys.executable), "endless", [], 1)


def test_an_environment_with_these_packages_is_used_again(tmp_path):
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "installed.txt").write_text("a==1 b==2\nc\n", encoding="utf-8")
    assert python_of(Peer("peer", (("a==1", "b==2"), ("c",)), ()), tmp_path) == tmp_path / "peer" / "bin" / "python"


@pytest.mark.slow
def test_what_pip_cannot_install_is_told(tmp_path):
    with pytest.raises(Failed, match=r"pip: .*other\.whl"):
        python_of(Peer("peer", (("./other.whl",),), ()), tmp_path)
