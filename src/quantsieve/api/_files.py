"""Files that a user asked for, outside run folders."""

import shutil
from pathlib import Path

from quantsieve.errors import InputError


def copy(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as error:
        raise InputError("a place to write the model", f"{target}: {error}", "Choose another output.") from error


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError("a place to write the result", f"{path}: {error}", "Choose another output.") from error
