"""scan.json and maps of blocks as files."""

import json
import os
import tomllib
from pathlib import Path

from quantsieve.errors import InputError
from quantsieve.sensitivity.scan_document import ScanResult, parse_scan


def load_scan(path: str | os.PathLike[str], model_key: str | None = None) -> ScanResult:
    """The scan in a file. Raises InputError when there is none, or it is not a scan of the model with that key."""
    return parse_scan(_read(Path(path), "a scan.json", "Check the path of the scan."), Path(path).name, model_key)


def load_blocks(path: str | os.PathLike[str]) -> dict[str, str]:
    """Regular expressions by name of block, in the order of the file: TOML, or JSON where the name ends with .json."""
    path = Path(path)
    wanted = "a map of blocks: TOML or JSON with name = regular expression"
    content = _read(path, wanted, "Give auto, stage, half, op_type, or the path of such a file.")
    try:
        found = json.loads(content) if path.suffix == ".json" else tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # both parsers' errors and those of decoding are such
        raise InputError(wanted, f"{path.name}, which cannot be read ({error})", "Correct the file.") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise InputError(wanted, f"{path.name} with other values", "Write one text for each block.")
    return found


def _read(path: Path, wanted: str, todo: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(wanted, f"{path} ({error.strerror or error})", todo) from error
