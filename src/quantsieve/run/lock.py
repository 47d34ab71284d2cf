"""The lock that keeps two processes from one run folder.

flock(2) on the file `lock` in the folder: the kernel releases it when the process ends, however it ends.
The file holds the pid of its last holder, for the error text only, and is never removed: a removed lock file
lets two processes lock two files of one name.
"""

import fcntl
import os
import weakref
from pathlib import Path

from quantsieve.errors import RunFolderError
from quantsieve.run._atomic import refusal


class FolderLock:
    """A folder held from `take` until `release` or the end of this process."""

    def __init__(self, descriptor: int):
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def take(cls, folder: Path) -> "FolderLock":
        """The lock on an existing, writable folder.

        Raises RunFolderError, with the pid of the holder, when another process or this one has it.
        """
        path = folder / "lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise refusal(error, path) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # One write of fixed width: a reader sees the old pid or the new one, not a mixture.
            os.pwrite(descriptor, f"{os.getpid():<20}\n".encode(), 0)
        except OSError as error:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise refusal(error, path) from error
            raise RunFolderError(
                f"the run folder {folder} for this command alone",
                f"process {holder or 'unknown'} at work in it",
                "Wait until it has finished, end it, or choose another folder.",
            ) from error
        return cls(descriptor)

    def release(self) -> None:
        """Lets the next process in; harmless when called again."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Closes this process's handle only; where the lock came by fork, its owner keeps it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


# A forked child shares the lock: a worker that outlives a killed run would keep the folder shut.
os.register_at_fork(after_in_child=_forget_all)
