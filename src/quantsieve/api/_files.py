"""Files that a user asked for, outside run folders: whole or not there, and an older one stays until then."""

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from quantsieve.errors import InputError


def copy(source: Path, target: Path) -> None:
    _put(target, "the model", lambda path: shutil.copyfile(source, path))


def write_text(path: Path, text: str) -> None:
    _put(path, "the result", lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _put(target: Path, what: str, write: Callable[[Path], object]) -> None:
    """Raises InputError when the place cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():  # /dev/stdout and pipes are written to; a folder refuses
            write(target)
            return
        real = target.resolve()  # of a link its goal, as writing to it would
        temporary = real.with_name(f".quantsieve-{secrets.token_hex(8)}.tmp")
        try:
            write(temporary)
            os.replace(temporary, real)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"a place to write {what}", f"{target} ({reason})", "Choose another output.") from error
