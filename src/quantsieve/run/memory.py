"""How much memory a run may take, and what each of its holders gets of it.

The limit is what a run takes beside the model itself, of which one copy may be in memory (a simulated plan has its own
weights). It is kept by planning: every holder has a share of it, and what does not fit is read again from its file.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quantsieve.errors import UsageError
from quantsieve.model.execute import Room

BATCH_BYTES = 256 << 20  # most activations of a batch
LEAST = 64 << 20  # bytes of the smallest limit that can be kept to


@dataclass(frozen=True, slots=True)
class Memory:
    """Shares of `limit` bytes. Larger ones than the upper bounds here bring no more speed."""

    limit: int

    def __post_init__(self) -> None:
        if self.limit < LEAST:
            raise UsageError(f"a memory limit of at least {LEAST >> 20} MiB", f"{self.limit} bytes", "Give more.")

    @property
    def samples(self) -> int:
        """Bytes of decoded samples."""
        return min(1 << 30, self.limit // 8)

    @property
    def batch(self) -> int:
        """Bytes of all activations of one batch."""
        # A power of two: batches, which the names of stored prices depend on, do not change with every limit.
        return min(BATCH_BYTES, 1 << (self.limit // 8).bit_length() - 1)

    @property
    def correction(self) -> int:
        """Bytes of live activations of the samples that biases are corrected on."""
        return min(768 << 20, self.limit // 4)

    def room(self, weight_bytes: int, num_schemes: int) -> Room:
        """For a model with so many bytes of float weights."""
        return Room(
            is_lean=weight_bytes > self.limit // 4,
            values=self.limit // 4,
            keeps_integers=num_schemes * weight_bytes // 4 <= self.limit // 8,
        )


def default_limit() -> int:
    """Half of what this machine, or the container that the process runs in, has free."""
    return max(LEAST, min(_free()) // 2)


def _free() -> Iterator[int]:
    yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        yield 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such control group, or 'max'
            root = Path("/sys/fs/cgroup")
            yield max(0, int((root / limit).read_text()) - int((root / used).read_text()))
