"""Files that are either whole or not there, and what a failing disk means to the user.

A file is written under a temporary name in its own folder, flushed to the disk and renamed, and then the
folder is flushed: after `kill -9` or a power cut the old content is there or the new, never a part of one.
"""

import errno
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from quantsieve.errors import RunFolderError

_TEMPORARY = re.compile(r"\.quantsieve-[0-9a-f]{16}\.tmp")
# EFBIG is the limit of the process (ulimit -f) or of the file system: to the user it is the same full disk.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_IN_THE_WAY = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR}


def write_file(path: Path, content: bytes) -> None:
    """Replaces or creates `path` as a whole; its folder must exist. Raises RunFolderError when refused."""
    temporary = path.with_name(f".quantsieve-{secrets.token_hex(8)}.tmp")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _flush_folder(path.parent)
    except OSError as error:
        raise refusal(error, path) from error


def move_file(source: Path, path: Path) -> None:
    """Puts a finished file of the same disk in the place of `path`. Raises RunFolderError when refused."""
    try:
        with source.open("rb") as file:
            os.fsync(file.fileno())
        source.replace(path)
        _flush_folder(path.parent)
    except OSError as error:
        raise refusal(error, path) from error


def make_folder(path: Path) -> None:
    """Creates `path` and its missing parents, each on the disk before the next. Raises RunFolderError."""
    missing = []
    try:
        for folder in (path, *path.parents):
            if folder.is_dir():
                break
            missing.append(folder)
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            _flush_folder(folder.parent)
    except OSError as error:
        raise refusal(error, path) from error


def remove_file(path: Path) -> None:
    """Removes `path` if it is there. Raises RunFolderError when the disk refuses."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise refusal(error, path) from error


def remove_leftovers(folder: Path, deep: bool) -> None:
    """Removes the temporary files that a killed process left in `folder`, and below it where `deep`."""
    try:
        for parent, folders, names in os.walk(folder):
            for name in filter(_TEMPORARY.fullmatch, names):
                Path(parent, name).unlink(missing_ok=True)
            if not deep:
                folders.clear()
    except OSError as error:
        raise refusal(error, folder) from error


def refusal(error: OSError, path: Path) -> RunFolderError:
    """The RunFolderError that tells what `error`, met at `path`, means for the run folder."""
    reason = f"{error.strerror or type(error).__name__} at {path}"
    if error.errno in _FULL:
        return RunFolderError(
            "room for the run folder's files",
            reason,
            "Free some space there (or raise the quota or file size limit), then repeat the command: "
            "what was finished is kept.",
        )
    if error.errno in _FORBIDDEN:
        return RunFolderError(
            "a run folder that can be read and written",
            reason,
            "Choose another folder, or change the permissions of this one.",
        )
    if error.errno in _IN_THE_WAY:
        return RunFolderError(
            "a run folder whose entries have their own kind",
            f"a file in the place of a folder, or a folder in the place of a file ({reason})",
            "Choose another folder, or move what is in the way.",
        )
    return RunFolderError("a run folder on a working disk", reason, "Choose a folder on another disk, or repeat later.")


def _flush_folder(folder: Path) -> None:
    # Some network file systems cannot flush a folder (EINVAL), and a folder may be writable but not
    # readable (EACCES at open). The content is in place then; only its survival of a power cut is not sure.
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EACCES):
            raise
