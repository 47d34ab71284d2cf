"""The run folder: facts under their content keys, plans, events, and the settings it was made for.

    run/  spec.json  events.jsonl  lock  facts/STAGE/KEY.{json,npz}  plans/ID/  report/

Every file is written whole (`_atomic`), arrays before the document that names them: where the document is,
the fact is complete. The document carries a checksum of itself and size and hash of the arrays: what a disk
or an editor altered is noticed and computed again. The store knows no stage and decides nothing about them.
"""

import hashlib
import io
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any, TypeVar, overload
from zipfile import BadZipFile

import numpy as np

from quantsieve.errors import RunFolderError
from quantsieve.run._atomic import make_folder, move_file, refusal, remove_file, remove_leftovers, write_file
from quantsieve.run._settings import differences, read_settings, settings_text
from quantsieve.run.codec import Arrays, decode, encode
from quantsieve.run.events import Event, Events, read_events
from quantsieve.run.lock import FolderLock

SCHEMA = 1  # of the fact files: raise it when their form changes; older ones are computed again

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
Fact = TypeVar("Fact")


class _Damaged(Exception):
    """The reason why a fact file cannot be used."""


class Store:
    """One run folder. `open` for the one process that works in it, `read` for anybody who only looks.

    Threads of the working process may share it: every file has a temporary name of its own until it is whole.
    """

    def __init__(self, root: Path, lock: FolderLock | None = None, clock: Callable[[], float] = time.time):
        self.root = root
        self._lock = lock
        self._events = Events(root / "events.jsonl", clock)

    @classmethod
    def open(cls, root: Path, spec: Mapping[str, object], clock: Callable[[], float] = time.time) -> "Store":
        """The run folder for these settings, made where it is missing, locked until `close`.

        spec: what strict JSON can say. Raises RunFolderError when another process is at work in the folder,
        when it was made with other settings (it names them), and when the disk refuses.
        """
        text = settings_text(spec)
        make_folder(root)
        lock = FolderLock.take(root)
        try:
            remove_leftovers(root, deep=False)
            shutil.rmtree(root / "scratch", ignore_errors=True)
            for folder in ("facts", "plans", "report"):
                remove_leftovers(root / folder, deep=True)
            _settle(root, text)
        except BaseException:
            lock.release()
            raise
        return cls(root, lock, clock)

    @classmethod
    def read(cls, root: Path) -> "Store":
        """An existing run folder, to look at, even while a run is at work. Raises RunFolderError."""
        if read_settings(root / "spec.json") is None:
            raise RunFolderError(
                "a run folder with its spec.json",
                f"{root} without a readable one",
                "Name the folder that a run was told to write to.",
            )
        return cls(root)

    @property
    def spec(self) -> dict[str, Any]:
        """The settings that the folder was made for. Raises RunFolderError when spec.json is damaged."""
        settings = read_settings(self.root / "spec.json")
        if settings is None:
            raise RunFolderError("settings in spec.json", f"a damaged one in {self.root}", "Choose another folder.")
        return settings

    def close(self) -> None:
        """Lets the next process in."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def save(self, stage: str, key: str, fact: object) -> None:
        """Stores the fact under stage and key, in place of an older one.

        Raises TypeError when the fact cannot be encoded (see `codec`), RunFolderError when the disk refuses.
        """
        document, arrays = encode(fact)
        target = self.path_for(stage, key, ".npz")
        listed = None
        if arrays:
            content = _npz(arrays)
            self.save_file(target, content)
            listed = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        body = {"stage": stage, "key": key, "arrays": listed, "fact": document}
        whole = {"schema": SCHEMA, "checksum": _checksum(body), **body}
        self.save_file(target.with_suffix(".json"), (json.dumps(whole, allow_nan=False) + "\n").encode("ascii"))
        if not arrays:
            remove_file(target)

    @overload
    def load(self, stage: str, key: str, cls: type[Fact]) -> Fact | None: ...
    @overload
    def load(self, stage: str, key: str, cls: UnionType) -> Any: ...
    def load(self, stage: str, key: str, cls: Any) -> Any:
        """The fact under stage and key; None when there is none or its files were cut off or altered.

        cls: the fact's class, or a union such as `Measured | Failed`. A damaged fact is told in events.jsonl.
        Raises RunFolderError when the disk refuses to read.
        """
        path = self.path_for(stage, key, ".json")
        try:
            return _read_fact(path, stage, key, cls)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise refusal(error, path) from error
        except _Damaged as damage:
            if self._lock is not None:
                fields = {"stage": stage, "key": key}
                self.note("recomputed", f"recomputed: {stage} {key[:12]}, because {damage}", fields)
            return None

    def has(self, stage: str, key: str) -> bool:
        """Whether a fact was stored under stage and key; its files are not checked, `load` does that."""
        return self.path_for(stage, key, ".json").is_file()

    def path_for(self, stage: str, key: str, suffix: str) -> Path:
        """The path of a file that belongs to a fact, for big ones too, such as `.bin` or `.onnx`."""
        return self.root / "facts" / _name(stage) / (_name(key) + suffix)

    def save_file(self, path: Path | str, content: bytes) -> Path:
        """The path of `content`, stored whole or not at all; `path` is in the run folder or relative to it.

        Makes the folders on the way. Raises RunFolderError when the disk refuses.
        """
        assert self._lock is not None, "a store that was opened by `read`, or closed, does not write"
        target = self.root / path
        if not target.is_relative_to(self.root) or ".." in target.parts[len(self.root.parts) :]:
            raise ValueError(f"{path} is not in the run folder")
        make_folder(target.parent)
        write_file(target, content)
        return target

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """An empty folder in the run folder that is removed at the end; after a kill, by the next `open`.

        Raises RunFolderError when the disk refuses what is written there.
        """
        folder = self.root / "scratch" / _name(name)
        make_folder(folder)
        try:
            yield folder
        except OSError as error:
            raise refusal(error, folder) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def take_file(self, source: Path, path: Path) -> None:
        """Moves a file of `scratch` to its place, whole or not at all. Raises RunFolderError when the disk refuses."""
        make_folder(path.parent)
        move_file(source, path)

    def plan_folder(self, plan: str) -> Path:
        """The folder of one plan's files; made where it is missing, unless the store was opened by `read`."""
        folder = self.root / "plans" / _name(plan)
        if self._lock is not None:
            make_folder(folder)
        return folder

    def plans(self) -> tuple[str, ...]:
        """The names of the plans that have a folder, sorted."""
        folder = self.root / "plans"
        return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()

    def note(self, kind: str, text: str, fields: Mapping[str, object] | None = None) -> Event:
        """Appends to events.jsonl. Raises RunFolderError when the disk refuses."""
        assert self._lock is not None, "a store that was opened by `read`, or closed, does not write"
        return self._events.append(kind, text, fields)

    def events(self) -> tuple[Event, ...]:
        """What events.jsonl tells, in order."""
        return read_events(self.root / "events.jsonl")


