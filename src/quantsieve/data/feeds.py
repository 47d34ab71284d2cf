"""Samples from a `CalibrationDataReader` of onnxruntime, or from any iterable of feed dicts.

Such a source may be readable only once and may reuse its buffers, so all feeds are copied into memory, up to
a limit. Where the model's batch is dynamic, feeds of several rows are cut into single samples.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from quantsieve.data.conform import as_feed, cast_note, check_names, fits
from quantsieve.data.samples import Feed, InputSpec, check_index, content_digest, num_bytes, read_only
from quantsieve.errors import InputError

DEFAULT_MAX_BYTES = 2 << 30


class FeedSamples:
    """Feeds kept in memory as they came."""

    labels: np.ndarray | None = None

    def __init__(
        self,
        feeds: Iterable[Mapping[str, object]],
        inputs: Sequence[InputSpec],
        *,
        name: str = "feeds",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ):
        """Raises InputError when there are no feeds, one does not fit, or they exceed `max_bytes`."""
        self.name = name
        self._feeds: list[Feed] = []
        notes: dict[str, None] = {}
        total = 0
        for number, values in enumerate(feeds):
            feed, casts = _checked(values, inputs, f"feed {number} of {name}")
            notes.update(dict.fromkeys(casts))
            total += num_bytes(feed)
            if total > max_bytes:
                raise InputError(
                    f"feeds of {max_bytes} bytes in all at most",
                    f"more in the first {number + 1} of {name}",
                    "Give fewer, or write them into .npy or .npz files.",
                )
            self._feeds += _single_samples(feed, inputs)
        if not self._feeds:
            raise InputError("at least one feed", f"none in {name}", "If it was read before, make a new one.")
        rows = {len(array) for feed in self._feeds for array in feed.values() if array.ndim}
        if max(rows, default=1) > 1 and not _has_fixed_batch(inputs):
            notes["feeds were taken whole: the inputs share no dynamic batch axis to cut them on"] = None
        self.notes = tuple(notes)
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self._feeds)

    def feed(self, index: int) -> Feed:
        check_index(index, len(self._feeds))
        return dict(self._feeds[index])

    def fingerprint(self) -> str:
        if self._digest is None:
            parts: list[str | np.ndarray] = ["feeds"]
            for feed in self._feeds:
                for name in sorted(feed):
                    parts += [name, feed[name]]
            self._digest = content_digest(parts)
        return self._digest


def from_reader(
    reader: object, inputs: Sequence[InputSpec], *, name: str = "reader", max_bytes: int = DEFAULT_MAX_BYTES
) -> FeedSamples:
    """Samples of a reader with `get_next`, read to its end; rewound before and after if it can be."""
    rewind = getattr(reader, "rewind", None)
    if rewind is not None:
        rewind()
    samples = FeedSamples(_read(reader), inputs, name=name, max_bytes=max_bytes)
    if rewind is not None:
        rewind()
    return samples


def _read(reader: object) -> Iterator[Mapping[str, object]]:
    get_next = reader.get_next  # type: ignore[attr-defined]
    # None ends it by onnxruntime's own contract; some readers give an empty dict instead.
    while feed := get_next():
        yield feed


def _checked(values: object, inputs: Sequence[InputSpec], origin: str) -> tuple[Feed, list[str]]:
    """A copy of the feed in the inputs' dtypes, and notes on casts."""
    if not isinstance(values, Mapping):
        raise InputError(
            "a dict of arrays by input name",
            f"{type(values).__name__} as {origin}",
            "Wrap it: {'name': array}.",
        )
    check_names(values, inputs, origin)
    feed: Feed = {}
    notes = []
    for spec in inputs:
        array = np.asarray(values[spec.name])
        if not fits(array.shape, spec) or array.shape[:1] == (0,):
            raise InputError(f"{spec}", f"shape {list(array.shape)} in {origin}", "Feed it as the model takes it.")
        if note := cast_note(array, spec):
            notes.append(note)
        feed[spec.name] = read_only(np.array(as_feed(array, spec), copy=True, order="C"))
    return feed, notes


def _has_fixed_batch(inputs: Sequence[InputSpec]) -> bool:
    return all(isinstance(spec.shape[0], int) for spec in inputs if spec.shape)


def _has_dynamic_batch(inputs: Sequence[InputSpec]) -> bool:
    """Whether axis 0 of every input is dynamic under one name (unknown counts as any name)."""
    if not all(spec.shape for spec in inputs):
        return False
    first_axes = {spec.shape[0] for spec in inputs} - {None}
    return len(first_axes) <= 1 and not any(isinstance(size, int) for size in first_axes)


def _single_samples(feed: Feed, inputs: Sequence[InputSpec]) -> list[Feed]:
    if not _has_dynamic_batch(inputs) or len({len(array) for array in feed.values()}) != 1:
        return [feed]
    num_rows = len(next(iter(feed.values())))
    # Rows are views of the feed's copy: nothing is kept twice.
    return [{name: array[row : row + 1] for name, array in feed.items()} for row in range(num_rows)]
