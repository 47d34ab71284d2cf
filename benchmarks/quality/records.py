"""What a method gave, and its JSON: agreement vectors are kept as bits, so that every figure can be recomputed."""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.quality.fraction import Base, Point

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One measured model of a method. agreement: bool [final samples]. mse: relative squared error of the logits."""

    origin: str
    size_bytes: int
    agreement: np.ndarray
    predicted_mse: float | None = None
    simulated_mse: float | None = None
    measured_mse: float | None = None  # on the samples of the simulation
    final_mse: float | None = None  # on all final samples
    default_disagreement: float | None = None  # forerunner only: without the guards of `forerunner.final_session`

    @property
    def point(self) -> Point:
        return Point(self.size_bytes, self.agreement)


@dataclass(frozen=True, slots=True)
class Method:
    """cpu_s: user and system seconds of the whole method, final evaluation excluded where notes say so.

    num_measured: models measured for it, dropped ones included.
    """

    entries: tuple[Entry, ...]
    cpu_s: float
    num_measured: int
    notes: tuple[str, ...] = ()
    stages: Mapping[str, float] = field(default_factory=dict)  # processor seconds by stage, where known

    @property
    def cpu_s_per_model(self) -> float:
        return self.cpu_s / max(self.num_measured, 1)


@dataclass(frozen=True, slots=True)
class Row:
    """All that is known of one model under one set of schemes. methods: by name."""

    model: str
    kind: str
    num_final: int
    float_bytes: int
    full_int8: Entry  # per tensor, plain rounding: the base of both kinds of rows
    environment: Mapping[str, str]
    methods: Mapping[str, Method] = field(default_factory=dict)

    @property
    def base(self) -> Base:
        return Base(self.float_bytes, self.full_int8.point)


def row_path(folder: Path, model: str, kind: str) -> Path:
    return folder / f"{model}.{kind}.json"


def save_row(row: Row, folder: Path) -> None:
    """Writes the row's file; bits in base64, most significant first."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"schema": SCHEMA, **asdict(row)}
    text = json.dumps(document, indent=1, default=_bits)
    row_path(folder, row.model, row.kind).write_text(text + "\n", encoding="utf-8")


def load_row(folder: Path, model: str, kind: str) -> Row | None:
    """The row that was saved, None when there is none."""
    path = row_path(folder, model, kind)
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    document.pop("schema")
    num_final = document["num_final"]
    methods = {
        name: Method(
            entries=tuple(entry_from(item, num_final) for item in method.pop("entries")),
            notes=tuple(method.pop("notes")),
            **method,
        )
        for name, method in document.pop("methods").items()
    }
    full = entry_from(document.pop("full_int8"), num_final)
    return Row(full_int8=full, methods=methods, **document)


def entry_json(entry: Entry) -> dict[str, Any]:
    """The entry as plain values, bits in base64."""
    return {**asdict(entry), "agreement": _bits(entry.agreement)}


def entry_from(values: Mapping[str, Any], num_final: int) -> Entry:
    """The entry that `entry_json` made the values of."""
    packed = np.frombuffer(base64.b64decode(values["agreement"]), np.uint8)
    bits = np.unpackbits(packed, count=num_final).astype(bool)
    return Entry(**{**values, "agreement": bits})


def _bits(array: object) -> str:
    assert isinstance(array, np.ndarray)
    return base64.b64encode(np.packbits(array.astype(bool)).tobytes()).decode()