def _settle(root: Path, text: str) -> None:
    """Makes sure that spec.json says `text`, or raises the RunFolderError that tells why it may not."""
    path = root / "spec.json"
    old = read_settings(path)
    if old is None:
        if any((root / "facts").glob("*/*.json")) or any((root / "plans").glob("*/*")):
            raise RunFolderError(
                "the settings of the run in spec.json",
                f"results in {root} and a missing or damaged spec.json, so nobody knows what they are of",
                "Choose another folder, or put spec.json back.",
            )
        write_file(path, text.encode("ascii"))
    elif named := differences(old, json.loads(text)):
        raise RunFolderError(
            "the settings that the run folder was made with",
            f"others for {root} ({named})",
            "Choose another folder, or repeat the command with the old settings.",
        )


def _read_fact(path: Path, stage: str, key: str, cls: Any) -> Any:
    try:
        whole = json.loads(path.read_bytes())
        if whole["schema"] != SCHEMA:
            raise _Damaged(f"it has schema {whole['schema']} and this version reads {SCHEMA}")
        body = {name: whole[name] for name in ("stage", "key", "arrays", "fact")}
        if whole["checksum"] != _checksum(body):
            raise _Damaged("its document was altered")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Damaged("its document is cut off or no document of ours") from error
    if (body["stage"], body["key"]) != (stage, key):
        raise _Damaged(f"its document is of {body['stage']} {body['key'][:12]}")
    try:
        arrays = _read_arrays(path.with_suffix(".npz"), body["arrays"]) if body["arrays"] else {}
        return decode(body["fact"], arrays, cls)
    except (ValueError, BadZipFile) as error:
        raise _Damaged(str(error)) from error


def _read_arrays(path: Path, listed: Mapping[str, Any]) -> Arrays:
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise _Damaged("its arrays are missing") from error
    with file:
        # Hashed before numpy looks at it: what follows reads only bytes that we wrote.
        if hashlib.file_digest(file, "sha256").hexdigest() != listed["sha256"] or file.tell() != listed["size"]:
            raise _Damaged("its arrays are cut off or altered")
        file.seek(0)
        with np.load(file, allow_pickle=False) as npz:
            return {name: npz[name] for name in npz.files}


def _npz(arrays: Arrays) -> bytes:
    # In memory: a full disk in the middle of a zip file would surface as zipfile's own errors.
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _checksum(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")).hexdigest()


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"{text!r} is no name for a file of the run folder")
    return text
