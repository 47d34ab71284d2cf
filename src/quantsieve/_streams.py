"""The standard streams of the command: stdout holds what we print and nothing else.

Libraries write to descriptor 1 from C (HiGHS was seen to, on large programmes); while a command runs that descriptor
is stderr's, and `sys.stdout` writes to a duplicate of the old one. Only the command does this, never a function of the
library: descriptors belong to the process.
"""

import contextlib
import ctypes
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO

STDIN, STDOUT, STDERR = 0, 1, 2


@contextlib.contextmanager
def own_stdout() -> Iterator[None]:
    """Within it, what C code writes to stdout goes to stderr. A stand-in for stdout is left as it is."""
    _open_closed()
    before = sys.stdout
    if _descriptor(before) != STDOUT:
        yield
        return
    with contextlib.suppress(OSError):
        before.flush()
    own = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    stream = open(own, "w", encoding=before.encoding, errors=before.errors)  # noqa: SIM115 - closed below
    stream.reconfigure(line_buffering=bool(before.line_buffering))
    sys.stdout = stream
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # told already where the command flushed
            stream.flush()
        ctypes.CDLL(None).fflush(None)  # C code's buffers, while the descriptor is still stderr's
        sys.stdout = before
        os.dup2(own, STDOUT)
        with contextlib.suppress(OSError):
            stream.close()


def is_read(stream: TextIO) -> bool:
    """Whether somebody can still read the stream."""
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLOUT)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def discard(stream: TextIO) -> None:
    """Nothing that is written to the stream from now on, or waits in it, goes anywhere; no error either."""
    with contextlib.suppress(OSError, ValueError):  # a stand-in has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _open_closed() -> None:
    """Give closed standard descriptors a file: the next one opened would be taken for the stream, and written to.

    Writing to a stdout that was closed fails, as it does with other tools; stderr and stdin are empty.
    """
    for number, mode in ((STDIN, os.O_RDONLY), (STDOUT, os.O_RDONLY), (STDERR, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            if number == STDOUT:
                sys.stdout = open(number, "w", closefd=False)  # noqa: SIM115 - for the life of the process
            elif number == STDERR:
                sys.stderr = open(number, "w", closefd=False)  # noqa: SIM115


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
