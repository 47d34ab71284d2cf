"""What `encode` takes, `decode` gives back through strict JSON: values, types, dtypes, nan and order."""

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum, IntEnum, StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Optional

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from quantsieve.errors import InputError
from quantsieve.run.codec import CodecError, decode, encode


class Kind(Enum):
    SMALL = 1
    LARGE = (2, "two")


class Word(StrEnum):
    YES = "yes"


class Level(IntEnum):
    LOW = 0


@dataclass(frozen=True, slots=True)
class Measured:
    loss: float
    per_sample: np.ndarray


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


Outcome = Measured | Failed


@dataclass(frozen=True, slots=True)
class Everything:
    unit: ClassVar[str] = "none"
    text: str
    count: int
    ratio: float
    flag: bool
    nothing: None
    many: tuple[float, ...]
    pair: tuple[str, int]
    empty: tuple[()]
    named: Mapping[str, Outcome]
    plain: dict[str, tuple[int, ...]]
    maybe: float | None
    old_style: Optional[int]  # noqa: UP045
    outcome: Outcome
    mixed: str | float | int | bool | Kind | Word | dict[str, float] | np.ndarray | None
    kind: Kind
    word: Word
    level: Level
    mode: Literal["fast", 1, True, None]
    array: npt.NDArray[Any]
    inner: "Everything | None" = None


ARRAYS = npst.arrays(
    npst.boolean_dtypes() | npst.integer_dtypes(endianness="?") | npst.floating_dtypes() | npst.complex_number_dtypes(),
    npst.array_shapes(min_dims=0, min_side=0, max_side=3),
)
OUTCOMES = st.builds(Measured, st.floats(), ARRAYS) | st.builds(Failed, st.text())
TEXT = st.text() | st.sampled_from(["$float", "$fact", "$", "$$a", "array_0", "\ud800", "nan"])
EVERYTHING = st.builds(
    Everything,
    text=TEXT,
    count=st.integers(),
    ratio=st.floats(),
    flag=st.booleans(),
    nothing=st.none(),
    many=st.lists(st.floats(), max_size=3).map(tuple),
    pair=st.tuples(TEXT, st.integers()),
    empty=st.just(()),
    named=st.dictionaries(TEXT, OUTCOMES, max_size=3),
    plain=st.dictionaries(TEXT, st.lists(st.integers(), max_size=2).map(tuple), max_size=3),
    maybe=st.none() | st.floats(),
    old_style=st.none() | st.integers(),
    outcome=OUTCOMES,
    mixed=st.one_of(
        TEXT,
        st.floats(),
        st.integers(),
        st.booleans(),
        st.sampled_from(Kind),
        st.sampled_from(Word),
        st.dictionaries(TEXT, st.floats(), max_size=2),
        ARRAYS,
        st.none(),
    ),
    kind=st.sampled_from(Kind),
    word=st.sampled_from(Word),
    level=st.sampled_from(Level),
    mode=st.sampled_from(["fast", 1, True, None]),
    array=ARRAYS,
    inner=st.none(),
)


def same(first: object, second: object) -> bool:
    """Equal in value and type at every depth; nan equals nan, -0.0 is not 0.0, dicts in order."""
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if is_dataclass(first):
        return all(same(getattr(first, f.name), getattr(second, f.name)) for f in fields(first))
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    return repr(first) == repr(second)


def there_and_back(fact: object, cls: Any = None) -> Any:
    document, arrays = encode(fact)
    return decode(json.loads(json.dumps(document, allow_nan=False)), arrays, cls or type(fact))


def example(**changes: object) -> Everything:
    whole = Everything(
        "t", 1, 0.5, True, None, (1.0,), ("a", 2), (), {}, {}, None, None, Failed("r"), None,
        Kind.SMALL, Word.YES, Level.LOW, 1, np.zeros(2),
    )  # fmt: skip
    return replace(whole, **changes)


@given(EVERYTHING, EVERYTHING)
def test_a_fact_comes_back_with_its_values_and_types(inner, outer):
    fact = replace(outer, inner=inner)
    assert same(there_and_back(fact), fact)


@given(OUTCOMES)
def test_a_union_is_decoded_to_the_class_that_was_encoded(outcome):
    assert same(there_and_back(outcome, Outcome), outcome)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -0.0, 5e-324])
def test_strict_json_keeps_every_float(value):
    assert repr(there_and_back(example(ratio=value)).ratio) == repr(value)


