"""Folders for what a worker writes for a while; those whose owner was killed are removed by the next one's start.

An owner holds flock(2) on its folder, which the kernel releases however the owner ends: a folder that can be locked
has none. Process numbers would not do, since containers that share a folder for temporary files count them apart.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "quantsieve-scratch-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class ScratchFolder:
    """A new empty folder of this process, until `remove` or the next start after this process was killed."""

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        while not self._is_made():
            pass  # another start saw the folder before it was locked, and removed it

    def _is_made(self) -> bool:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            self._descriptor = os.open(self.path, _FOLDER)
        except FileNotFoundError:
            return False
        with suppress(OSError):  # a disk without locks: then nobody removes it either
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        if self.path.exists():
            return True
        os.close(self._descriptor)
        return False

    def remove(self) -> None:
        """Once only."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder, _FOLDER)
        except OSError:
            continue  # gone, no folder, or somebody else's
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
