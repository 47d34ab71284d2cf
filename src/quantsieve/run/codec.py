"""Facts to JSON and arrays, and back by their type hints.

A fact is a dataclass of str, int, float, bool, None, enums, Literal, arrays, tuples, mappings of str, other
facts and unions of these. `encode` checks each value against its hint, so what can be saved can be loaded:
decode(*encode(fact), type(fact)) equals the fact, types included (an int where float is said comes back as
float, a numpy.float64 too). JSON has no nan, enum, array or class; they are objects with a name of their own:
{"$float": "nan"}, {"$enum": "Kind.MEMBER"}, {"$array": "array_0"}, {"$fact": "Class", field: value, ...}.
A key of a mapping that begins with "$" gets another "$" before it. Nothing here touches a file.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum, Flag
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NewType,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import numpy as np

from quantsieve.errors import QuantsieveError

Arrays = dict[str, np.ndarray]
Fact = TypeVar("Fact")


class CodecError(ValueError):
    """A document that is not a fact of the class asked for: written by an older class, or damaged."""


def encode(fact: object) -> tuple[dict[str, object], Arrays]:
    """The fact as a document for strict JSON, and the arrays it names, in C order.

    Raises TypeError, which names the field, when a value does not fit its hint or a hint cannot be stored.
    """
    arrays: Arrays = {}
    document = _FactCodec(type(fact)).encode(fact, type(fact).__name__, arrays)
    return document, arrays


@overload
def decode(document: object, arrays: Mapping[str, np.ndarray], cls: type[Fact]) -> Fact: ...
@overload
def decode(document: object, arrays: Mapping[str, np.ndarray], cls: UnionType) -> Any: ...
def decode(document: object, arrays: Mapping[str, np.ndarray], cls: Any) -> Any:
    """The fact of class `cls` (or of one class of the union `cls`); its arrays are read-only.

    Raises CodecError when the document is not such a fact.
    """
    return _codec(cls).decode(document, getattr(cls, "__name__", str(cls)), arrays)


class _Codec(Protocol):
    def encode(self, value: Any, where: str, arrays: Arrays) -> Any: ...

    def decode(self, document: Any, where: str, arrays: Mapping[str, np.ndarray]) -> Any: ...


@cache
def _codec(hint: Any) -> _Codec:
    origin = get_origin(hint)
    if isinstance(hint, NewType):
        return _codec(hint.__supertype__)
    if origin in (Union, UnionType):
        return _UnionCodec(get_args(hint))
    if origin is Literal:
        return _LiteralCodec(get_args(hint))
    if np.ndarray in (hint, origin):
        return _ArrayCodec()
    if origin is tuple:
        return _TupleCodec(get_args(hint))
    if isinstance(origin, type) and issubclass(origin, Mapping) and get_args(hint)[0] is str:
        return _MappingCodec(get_args(hint)[1])
    if isinstance(hint, type) and is_dataclass(hint):
        return _FactCodec(hint)
    if isinstance(hint, type) and issubclass(hint, Enum) and not issubclass(hint, Flag):
        return _EnumCodec(hint)
    if hint is float:
        return _FloatCodec()
    if hint in (str, int, bool, NoneType):
        return _PlainCodec(hint)
    raise TypeError(f"a fact cannot hold {hint}: say it with the types in quantsieve.run.codec")


class _PlainCodec:
    """str, int, bool and None are themselves in JSON."""

    def __init__(self, cls: type):
        self.cls = cls

    def encode(self, value: Any, where: str, arrays: Arrays) -> Any:
        if type(value) is self.cls:
            return value
        if not isinstance(value, self.cls) or isinstance(value, bool | Enum):
            raise _misfit(value, where, self.cls.__name__)
        return self.cls(value)

    def decode(self, document: Any, where: str, arrays: Mapping[str, np.ndarray]) -> Any:
        if type(document) is not self.cls:
            raise CodecError(f"{where} is not {self.cls.__name__}")
        return document


class _FloatCodec:
    """A finite float is a JSON number with a point or exponent; an int is taken as the float it equals."""

    def encode(self, value: Any, where: str, arrays: Arrays) -> Any:
        if not isinstance(value, float | int) or isinstance(value, bool | Enum):
            raise _misfit(value, where, "float")
        value = float(value)
        return value if math.isfinite(value) else {"$float": repr(value)}

    def decode(self, document: Any, where: str, arrays: Mapping[str, np.ndarray]) -> float:
        if isinstance(document, dict):
            document = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(_tagged(document, "$float", where))
        if type(document) is not float:
            raise CodecError(f"{where} is not float")
        return document


class _LiteralCodec:
    """One of a few values that are themselves in JSON; 1 and True are two."""

    def __init__(self, choices: tuple[Any, ...]):
        self.choices = choices

    def encode(self, value: Any, where: str, arrays: Arrays) -> Any:
        if not self._has(value):
            raise _misfit(value, where, f"one of {self.choices}")
        return value

    def decode(self, document: Any, where: str, arrays: Mapping[str, np.ndarray]) -> Any:
        if not self._has(document):
            raise CodecError(f"{where} is none of {self.choices}")
        return document

    def _has(self, value: Any) -> bool:
        return any(type(value) is type(choice) and value == choice for choice in self.choices)


class _EnumCodec:
    def __init__(self, cls: type[Enum]):
        self.cls = cls

    def encode(self, value: Any, where: str, arrays: Arrays) -> Any:
        if type(value) is not self.cls:
            raise _misfit(value, where, self.cls.__name__)
        return {"$enum": f"{self.cls.__name__}.{value.name}"}

    def decode(self, document: Any, where: str, arrays: Mapping[str, np.ndarray]) -> Enum:
        cls, _, name = _tagged(document, "$enum", where).rpartition(".")
        if cls != self.cls.__name__ or name not in self.cls.__members__:
            raise CodecError(f"{where} is not a member of {self.cls.__name__}")
        return self.cls[name]


class _ArrayCodec:
    """Arrays of bool and numbers lie beside the document, under the name it gives."""

    def encode(self, value: Any, where: str, arrays: Arrays) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
            raise _misfit(value, where, "an array of bool or numbers")
        name = f"array_{len(arrays)}"
        arrays[name] = np.asarray(value, order="C")
        return {"$array": name}

    def decode(self, document: Any, where: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        name = _tagged(document, "$array", where)
        if name not in arrays:
            raise CodecError(f"{where} names the array {name!r}, which is not there")
        array = arrays[name].view()
        array.flags.writeable = False
        return array


class _TupleCodec:
    """tuple[X, ...] and tuple[X, Y] are lists in JSON."""

    def __init__(self, hints: tuple[Any, ...]):
        self.repeated = len(hints) == 2 and hints[1] is Ellipsis
        self.parts = tuple(_codec(hint) for hint in (hints[:1] if self.repeated else hints))

    def encode(self, value: Any, where: str, arrays: Arrays) -> Any:
        parts = self._parts(value)
        if type(value) is not tuple or len(parts) != len(value):
            raise _misfit(value, where, "a tuple" if self.repeated else f"a tuple of {len(self.parts)}")
        return [
            part.encode(item, f"{where}[{i}]", arrays) for i, (part, item) in enumerate(zip(parts, value, strict=True))
        ]

    def decode(self, document: Any, where: str, arrays: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
        parts = self._parts(document)
        if not isinstance(document, list) or len(parts) != len(document):
            raise CodecError(f"{where} is not a tuple of its length")
        return tuple(
            part.decode(item, f"{where}[{i}]", arrays)
            for i, (part, item) in enumerate(zip(parts, document, strict=True))
        )

    def _parts(self, items: Any) -> tuple[_Codec, ...]:
        return self.parts * len(items) if self.repeated and isinstance(items, list | tuple) else self.parts


class _MappingCodec:
    """Mapping[str, X] comes back as a dict in the same order: a read-only view cannot be sent to a worker."""

    def __init__(self, hint: Any):
        self.values = _codec(hint)

    def encode(self, value: Any, where: str, arrays: Arrays) -> Any:
        if not isinstance(value, Mapping) or not all(type(key) is str for key in value):
            raise _misfit(value, where, "a mapping of str")
        return {
            "$" * key.startswith("$") + key: self.values.encode(item, f"{where}[{key!r}]", arrays)
            for key, item in value.items()
        }

    def decode(self, document: Any, where: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        if not isinstance(document, dict) or any(key.startswith("$") and key[:2] != "$$" for key in document):
            raise CodecError(f"{where} is not a mapping")
        return {
            key.removeprefix("$"): self.values.decode(item, f"{where}[{key!r}]", arrays)
            for key, item in document.items()
        }


class _UnionCodec:
    """The first member that fits. float comes last because it takes an int too."""

    def __init__(self, hints: tuple[Any, ...]):
        self.members = tuple(_codec(hint) for hint in sorted(hints, key=lambda hint: hint is float))

    def encode(self, value: Any, where: str, arrays: Arrays) -> Any:
        reasons = []
        for member in self.members:
            # A member that fails half-way must leave no array behind.
            count = len(arrays)
            try:
                return member.encode(value, where, arrays)
            except TypeError as error:
                reasons.append(str(error))
                while len(arrays) > count:
                    arrays.popitem()
        raise TypeError("; ".join(reasons))

    def decode(self, document: Any, where: str, arrays: Mapping[str, np.ndarray]) -> Any:
        reasons = []
        for member in self.members:
            try:
                return member.decode(document, where, arrays)
            except CodecError as error:
                reasons.append(str(error))
        raise CodecError("; ".join(reasons))


class _FactCodec:
    """A dataclass: its own name and its fields, all of them and no other."""

    def __init__(self, cls: Any):
        if not is_dataclass(cls):
            raise TypeError(f"a fact is a dataclass, not {cls.__name__}")
        self.cls: Any = cls

    def encode(self, value: Any, where: str, arrays: Arrays) -> Any:
        codecs = _field_codecs(self.cls)
        if type(value) is not self.cls:
            raise _misfit(value, where, self.cls.__name__)
        document = {"$fact": self.cls.__name__}
        for name, codec in codecs.items():
            document[name] = codec.encode(getattr(value, name), f"{where}.{name}", arrays)
        return document

    def decode(self, document: Any, where: str, arrays: Mapping[str, np.ndarray]) -> Any:
        codecs = _field_codecs(self.cls)
        if not isinstance(document, dict) or document.get("$fact") != self.cls.__name__:
            raise CodecError(f"{where} is not a {self.cls.__name__}")
        if document.keys() - {"$fact"} != codecs.keys():
            raise CodecError(f"{where} does not have the fields of {self.cls.__name__}")
        values = {name: codec.decode(document[name], f"{where}.{name}", arrays) for name, codec in codecs.items()}
        try:
            return self.cls(**values)
        except (ValueError, QuantsieveError) as error:  # what the class itself refuses
            raise CodecError(f"{where}: {error}") from error


@cache
def _field_codecs(cls: Any) -> dict[str, _Codec]:
    # Resolved at first use, not in _FactCodec.__init__: a fact may hold facts of its own class.
    hints = get_type_hints(cls)
    return {field.name: _codec(hints[field.name]) for field in fields(cls) if field.init}


def _tagged(document: Any, tag: str, where: str) -> str:
    if not isinstance(document, dict) or document.keys() != {tag} or not isinstance(document[tag], str):
        raise CodecError(f"{where} is not a {tag}")
    return document[tag]


def _misfit(value: Any, where: str, expected: str) -> TypeError:
    cls = type(value)
    return TypeError(f"{where} must be {expected}, not {cls.__module__}.{cls.__qualname__}: {value!r:.80}")