def test_arrays_come_back_read_only_and_the_original_stays_writable():
    fact = example(array=np.zeros(3))
    back = there_and_back(fact)
    with pytest.raises(ValueError, match="read-only"):
        back.array[0] = 1
    fact.array[0] = 1


def test_a_mapping_view_comes_back_as_a_dict_that_can_go_to_a_worker():
    back = there_and_back(example(named=MappingProxyType({"$a": Failed("x")})))
    assert back.named == {"$a": Failed("x")}
    assert pickle.loads(pickle.dumps(back)).named == back.named


def test_an_int_or_numpy_float_in_a_float_field_comes_back_as_float():
    assert same(there_and_back(example(ratio=3, maybe=np.float64(0.1))), example(ratio=3.0, maybe=0.1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": 1}, r"Everything\.text must be str, not builtins\.int"),
        ({"count": 1.0}, r"Everything\.count must be int"),
        ({"count": True}, r"Everything\.count must be int"),
        ({"flag": 1}, r"Everything\.flag must be bool"),
        ({"ratio": np.float32(1)}, r"Everything\.ratio must be float, not numpy\.float32"),
        ({"many": [1.0]}, r"Everything\.many must be a tuple, not builtins\.list"),
        ({"many": (1.0, "x")}, r"Everything\.many\[1\] must be float"),
        ({"pair": ("a",)}, r"Everything\.pair must be a tuple of 2"),
        ({"named": {1: Failed("x")}}, r"Everything\.named must be a mapping of str"),
        ({"named": {"a": Failed(3)}}, r"Everything\.named\['a'\]\.reason must be str"),
        ({"outcome": "x"}, r"must be Measured.*; .*must be Failed"),
        ({"kind": "SMALL"}, r"Everything\.kind must be Kind"),
        ({"mode": 1.0}, r"Everything\.mode must be one of"),
        ({"array": [1.0]}, r"Everything\.array must be an array"),
        ({"array": np.array(["a"])}, r"Everything\.array must be an array of bool or numbers"),
    ],
)
def test_a_value_that_does_not_fit_its_hint_is_refused_by_the_name_of_its_field(changes, message):
    with pytest.raises(TypeError, match=message):
        encode(example(**changes))


def test_a_union_member_that_fails_half_way_leaves_no_array_behind():
    @dataclass(frozen=True, slots=True)
    class Holder:
        value: tuple[np.ndarray, int] | tuple[np.ndarray, str]

    _, arrays = encode(Holder((np.ones(2), "x")))
    assert list(arrays) == ["array_0"]


def test_a_hint_that_cannot_be_stored_is_refused_when_it_is_saved():
    @dataclass(frozen=True, slots=True)
    class Loose:
        anything: object

    with pytest.raises(TypeError, match="a fact cannot hold"):
        encode(Loose("x"))
    with pytest.raises(TypeError, match="a fact is a dataclass"):
        encode({"a": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"$fact": "Other"},
        {"new_field": 1},
        {"ratio": 1},
        {"ratio": {"$float": "huge"}},
        {"flag": 1},
        {"many": {}},
        {"many": None},
        {"pair": ["a"]},
        {"kind": {"$enum": "Kind.NONE"}},
        {"kind": "SMALL"},
        {"mode": 1.0},
        {"array": {"$array": "array_9"}},
        {"array": [1.0]},
        {"named": {"$a": {"$fact": "Failed", "reason": "x"}}},
        {"named": []},
        {"outcome": {"$fact": "Nothing"}},
    ],
    ids=str,
)
def test_a_document_of_another_shape_is_not_decoded(change):
    document, arrays = encode(example())
    with pytest.raises(CodecError):
        decode({**document, **change}, arrays, Everything)


def test_a_document_without_a_field_is_not_decoded():
    document, arrays = encode(example())
    del document["inner"]
    with pytest.raises(CodecError, match="does not have the fields of Everything"):
        decode(document, arrays, Everything)


@dataclass(frozen=True, slots=True)
class Positive:
    value: int

    def __post_init__(self) -> None:
        if self.value <= 0:
            raise InputError("a positive value", str(self.value), "Change it.")


def test_what_the_class_itself_refuses_is_not_decoded():
    document, arrays = encode(Positive(1))
    with pytest.raises(CodecError, match="Positive: Expected a positive value"):
        decode({**document, "value": -1}, arrays, Positive)
