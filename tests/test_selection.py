"""Which layers a selection keeps float: the rules, from facts to facts."""

import pytest

from quantsieve.errors import UsageError
from quantsieve.selection import EVERYTHING, NOTHING, Node, Selection, Unit, select

# A Conv with its BatchNorm and Relu, a Reshape, a MatMul with its Add, a residual Add, a Softmax, and what makes a
# constant; the last Conv has no name and bears that of its output as a layer.
NODES = (
    Node("/stem/conv", "Conv"),
    Node("/stem/norm", "BatchNormalization"),
    Node("/stem/relu", "Relu"),
    Node("flat: 1", "Reshape", is_layout=True),
    Node("dense", "MatMul"),
    Node("dense/bias, added", "Add"),
    Node("sum", "Add"),
    Node("soft", "Softmax"),
    Node("shape", "Constant"),
    Node("", "Conv"),
)
UNITS = (
    Unit("/stem/conv", "Conv", (0, 1, 2)),
    Unit("dense", "MatMul", (4, 5)),
    Unit("sum", "Add", (6,)),
    Unit("soft", "Softmax", (7,), "no int8 scheme for Softmax"),
    Unit("conv_out", "Conv", (9,)),
)
ALL = {"/stem/conv", "dense", "sum", "conv_out"}


def chosen(**given):
    return select(Selection.of(**given), NODES, UNITS)


def kept(**given):
    return set(chosen(**given).kept)


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        (["/stem/conv"], {"/stem/conv"}),
        (["/stem/norm"], {"/stem/conv"}),  # folded away, and a node of the layer all the same
        (["/stem/relu", "sum"], {"/stem/conv", "sum"}),
        (["dense/bias, added"], {"dense"}),
        (["conv_out"], {"conv_out"}),  # the layer's name: the node has none
        ([r"re:/stem/.*"], {"/stem/conv"}),
        ([r"re:(sum|dense.{0,3})"], {"sum", "dense"}),
        ("sum", {"sum"}),  # a text is one entry
        (["soft", "flat: 1", "shape"], set()),  # nothing to keep, and no mistake
    ],
)
def test_a_layer_is_excluded_by_any_of_its_nodes_or_its_own_name(entries, wanted):
    found = chosen(nodes_to_exclude=entries)
    assert set(found.kept) == wanted
    assert set(found.kept.values()) <= {"kept float by --nodes-to-exclude"}


@pytest.mark.parametrize("entries", [["re:stem"], ["re:/stem"], ["re:sum "], ["SUM"], ["re:"], [""]])
def test_a_match_is_of_the_whole_name(entries):
    with pytest.raises(UsageError, match="names none"):
        chosen(nodes_to_exclude=entries)


def test_with_nodes_to_quantize_all_others_stay_float():
    found = chosen(nodes_to_quantize=["/stem/norm", "sum"])
    assert found.kept == dict.fromkeys(("dense", "conv_out"), "kept float by --nodes-to-quantize")


def test_an_op_type_is_that_of_the_layers_operator():
    assert kept(op_types_to_exclude=["Add"]) == {"sum"}  # a MatMul keeps its bias
    assert kept(op_types_to_exclude=["Conv"]) == {"/stem/conv", "conv_out"}
    assert kept(op_types_to_quantize=["Conv", "MatMul"]) == {"sum"}
    assert kept(op_types_to_exclude=["re:Conv|MatMul"]) == ALL - {"sum"}
    assert kept(op_types_to_exclude=["Relu"]) == set()


def test_the_operator_of_a_call_counts_for_what_its_function_holds():
    units = (Unit("s", "Sigmoid", (0,)), Unit("m", "Mul", (0,)))
    nodes = (Node("swish", "Swish"),)
    for entry, wanted in (("Swish", {"s", "m"}), ("Mul", {"m"})):
        assert set(select(Selection.of(op_types_to_exclude=[entry]), nodes, units).kept) == wanted
    assert set(select(Selection.of(nodes_to_exclude=["swish"]), nodes, units).kept) == {"s", "m"}


def test_exclusion_wins_and_two_inclusions_are_both_needed():
    found = chosen(nodes_to_quantize=["/stem/conv", "dense", "sum"], nodes_to_exclude=["sum"])
    assert found.kept == {"sum": "kept float by --nodes-to-exclude", "conv_out": "kept float by --nodes-to-quantize"}
    both = chosen(nodes_to_quantize=["/stem/conv", "sum"], op_types_to_quantize=["Conv"])
    assert set(both.kept) == ALL - {"/stem/conv"}
    assert both.kept["sum"] == "kept float by --op-types-to-quantize"
    assert kept(op_types_to_quantize=["Conv"], op_types_to_exclude=["Conv"]) == ALL


def test_nothing_given_keeps_nothing():
    assert select(EVERYTHING, NODES, UNITS) == NOTHING
    assert Selection.of() == EVERYTHING and EVERYTHING.document() == {}


def test_order_and_repetition_of_entries_make_no_other_selection():
    first = Selection.of(nodes_to_exclude=["sum", "dense", "sum"])
    assert first == Selection.of(nodes_to_exclude=("dense", "sum"))
    assert first.document() == {"nodes_to_exclude": ["dense", "sum"]}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"nodes_to_exclude": ["denes"]}, r"--nodes-to-exclude, found 'denes', which.* Nearest names: dense"),
        ({"nodes_to_quantize": ["sum", "a", "b"]}, r"--nodes-to-quantize, found 'a' and 1 more,"),
        ({"nodes_to_quantize": [r"re:/stem/con"]}, r"'re:/stem/con',.*/stem/conv.* the whole name"),
        ({"op_types_to_exclude": ["conv"]}, r"'conv', which it lacks\. The model has Add, .*Conv, .*Softmax\."),
        ({"op_types_to_quantize": ["re:Con"]}, r"'re:Con', which it lacks"),
    ],
)
def test_an_entry_that_matches_nothing_is_wrong_usage_with_what_there_is(given, found):
    with pytest.raises(UsageError, match=found):
        chosen(**given)


@pytest.mark.parametrize("entry", ["re:(", "re:a{2,1}", "re:*", 3, None])
def test_what_is_no_pattern_and_no_name_is_wrong_usage_before_any_model_is_read(entry):
    with pytest.raises(UsageError, match="--op-types-to-exclude"):
        Selection.of(op_types_to_exclude=[entry])


def test_notes_count_what_each_entry_matched():
    notes = chosen(nodes_to_exclude=["re:/stem/.*", "soft", "conv_out"]).notes
    assert notes == (
        "--nodes-to-exclude: 'conv_out' matches 0 nodes, 1 layer; 're:/stem/.*' matches 3 nodes, 1 layer; "
        "'soft' matches 1 node, 1 layer (1 of them float in any case)",
        "2 of the 4 layers that could be quantized stay float by hand",
    )


def test_notes_say_why_what_was_to_be_quantized_stays_float():
    names = ["soft", "flat: 1", "shape", "/stem/conv", "sum"]
    notes = chosen(nodes_to_quantize=names, nodes_to_exclude=["sum"]).notes
    told = [note for note in notes if "float stays" in note]
    assert [note.partition("float stays ")[2] for note in told] == [
        "flat: 1: it only passes a tensor on, and has the format of that tensor",
        "sum: kept float by --nodes-to-exclude",
        "soft: no int8 scheme for Softmax",
        "shape: it belongs to no layer: it only makes constants, or nothing reads it",
    ]
    relu = chosen(op_types_to_quantize=["Relu"]).notes
    assert any(note.endswith("/stem/relu: it goes with its layer, whose operator is Conv") for note in relu)
