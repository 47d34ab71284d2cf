"""What a sample is: one feed of the model, with a leading batch axis of 1, and perhaps a label.

`Samples` is the seam between sources of data and the stages that run models. A source reads or makes one feed
at a time, so that memory does not grow with the number of samples; `Cached` trades memory for decoding time
and `batches` joins neighbours of equal shape.
"""

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

Feed = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One graph input of the model.

    dtype: numpy name ('float32', 'int64', 'uint8', 'bool') or 'str'. shape: int where fixed, str where
    symbolic, None where unknown; axis 0 is the batch axis where the model has one.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"input '{self.name}' of {self.dtype} [{sizes}]"


@runtime_checkable
class Samples(Protocol):
    """A numbered set of feeds that can be read in any order, any number of times, with the same result."""

    name: str
    labels: np.ndarray | None  # int64 [n], read-only
    notes: tuple[str, ...]  # warnings as facts, for the report

    def __len__(self) -> int: ...

    def feed(self, index: int) -> Feed:
        """One sample as the model takes it: leading batch axis of 1, the input's dtype, C-contiguous.

        Read-only arrays. Raises InputError when the source has become unreadable, IndexError outside 0..n-1.
        """

    def fingerprint(self) -> str:
        """64 hex digits over content, labels and preprocessing; independent of paths and names of files."""


def read_only(array: np.ndarray) -> np.ndarray:
    """A C-contiguous array of the same values that refuses writes; a view where it can be one."""
    view = np.ascontiguousarray(array).reshape(array.shape).view()
    view.setflags(write=False)
    return view


def check_index(index: int, num_samples: int) -> None:
    """Raises IndexError unless 0 <= index < num_samples: a negative index would feed another sample."""
    if not 0 <= index < num_samples:
        raise IndexError(f"sample {index} of {num_samples}")


def content_digest(parts: Iterable[str | bytes | np.ndarray]) -> str:
    """64 hex digits over the parts in order; lengths, dtypes and shapes are part of it."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"array {part.dtype.str} {part.shape};".encode())
            _digest_array(digest, part)
        else:
            data = part.encode() if isinstance(part, str) else part
            digest.update(f"{type(part).__name__} {len(data)};".encode())
            digest.update(data)
    return digest.hexdigest()


def _digest_array(digest: "hashlib._Hash", array: np.ndarray) -> None:
    if array.dtype.kind in "OUS":
        for text in array.reshape(-1).tolist():
            data = text if isinstance(text, bytes) else str(text).encode()
            digest.update(f"{len(data)};".encode() + data)
    elif array.ndim == 0:
        digest.update(array.tobytes())
    else:
        # Row by row: a memory-mapped file must not be copied into memory as a whole.
        for row in array:
            digest.update(np.ascontiguousarray(row).tobytes())


def num_bytes(feed: Mapping[str, np.ndarray]) -> int:
    """Memory of a feed in bytes; the characters of strings are counted, their object headers estimated."""
    total = 0
    for array in feed.values():
        total += array.nbytes
        if array.dtype.kind == "O":
            total += sum(56 + len(str(text)) for text in array.reshape(-1))
    return total


class Cached:
    """The same samples, with feeds kept in memory while they fit into `max_bytes`.

    First come, first kept: the stages read the same samples in the same order again and again, where evicting
    the oldest would miss every time. Safe to use from several threads.
    """

    def __init__(self, samples: Samples, max_bytes: int):
        self.name = samples.name
        self.labels = samples.labels
        self.notes = samples.notes
        self._samples = samples
        self._max_bytes = max_bytes
        self._bytes = 0
        self._feeds: dict[int, Feed] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def kept_bytes(self) -> int:
        """Memory of the feeds kept now."""
        return self._bytes

    def feed(self, index: int) -> Feed:
        kept = self._feeds.get(index)
        if kept is None:
            kept = {name: read_only(array) for name, array in self._samples.feed(index).items()}
            size_bytes = num_bytes(kept)
            with self._lock:
                if index not in self._feeds and self._bytes + size_bytes <= self._max_bytes:
                    self._feeds[index] = kept
                    self._bytes += size_bytes
        # A new dict each time: the arrays refuse writes, the caller may still add or drop names.
        return dict(kept)

    def fingerprint(self) -> str:
        return self._samples.fingerprint()


def batches(samples: Samples, indices: Iterable[int], limit: int) -> Iterator[tuple[np.ndarray, Feed]]:
    """Batches of consecutive samples of equal shapes, at most `limit` samples each, in the given order.

    Yields (int64 indices [b], feed with the arrays concatenated on axis 0). Give limit 1 when the model's
    batch is fixed. A sample with a rank-0 array has no axis to join on and comes alone. Raises ValueError for
    a limit below 1.
    """
    if limit < 1:
        raise ValueError(f"limit of {limit} samples a batch")
    waiting: list[tuple[int, Feed]] = []
    for index in indices:
        feed = samples.feed(int(index))
        if waiting and (len(waiting) == limit or not _can_join(waiting[-1][1], feed)):
            yield _joined(waiting)
            waiting = []
        waiting.append((int(index), feed))
    if waiting:
        yield _joined(waiting)


def _can_join(first: Feed, second: Feed) -> bool:
    return all(array.ndim > 0 and array.shape == second[name].shape for name, array in first.items())


def _joined(waiting: list[tuple[int, Feed]]) -> tuple[np.ndarray, Feed]:
    indices = np.array([index for index, _ in waiting], dtype=np.int64)
    if len(waiting) == 1:
        return indices, waiting[0][1]
    return indices, {name: np.concatenate([feed[name] for _, feed in waiting]) for name in waiting[0][1]}
