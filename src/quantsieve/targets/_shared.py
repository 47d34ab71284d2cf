"""Arrays that go to a worker by shared memory: the two sides map one file without a name, which no pipe has to carry.

Through the pipe, 1.5 MB of samples took 2.2 ms of processor time on both sides together, by memory 1.1. A request
is pickled with its large arrays out of band (pickle protocol 5); they lie one behind the other in the file, each at a
multiple of `_ALIGNMENT` bytes, and are valid until the answer. One writer, one reader, one request at a time.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from collections.abc import Sequence
from itertools import accumulate

PICKLE_PROTOCOL = 5
_ALIGNMENT = 64  # what vector instructions like; numpy asks for less
_SMALL = 1 << 14  # bytes of an array that the pipe carries as well


class SharedArrays:
    """One side of the file. descriptor: of the file, closed by `close`."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> SharedArrays:
        """The writer's side, of an empty file."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("quantsieve"))
        with tempfile.TemporaryFile(prefix="quantsieve-") as file:
            return cls(os.dup(file.fileno()))

    def close(self) -> None:
        """The descriptor only: arrays that are still held keep the memory."""
        os.close(self.descriptor)
        self._map = None

    def dumps(self, message: object) -> bytes:
        """What `loads` on the other side makes the message of; its large arrays are in the file then."""
        found: list[pickle.PickleBuffer] = []

        def is_inside(buffer: pickle.PickleBuffer) -> bool:
            is_small = memoryview(buffer).nbytes <= _SMALL
            if not is_small:
                found.append(buffer)
            return is_small

        content = pickle.dumps(message, PICKLE_PROTOCOL, buffer_callback=is_inside)
        views = [buffer.raw() for buffer in found]
        sizes = [view.nbytes for view in views]
        if sizes:
            starts, total = _places(sizes)
            if os.fstat(self.descriptor).st_size < total:
                os.ftruncate(self.descriptor, total)
            whole = self._mapped(total)
            for start, view in zip(starts, views, strict=True):
                whole[start : start + view.nbytes] = view
        return pickle.dumps((content, sizes), PICKLE_PROTOCOL)

    def loads(self, content: bytes) -> object:
        """The message; its large arrays refuse writes and are valid until the other side's next one."""
        inner, sizes = pickle.loads(content)
        if not sizes:
            return pickle.loads(inner)
        starts, total = _places(sizes)
        whole = memoryview(self._mapped(total)).toreadonly()
        return pickle.loads(inner, buffers=[whole[a : a + size] for a, size in zip(starts, sizes, strict=True)])

    def _mapped(self, num_bytes: int) -> mmap.mmap:
        if self._map is None or len(self._map) < num_bytes:
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return self._map


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each array begins, and the bytes of all."""
    ends = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    return ends[:-1], ends[-1]
