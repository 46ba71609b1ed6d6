"""Append-only files of JSON records, each checked when it is read."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from reprieve.errors import ReprieveError
from reprieve.files import parse_json, whole_lines

Record = TypeVar("Record")
_LARGEST = 1e15  # of any count or time: sums stay exact


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append one record and flush it: a kill after this loses nothing.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values, ensure_ascii=False) + "\n")
        file.flush()


def read_lines(path: Path, what: str, *, repair: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the prefix of an error message and the object of each line. A last line cut off by a kill is dropped.

    Args:
        what: noun for errors, such as "problem record".
        repair: see `whole_lines`.

    Raises:
        ReprieveError: a line is not a JSON object; names file and line.
    """
    for number, line in enumerate(whole_lines(path, repair=repair), start=1):
        where = f"{path}, line {number} is no {what}"
        try:
            values = parse_json(line)
        except ValueError as error:
            raise ReprieveError(f"{where}: {error}") from None
        if not isinstance(values, dict):
            raise ReprieveError(f"{where}: it must be an object, got {type(values).__name__}")
        yield where, values


def record_from(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Build a dataclass from JSON values. Unknown fields are ignored; missing ones take their default.

    Raises:
        ValueError: names the field that is missing, of another type, negative or too large.
    """
    known: dict[str, Any] = {}
    hints = _hints(kind)  # type: ignore[arg-type]
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in values:
            known[field.name] = _converted(field.name, values[field.name], hints[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{field.name} is missing")
    return kind(**known)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _converted(name: str, value: Any, hint: Any) -> Any:
    """Return a JSON value as its field's type: a list may become a tuple, and an object a dataclass."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (option for option in typing.get_args(hint) if option is not types.NoneType)
    kind, items = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        _require(name, value, dict)
        return record_from(typing.cast(type, kind), value)
    if kind in (list, tuple):
        _require(name, value, list)
        return kind(_converted(f"an item of {name}", item, items[0]) for item in value)
    if kind is dict:
        _require(name, value, dict)
        return {key: _converted(f"an item of {name}", item, items[1]) for key, item in value.items()}
    _require(name, value, kind)
    if isinstance(value, int | float) and not 0 <= value < _LARGEST:
        raise ValueError(f"{name} must be 0 or more and below {_LARGEST:g}, got {value!r:.80}")
    return value


def _require(name: str, value: Any, kind: type) -> None:
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r:.80}")
