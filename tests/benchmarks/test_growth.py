"""The growth benchmark's models are what they are said to be, and its figures are those of the two scans."""

import onnx
from benchmarks.scan.growth import Growth, measure_growth, open_stacked, rows_of, stacked, table

from quantsieve.model.units import find_structure


def test_a_stacked_model_has_as_many_layers_as_asked():
    for layers in (10, 20):
        model = stacked(layers)
        onnx.checker.check_model(model)
        assert sum(node.op_type in ("Conv", "Gemm") for node in model.graph.node) == layers


def test_rows_are_the_sources_of_each_layer():
    bench = open_stacked(10)
    rows = rows_of(bench).sources
    assert len(rows) == len(bench.options.schemes) == len(find_structure(bench.graph).quantizable)
    assert all({bench.sources[i].kind for i in row} >= {"tensor"} for row in rows)


def test_a_small_model_is_measured_whole():
    row = measure_growth(20)
    assert 48 <= row.num_exact <= row.num_sources == 51
    assert row.true_rank > 0.999 and row.top_overlap == 1
    assert row.exact_s > 0 and row.screened_s > 0


def test_the_table_says_what_was_measured():
    text = table([Growth(800, 2001, 80.0, 100.0, 16.0, 88, 0.998, 0.9996, 0.9987, 1.0, 500.4, 0.0)])
    line = text.splitlines()[-1]
    assert "| 16 % |" in line and "| **0.100** |" in line and "| 0.998 | 1.000 | 0.999 | 10 of 10 |" in line
