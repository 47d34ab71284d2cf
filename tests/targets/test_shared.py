"""Arrays that go by shared memory arrive as they were sent, whatever came before them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantsieve.targets._shared import SharedArrays

SIZES = st.lists(st.integers(0, 40_000), min_size=1, max_size=4)
DTYPES = ("float32", "uint8", "int64", "float16", "bool")


@contextmanager
def sides() -> Iterator[tuple[SharedArrays, SharedArrays]]:
    writer = SharedArrays.create()
    reader = SharedArrays(os.dup(writer.descriptor))
    try:
        yield writer, reader
    finally:
        writer.close()
        reader.close()


@given(st.lists(st.tuples(SIZES, st.sampled_from(DTYPES)), min_size=1, max_size=4))
def test_each_message_arrives_with_its_arrays(messages: list[tuple[list[int], str]]) -> None:
    draw = np.random.default_rng(0)
    with sides() as (writer, reader):
        for sizes, dtype in messages:
            sent = {str(i): draw.integers(0, 2, (size,)).astype(dtype) for i, size in enumerate(sizes)}
            kind, found = reader.loads(writer.dumps(("run", sent)))  # type: ignore[misc]
            assert kind == "run" and found.keys() == sent.keys()
            for name, array in sent.items():
                assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(60_000, dtype=np.float32).reshape(200, 300).T,
        np.arange(60_000, dtype=np.float32)[::2],
        np.asfortranarray(np.arange(60_000, dtype=np.float64).reshape(30, 40, 50)),
        np.array(["word"] * 5000, object),
        np.float32(2.5),
    ],
    ids=["transposed", "strided", "fortran", "texts", "scalar"],
)
def test_arrays_of_every_layout_arrive(array: np.ndarray) -> None:
    with sides() as (writer, reader):
        found = reader.loads(writer.dumps(array))
    assert isinstance(found, np.ndarray | np.floating)
    assert found.shape == array.shape and np.array_equal(found, array)


def test_the_message_itself_stays_small() -> None:
    with sides() as (writer, _):
        assert len(writer.dumps({"x": np.zeros((128, 3, 32, 32), np.float32)})) < 1000


def test_the_file_grows_once_for_messages_of_one_size() -> None:
    with sides() as (writer, reader):
        for step in range(3):
            array = np.full((100_000,), step, np.float32)
            assert np.array_equal(reader.loads(writer.dumps(array)), array)  # type: ignore[arg-type]
            assert os.fstat(writer.descriptor).st_size == array.nbytes
