"""A run folder gives back what was saved, notices what was altered, and belongs to one run's settings."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from quantsieve.errors import RunFolderError
from quantsieve.run.store import Store

KEY = "0f" * 32
SPEC = {"model": "m.onnx", "samples": 32, "scheme": {"name": "int8", "axis": 0}}


@dataclass(frozen=True, slots=True)
class Prices:
    name: str
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class Plain:
    score: float


Either = Prices | Plain


def prices(values: object = (1.0, 2.0)) -> Prices:
    return Prices("conv", np.asarray(values))


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob(".quantsieve-*"))


def test_a_saved_fact_is_loaded_again_also_after_reopening(tmp_path):
    with Store.open(tmp_path / "deep" / "run", SPEC) as store:
        assert not store.has("scan", KEY)
        assert store.load("scan", KEY, Prices) is None
        store.save("scan", KEY, prices())
    with Store.open(tmp_path / "deep" / "run", SPEC) as store:
        assert store.has("scan", KEY)
        assert not store.has("price", KEY)
        back = store.load("scan", KEY, Prices)
    assert back.name == "conv"
    np.testing.assert_array_equal(back.values, [1.0, 2.0])
    assert temporaries(tmp_path) == []


def test_a_union_says_which_of_its_classes_may_come_back(tmp_path):
    with Store.open(tmp_path, SPEC) as store:
        store.save("evaluate", "a", prices())
        store.save("evaluate", "b", Plain(0.5))
        assert isinstance(store.load("evaluate", "a", Either), Prices)
        assert store.load("evaluate", "b", Either) == Plain(0.5)


def test_one_fact_is_written_as_the_same_bytes_in_two_runs(tmp_path):
    for folder in ("a", "b"):
        with Store.open(tmp_path / folder, SPEC) as store:
            store.save("scan", KEY, Prices("conv", np.asfortranarray(np.arange(6.0).reshape(2, 3))))
    for suffix in (".json", ".npz"):
        first, second = (tmp_path / folder / "facts" / "scan" / (KEY + suffix) for folder in ("a", "b"))
        assert first.read_bytes() == second.read_bytes()


def test_a_fact_without_arrays_in_place_of_one_with_arrays_leaves_none_behind(tmp_path):
    with Store.open(tmp_path, SPEC) as store:
        store.save("scan", KEY, prices())
        store.save("scan", KEY, Plain(1.0))
        assert store.load("scan", KEY, Plain) == Plain(1.0)
        assert not store.path_for("scan", KEY, ".npz").exists()


def test_threads_may_save_at_once(tmp_path):
    with Store.open(tmp_path, SPEC) as store:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: store.save("scan", f"k{i % 5}", prices(np.full(100, i % 5))), range(40)))
        for i in range(5):
            np.testing.assert_array_equal(store.load("scan", f"k{i}", Prices).values, np.full(100, i))


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("suffix", [".json", ".npz"])
@pytest.mark.parametrize(
    "damage",
    [cut, flip, lambda content: b"", lambda content: content[:-5]],
    ids=["half", "flipped", "empty", "end"],
)
def test_a_damaged_file_makes_the_fact_absent_and_is_told(tmp_path, suffix, damage):
    with Store.open(tmp_path, SPEC, clock=lambda: 7.0) as store:
        store.save("scan", KEY, prices())
        path = store.path_for("scan", KEY, suffix)
        path.write_bytes(damage(path.read_bytes()))
        assert store.load("scan", KEY, Prices) is None
        (event,) = store.events()
        assert (event.time, event.kind, event.fields) == (7.0, "recomputed", {"stage": "scan", "key": KEY})
        assert event.text.startswith(f"recomputed: scan {KEY[:12]}, because its ")
        store.save("scan", KEY, prices())
        assert store.load("scan", KEY, Prices) is not None


def test_every_flipped_byte_of_a_fact_is_noticed(tmp_path):
    with Store.open(tmp_path, SPEC) as store:
        store.save("scan", KEY, prices())
        for suffix in (".json", ".npz"):
            path = store.path_for("scan", KEY, suffix)
            whole = path.read_bytes()
            # The last byte of the document is its line end, which says nothing.
            for i in range(len(whole) - (suffix == ".json")):
                path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
                assert store.load("scan", KEY, Prices) is None, f"{suffix} byte {i}"
            path.write_bytes(whole)
        assert store.load("scan", KEY, Prices) is not None


def other_schema(store: Store) -> None:
    path = store.path_for("scan", KEY, ".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))


def other_key(store: Store) -> None:
    store.save("scan", "other", prices())
    store.path_for("scan", "other", ".json").rename(store.path_for("scan", KEY, ".json"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda store: store.path_for("scan", KEY, ".npz").unlink(), "its arrays are missing"),
        (lambda store: store.save("scan", KEY, Plain(1.0)), "is not a Prices"),
        (other_schema, "it has schema 99 and this version reads 1"),
        (other_key, "its document is of scan other"),
    ],
    ids=["no arrays", "another class", "another schema", "another key"],
)
def test_a_fact_that_is_not_the_one_asked_for_is_absent_with_its_reason(tmp_path, change, reason):
    with Store.open(tmp_path, SPEC) as store:
        store.save("scan", KEY, prices())
        change(store)
        assert store.load("scan", KEY, Prices) is None
        assert reason in store.events()[-1].text


def test_other_settings_are_refused_by_name_and_the_lock_is_given_back(tmp_path):
    Store.open(tmp_path, SPEC).close()
    other = {"model": "m.onnx", "samples": 64, "scheme": {"name": "w4", "axis": 0}, "seed": True}
    with pytest.raises(RunFolderError) as caught:
        Store.open(tmp_path, other)
    assert 'samples: 32 -> 64; scheme.name: "int8" -> "w4"; seed: absent -> true)' in str(caught.value)
    assert "Choose another folder, or repeat the command with the old settings." in str(caught.value)
    assert "m.onnx" not in str(caught.value)
    Store.open(tmp_path, SPEC).close()


def test_settings_are_equal_by_value_not_by_order_or_kind_of_sequence(tmp_path):
    Store.open(tmp_path, {"a": (1, 2), "b": 1, "c": None}).close()
    Store.open(tmp_path, {"c": None, "b": 1.0, "a": [1, 2]}).close()
    with pytest.raises(RunFolderError, match="b: 1 -> true"):
        Store.open(tmp_path, {"a": (1, 2), "b": True, "c": None})


def test_many_differences_are_counted(tmp_path):
    Store.open(tmp_path, {f"s{i:02}": 0 for i in range(20)}).close()
    with pytest.raises(RunFolderError, match=r"s11: 0 -> 1; and 8 more"):
        Store.open(tmp_path, {f"s{i:02}": 1 for i in range(20)})


@pytest.mark.parametrize("broken", [b"", b'{"model": "m', b"[]", None], ids=["empty", "cut off", "list", "missing"])
def test_a_broken_spec_is_rewritten_as_long_as_there_are_no_results(tmp_path, broken):
    def damage() -> None:
        path = tmp_path / "spec.json"
        path.unlink() if broken is None else path.write_bytes(broken)

    Store.open(tmp_path, SPEC).close()
    damage()
    with pytest.raises(RunFolderError, match="a run folder with its spec"):
        Store.read(tmp_path)
    with Store.open(tmp_path, SPEC) as store:
        assert store.spec == SPEC
        store.save("scan", KEY, prices())
        damage()
        with pytest.raises(RunFolderError, match="settings in spec"):
            _ = store.spec
    with pytest.raises(RunFolderError, match="missing or damaged spec") as caught:
        Store.open(tmp_path, SPEC)
    assert "Choose another folder" in str(caught.value)


def test_settings_that_json_cannot_say_never_make_a_folder(tmp_path):
    for odd in (float("nan"), {1, 2}):
        with pytest.raises((ValueError, TypeError)):
            Store.open(tmp_path / "run", {"a": odd})
    assert not (tmp_path / "run").exists()


def test_a_second_store_on_the_folder_is_refused_until_the_first_is_closed(tmp_path):
    with Store.open(tmp_path, SPEC), pytest.raises(RunFolderError, match=rf"process {os.getpid()} at work"):
        Store.open(tmp_path, SPEC)
    Store.open(tmp_path, SPEC).close()


def test_a_run_at_work_can_be_read_and_a_reader_writes_nothing(tmp_path):
    with Store.open(tmp_path, SPEC) as store:
        store.save("scan", KEY, prices())
        store.save("scan", "damaged", Plain(1.0))
        store.path_for("scan", "damaged", ".json").write_bytes(b"{")
        store.save_file(store.plan_folder("p1") / "plan.json", b"{}")
        before = sorted(tmp_path.rglob("*"))
        reader = Store.read(tmp_path)
        assert reader.spec == SPEC
        assert reader.load("scan", KEY, Prices).name == "conv"
        assert reader.load("scan", "damaged", Plain) is None
        assert reader.plans() == ("p1",)
        reader.plan_folder("p2")
        for write in (
            lambda: reader.save("scan", KEY, prices()),
            lambda: reader.note("a", "b"),
            lambda: reader.save_file("report/x", b""),
        ):
            with pytest.raises(AssertionError, match="does not write"):
                write()
        assert sorted(tmp_path.rglob("*")) == before


def test_files_are_saved_inside_the_run_folder_only(tmp_path):
    with Store.open(tmp_path / "run", SPEC) as store:
        path = store.save_file("report/deep/index.html", b"<html>")
        assert path.read_bytes() == b"<html>"
        big = store.path_for("calibrate", KEY, ".bin")
        assert store.save_file(big, b"\0" * 10) == big
        for outside in ("../x", tmp_path / "x", "facts/../../x"):
            with pytest.raises(ValueError, match="not in the run folder"):
                store.save_file(outside, b"")
        for name in ("", "..", "a/b", ".hidden"):
            with pytest.raises(ValueError, match="no name"):
                store.plan_folder(name)
    assert not (tmp_path / "x").exists()


def test_a_missing_folder_is_no_run_to_read(tmp_path):
    with pytest.raises(RunFolderError, match="a run folder with its spec"):
        Store.read(tmp_path / "none")
